"""Stores: list the models of a repository and their objects, and read ranges of objects.

Invariant: errors are StoreErrors, with a text without secrets. A store is used by several threads at a time.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, NamedTuple

from shmserve.extras import install_command, outdated
from shmserve.repo.backends import NETWORK, NETWORK_CONFIG
from shmserve.repo.remote.address import PACKAGES, RemoteAddress
from shmserve.repo.remote.cache import CacheFull
from shmserve.repo.remote.credentials import Redactor, client_options

CONNECT_S = 10.0
READ_S = 30.0
"""How long to wait for a connection, and for the next bytes."""
MAX_FILES = 200_000
_MD5 = re.compile(r"[0-9a-f]{32}")
_PART_BYTES = 255
_WEIGHTS = ".safetensors"
_NETWORK_FILES = (_WEIGHTS, ".jinja", ".json", ".model", ".tiktoken", ".txt")
"""Suffixes of the files of a network. Others are the same weights in other formats, and code."""
_CONFIG = NETWORK_CONFIG.encode()


class RemoteFile(NamedTuple):
    """An object. `path`: below the model's directory. `key`: its name for the store. `tag`: another one whenever its
    content is another one (ETag, generation, hash). `digests`: those of its content that the store knows, by algorithm
    (sha256, md5, git). `size`: -1 if the store does not report it.
    """

    path: str
    key: str
    size: int
    tag: str
    digests: Mapping[str, str] = MappingProxyType({})


class StoreError(Exception):
    """The store cannot be used now. `final`: trying again at once is useless."""

    def __init__(self, text: str, final: bool = False) -> None:
        super().__init__(text)
        self.final = final


class Missing(StoreError):
    """The store works, and does not have this model."""


class Changed(StoreError):
    """The object is no longer the one that was listed."""


class NoRanges(StoreError):
    """The store cannot read parts of objects."""


def missing_package(address: RemoteAddress) -> str:
    """What to install for this address; "" if nothing is missing or too old."""
    missing = [name for name in PACKAGES[address.scheme] if find_spec(name) is None]
    if not missing:
        old = outdated(address.extra)
        return f"{address.scheme}:// repositories cannot be used: {old}" if old else ""
    return f"{address.scheme}:// repositories need the package {missing[0]}: {install_command(address.extra)}"


def open_store(address: RemoteAddress, redact: Redactor) -> Store:
    """Raises StoreError, and InvalidRequest for unreadable credentials."""
    if text := missing_package(address):
        raise StoreError(text, final=True)
    if address.extra == "http":
        http: type[Store] = import_module("shmserve.repo.remote.http_store").HttpStore
        return http(address, redact)
    kinds: dict[str, type[Store]] = {"s3": S3Store, "hf": HubStore}
    return kinds.get(address.scheme, Store)(address, redact)


class Store:
    """A store whose fsspec file system lists sizes and tags and reads ranges."""

    def __init__(self, address: RemoteAddress, redact: Redactor) -> None:
        self.address = address
        self._redact = redact
        self._options = client_options(address, redact)
        self._fs = self._call(self._make)

    def models(self) -> list[str]:
        """The directories of the repository."""
        entries: list[dict[str, Any]] = self._call(self._list)
        return sorted(_last(entry["name"]) for entry in entries if entry["type"] == "directory")

    def files(self, model: str) -> list[RemoteFile]:
        """The model's objects, by path. Raises Missing if there is none."""
        root = f"{self._root()}/{model}"
        infos: Mapping[str, dict[str, Any]] = self._call(lambda: self._find(root), model)
        names = [name for name, info in infos.items() if info["type"] == "file" and not name.endswith("/")]
        files = [self._file(root, name, infos[name]) for name in names]
        # Directory markers, which some tools write, and what a local repository ignores too.
        files = [file for file in files if file.path and not _is_hidden(file.path)]
        if not files:
            raise Missing(f"the repository has no model '{model}'")
        return checked(model, files)

    def file(self, name: str) -> RemoteFile:
        """The object of this name in the directory of the address. Raises Missing if there is none."""
        for entry in self._call(self._list):
            if entry["type"] == "file" and _last(entry["name"]) == name:
                return self._file(self._root(), entry["name"], entry)
        raise Missing(f"it has no file '{name}'")

    def read(self, file: RemoteFile, start: int, end: int) -> bytes:
        """These bytes of the object. Raises Changed."""
        data: bytes = self._call(lambda: self._fs.cat_file(file.key, start=start, end=end))
        if len(data) != end - start:
            raise Changed(f"{file.path}: {len(data)} bytes instead of {end - start}")
        return data

    def stream(self, file: RemoteFile, write: Callable[[bytes], None]) -> None:
        """Passes the whole object to `write`. Called if the store cannot read parts, or does not know the size."""
        write(self.read(file, 0, file.size))

    def same_content(self, one: RemoteFile, other: RemoteFile) -> bool:
        """Whether two objects are known to have the same content."""
        return one.size == other.size and bool(one.digests) and one.digests == other.digests

    def digests(self, file: RemoteFile) -> Mapping[str, str]:
        """The digests with which its content is verified, once it has been read."""
        return file.digests

    # ------------------------------------------------------------------------------------ what differs

    def _root(self) -> str:
        scheme, path = self.address.scheme, self.address.path
        return path.partition("/")[2] if scheme == "as" else path

    def _make(self) -> Any:
        module, name = {
            "gs": ("gcsfs", "GCSFileSystem"),
            "as": ("adlfs", "AzureBlobFileSystem"),
            "hf": ("huggingface_hub", "HfFileSystem"),
        }[self.address.scheme]
        listings = {"use_listings_cache": False} if self.address.scheme != "hf" else {}
        return getattr(import_module(module), name)(skip_instance_cache=True, **(listings | self._options))

    def _list(self) -> Any:
        self._fs.invalidate_cache()
        return self._fs.ls(self._root(), detail=True)

    def _find(self, root: str) -> Any:
        self._fs.invalidate_cache()
        return self._fs.find(root, detail=True)

    def _file(self, root: str, name: str, info: Mapping[str, Any]) -> RemoteFile:
        digests = _digests(info)
        tag = info.get("etag") or info.get("blob_id") or info.get("generation") or info.get("last_modified")
        return RemoteFile(name[len(root) :].lstrip("/"), name, int(info.get("size") or 0), str(tag or ""), digests)

    def _call(self, work: Callable[[], Any], model: str = "") -> Any:
        """Runs work, and translates what clients raise: each has errors of its own."""
        try:
            return work()
        except (StoreError, CacheFull):
            raise
        except FileNotFoundError as error:
            if model:
                raise Missing(f"the repository has no model '{model}'") from error
            raise StoreError("no such bucket or directory, or an object was removed") from error
        except PermissionError as error:
            raise StoreError(f"access denied: {self._text(error)}", final=True) from error
        except Exception as error:
            raise StoreError(self._text(error)) from error

    def _text(self, error: BaseException) -> str:
        return self._redact(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)


class S3Store(Store):
    """Each range is read with the condition that the object has not changed."""

    def __init__(self, address: RemoteAddress, redact: Redactor) -> None:
        super().__init__(address, redact)
        self._encrypted: set[str] = set()
        """Keys of objects whose ETag is not the MD5 of their content."""

    def _make(self, anonymous: bool = False) -> Any:
        s3fs = import_module("s3fs")
        config = {"connect_timeout": CONNECT_S, "read_timeout": READ_S, "retries": {"max_attempts": 2}}
        filesystem = s3fs.S3FileSystem(
            endpoint_url=self.address.endpoint or None,
            anon=anonymous,
            config_kwargs=config,
            skip_instance_cache=True,
            use_listings_cache=False,
            **self._options,
        )
        filesystem.retries = 2  # downloads have attempts of their own
        return filesystem

    def _list(self) -> Any:
        return self._fs.ls(self._root(), detail=True, refresh=True)

    def _find(self, root: str) -> Any:
        return self._fs.find(root, detail=True, refresh=True)

    def _file(self, root: str, name: str, info: Mapping[str, Any]) -> RemoteFile:
        tag = str(info.get("ETag", "")).strip('"')
        digests = {"md5": tag} if _MD5.fullmatch(tag) else {}
        return RemoteFile(name[len(root) :].lstrip("/"), name, int(info["size"]), tag, digests)

    def read(self, file: RemoteFile, start: int, end: int) -> bytes:
        bucket, _, key = file.key.partition("/")
        span = f"bytes={start}-{end - 1}"
        answer, data = self._call(lambda: self._get(Bucket=bucket, Key=key, Range=span, IfMatch=f'"{file.tag}"'))
        if answer.get("ETag", "").strip('"') != file.tag or len(data) != end - start:
            raise Changed(f"{file.path} changed")
        if str(answer.get("ServerSideEncryption", "")).startswith("aws:kms") or answer.get("SSECustomerAlgorithm"):
            self._encrypted.add(file.key)
        return data  # type: ignore[no-any-return]

    def digests(self, file: RemoteFile) -> Mapping[str, str]:
        return {} if file.key in self._encrypted else file.digests

    def _get(self, **request: str) -> tuple[Mapping[str, Any], bytes]:
        from fsspec.asyn import sync

        answer = self._fs.call_s3("get_object", **request)
        return answer, sync(self._fs.loop, answer["Body"].read)

    def _call(self, work: Callable[[], Any], model: str = "") -> Any:
        try:
            return super()._call(work, model)
        except StoreError as error:
            cause = error.__cause__
            code = _code(cause)
            if code in ("PreconditionFailed", "412", "InvalidRange", "416"):
                raise Changed("an object changed while it was read") from cause
            if type(cause).__name__ != "NoCredentialsError":
                raise
        # A public bucket: there are no credentials anywhere.
        self._fs = self._make(anonymous=True)
        return super()._call(work, model)


class HubStore(Store):
    """A store of Hugging Face. A directory with a network is a repository of one model, which vLLM runs: its files are
    those of version 1."""

    @cached_property
    def network(self) -> str:
        """The name of that model; "": the directory is like those of other stores, or is an owner of repositories."""
        owner, _, name = self.address.path.rpartition("/")
        entries = self._call(self._list) if owner else ()
        files = {_last(entry["name"]) for entry in entries if entry["type"] == "file"}
        has_network = NETWORK in files and any(file.endswith(_WEIGHTS) for file in files)
        return name.partition("@")[0] if has_network else ""

    def models(self) -> list[str]:
        return [self.network] if self.network else super().models()

    def files(self, model: str) -> list[RemoteFile]:
        if not self.network:
            return super().files(model)
        if model != self.network:
            raise Missing(f"the repository has no model '{model}'")
        root = self._root()
        files = [self._file(root, entry["name"], entry) for entry in self._call(self._list) if entry["type"] == "file"]
        chosen = [file._replace(path=f"1/{file.path}") for file in files if file.path.endswith(_NETWORK_FILES)]
        return checked(model, [*chosen, RemoteFile("config.pbtxt", "", len(_CONFIG), "1")])

    def read(self, file: RemoteFile, start: int, end: int) -> bytes:
        return super().read(file, start, end) if file.key else _CONFIG[start:end]


def _code(error: BaseException | None) -> str:
    """The code of S3's answer. The client's error may be the cause of another one."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
        error = error.__cause__
    return ""


def _digests(info: Mapping[str, Any]) -> dict[str, str]:
    """The digests of an entry of Google Cloud Storage, Azure or Hugging Face."""
    if info.get("md5Hash"):
        return _md5(info["md5Hash"])
    settings = info.get("content_settings")
    if settings:
        value = settings.get("content_md5") if isinstance(settings, dict) else getattr(settings, "content_md5", None)
        return {"md5": bytes(value).hex()} if value else {}
    lfs = info.get("lfs")
    if lfs:
        return {"sha256": lfs["sha256"] if isinstance(lfs, dict) else lfs.sha256}
    return {"git": info["blob_id"]} if info.get("blob_id") else {}


def _md5(text: str) -> dict[str, str]:
    try:
        return {"md5": base64.b64decode(text, validate=True).hex()}
    except (binascii.Error, ValueError):
        return {}


def checked(model: str, files: list[RemoteFile]) -> list[RemoteFile]:
    """The files, by path. They become paths on this machine, whatever a store calls its objects. Raises StoreError."""
    if len(files) > MAX_FILES:
        raise StoreError(f"'{model}' has more than {MAX_FILES} files; is it a model?", final=True)
    folders = {file.path[:at] for file in files for at, char in enumerate(file.path) if char == "/"}
    for file in files:
        if not is_safe(file.path):
            raise StoreError(f"'{model}' has an object whose name cannot be that of a file: {file.path[:100]!r}", True)
        if file.path in folders:
            raise StoreError(f"'{model}' has {file.path!r} both as an object and as a directory", final=True)
    return sorted(files)


def is_safe(path: str) -> bool:
    parts = path.split("/")
    return all(
        part not in ("", ".", "..") and part.isprintable() and "\\" not in part and len(part.encode()) <= _PART_BYTES
        for part in parts
    )


def _is_hidden(path: str) -> bool:
    return path.startswith(".") or "/." in path


def _last(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2]
