"""Mirroring from fakes of the APIs of Hugging Face, Google Cloud Storage and Azure, through the real clients."""

from __future__ import annotations

import base64
import hashlib
import json
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from tests.support.repo.mirrored import PIECE, data_of, mirrored
from tests.support.repo.object_store import web_server

pytestmark = pytest.mark.process


class _StandIn(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    content_type = "application/json"
    files: ClassVar[dict[str, bytes]] = {}
    damaged: ClassVar[set[str]] = set()
    """Names of `files` that are sent as zeros."""

    def send_range(self, data: bytes, damaged: bool) -> None:
        span = self.headers.get("Range") or self.headers.get("x-ms-range")
        first, _, last = (span or f"bytes=0-{len(data) - 1}").removeprefix("bytes=").partition("-")
        piece = data[int(first) : int(last) + 1]
        span = f"bytes {first}-{int(first) + len(piece) - 1}/{len(data)}" if span else ""
        self.send(bytes(len(piece)) if damaged else piece, 206 if span else 200, Content_Range=span)

    def send(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Type", self.content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"x"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def mirror_changes(kind: type[_StandIn], url: str, cache: Path) -> None:
    """A model's content is compared with the store's MD5, and a change is followed."""
    data = data_of(3 * PIECE)
    kind.files = {"served/m/config.pbtxt": b"name", "served/m/1/model.bin": data, "served/n/config.pbtxt": b""}
    kind.damaged = {"served/m/1/model.bin"}
    with mirrored(url, cache) as mirror:
        assert "model.bin: the MD5 of what was downloaded is not the store's" in mirror.sync().text
        kind.damaged = set()
        assert mirror.sync().state == "published"
        assert mirror.files() == {"config.pbtxt": b"name", "1/model.bin": data}
        assert mirror.sync().state == "unchanged"
        kind.files["served/m/config.pbtxt"] = b"other"
        assert mirror.sync().state == "published"
        assert mirror.files()["config.pbtxt"] == b"other"
        assert mirror.sync("zz").state == "absent"


class _Hub(_StandIn):
    """The required part of the hub's API, with the repository `owner/models`: one small file, one in LFS."""

    tokens: ClassVar[set[str]] = set()

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0])
        self.tokens.add(self.headers.get("Authorization", ""))
        if path.startswith("/owner/models/resolve/main/"):
            name = path.removeprefix("/owner/models/resolve/main/")
            if name in self.files:
                self.send_range(self.files[name], name in self.damaged)
            else:
                self.send(b"{}", 404)
        elif path.startswith("/api/models/owner/models/tree/main"):
            below = path.removeprefix("/api/models/owner/models/tree/main").strip("/")
            self.send(json.dumps(self._tree(below, "recursive=true" in self.path.lower())).encode())
        elif path.startswith("/api/models/owner/models"):
            self.send(json.dumps({"id": "owner/models", "sha": "0" * 40, "siblings": []}).encode())
        else:
            self.send(b"{}", 404)

    do_HEAD = do_GET

    def _tree(self, below: str, deep: bool) -> list[dict[str, Any]]:
        entries: dict[str, dict[str, Any]] = {}
        for name, data in self.files.items():
            rest = name.removeprefix(f"{below}/").split("/") if below else name.split("/")
            if below and not name.startswith(f"{below}/"):
                continue
            for depth in range(1, len(rest) if deep else 2):
                if depth < len(rest):
                    folder = "/".join([*([below] if below else []), *rest[:depth]])
                    entries[folder] = {"type": "directory", "oid": "1" * 40, "size": 0, "path": folder}
            if deep or len(rest) == 1:
                git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
                entries[name] = {"type": "file", "oid": git, "size": len(data), "path": name}
                if name.endswith(".bin"):
                    lfs = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 100}
                    entries[name] |= {"lfs": lfs, "oid": "2" * 40}
        return list(entries.values())


def test_hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses a fake of the API. The content is compared with git's hash, or with the SHA-256 of a large file."""
    pytest.importorskip("huggingface_hub")
    data = data_of(3 * PIECE)
    _Hub.files = {"served/m/config.pbtxt": b"name", "served/m/1/model.bin": data, "README.md": b"x"}
    _Hub.damaged = {"served/m/1/model.bin"}
    with web_server(_Hub) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("HF_TOKEN", "hf_secretsecret")
        with mirrored("hf://owner/models/served", tmp_path / "cache") as mirror:
            outcome = mirror.sync()
            assert outcome.state == "failed"
            assert "model.bin: the SHA-256 of what was downloaded is not the store's" in outcome.text
            _Hub.damaged = {"served/m/config.pbtxt"}
            assert "config.pbtxt: the git hash of what" in mirror.sync().text
            _Hub.damaged = set()
            assert mirror.sync().state == "published"
            assert mirror.files() == {"config.pbtxt": b"name", "1/model.bin": data}
            assert mirror.sync().state == "unchanged"
            assert _Hub.tokens >= {"Bearer hf_secretsecret"}
            assert "hf_secretsecret" not in outcome.text


class _Google(_StandIn):
    """The required part of the JSON API of Google Cloud Storage, with the bucket `b`."""

    def do_GET(self) -> None:
        path, query = unquote(urlsplit(self.path).path), parse_qs(urlsplit(self.path).query)
        name = path.partition("/o/")[2]
        if path.endswith("/b/b/o"):
            self.send(json.dumps(self._list(query.get("prefix", [""])[0], query.get("delimiter", [""])[0])).encode())
        elif name in self.files and "/download/" in path:
            self.send_range(self.files[name], name in self.damaged)
        else:
            self.send(b"{}", 404)

    def _list(self, prefix: str, delimiter: str) -> dict[str, Any]:
        names = [name for name in self.files if name.startswith(prefix)]
        inside = [name for name in names if not (delimiter and delimiter in name.removeprefix(prefix))]
        folders = {prefix + name.removeprefix(prefix).split("/")[0] + "/" for name in names if name not in inside}
        return {"items": [self._object(name) for name in inside], "prefixes": sorted(folders)}

    def _object(self, name: str) -> dict[str, str]:
        data = self.files[name]
        md5 = base64.b64encode(hashlib.md5(data).digest()).decode()
        size, tag = str(len(data)), hashlib.sha256(data).hexdigest()
        return {"name": name, "bucket": "b", "size": size, "etag": tag, "generation": "1", "md5Hash": md5}


def test_google(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gcsfs")
    monkeypatch.setenv("HOME", str(tmp_path))  # without credentials
    with web_server(_Google) as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        mirror_changes(_Google, "gs://b/served", tmp_path / "cache")


_TIME = "Mon, 27 Jul 2009 12:28:53 GMT"
_BLOB = """<Blob><Name>{name}</Name><Properties><Creation-Time>{time}</Creation-Time>
<Last-Modified>{time}</Last-Modified><Etag>0x{tag}</Etag><Content-Length>{size}</Content-Length><Content-Type>application/octet-stream</Content-Type>
<Content-MD5>{md5}</Content-MD5><BlobType>BlockBlob</BlobType></Properties></Blob>"""
_LISTING = """<?xml version="1.0" encoding="utf-8"?><EnumerationResults ServiceEndpoint="http://x/" ContainerName="c">
<Blobs>{blobs}</Blobs><NextMarker/></EnumerationResults>"""


class _Azure(_StandIn):
    """The required part of the API of Azure Blob Storage, with the container `c` of the account `acc`."""

    content_type = "application/xml"

    def do_GET(self) -> None:
        path, query = unquote(urlsplit(self.path).path), parse_qs(urlsplit(self.path).query)
        name = path.removeprefix("/acc/c/")
        if query.get("comp") == ["list"]:
            listing = self._list(query.get("prefix", [""])[0], query.get("delimiter", [""])[0])
            self.send(_LISTING.format(blobs=listing).encode())
        elif name in self.files:
            self.send_range(self.files[name], name in self.damaged)
        else:
            self.send(b"", 404, x_ms_error_code="BlobNotFound")

    do_HEAD = do_GET

    def _list(self, prefix: str, delimiter: str) -> str:
        names = sorted(name for name in self.files if name.startswith(prefix))
        inside = [name for name in names if not (delimiter and delimiter in name.removeprefix(prefix))]
        folders = {prefix + name.removeprefix(prefix).split("/")[0] + "/" for name in names if name not in inside}
        prefixes = [f"<BlobPrefix><Name>{folder}</Name></BlobPrefix>" for folder in sorted(folders)]
        return "".join([*map(self._blob, inside), *prefixes])

    def _blob(self, name: str) -> str:
        data = self.files[name]
        md5, tag = base64.b64encode(hashlib.md5(data).digest()).decode(), hashlib.sha256(data).hexdigest()
        return _BLOB.format(name=name, time=_TIME, tag=tag, size=len(data), md5=md5)


def test_azure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("adlfs")
    key = base64.b64encode(b"a secret of Azure").decode()
    with web_server(_Azure) as url:
        account = f"DefaultEndpointsProtocol=http;AccountName=acc;AccountKey={key};BlobEndpoint={url}/acc;"
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", account)
        mirror_changes(_Azure, "as://acc/c/served", tmp_path / "cache")
