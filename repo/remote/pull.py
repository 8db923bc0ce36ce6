"""Downloads one model into a model repository on this machine.

    <repository>/.pull/<key>/   a cache of this address, which is removed once the model is complete

Invariant: the model appears at once and complete. Until then, what has arrived is kept, and the next pull resumes it.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from shmserve.errors import InvalidRequest, NotFound, Unavailable
from shmserve.repo.config.outline import escaped
from shmserve.repo.files.safe_paths import MODEL_NAME, NAME_RULE
from shmserve.repo.remote.address import RemoteAddress, parse_address
from shmserve.repo.remote.cache import CacheFull, CacheSlot, RemoteCache
from shmserve.repo.remote.credentials import Redactor
from shmserve.repo.remote.download import PAUSE_S, PIECE_BYTES, Download
from shmserve.repo.remote.stores import HubStore, Missing, RemoteFile, Store, StoreError, open_store

CONNECTIONS = 8
SHOWN = 8
"""Files that an error names."""
_NO_LIMIT = 1 << 62
_ONE_FILE = (".gguf", ".onnx", ".plan", ".pt", ".pt2", ".tflite")
"""Suffixes of models that are one file."""


class PullPlan(NamedTuple):
    """What is downloaded: path in the model's directory -> object."""

    name: str
    files: Mapping[str, RemoteFile]

    @property
    def size(self) -> int:
        return sum(max(file.size, 0) for file in self.files.values())


class Pull:
    """`name` of the model; "": that of the file or directory. `max_bytes` is the limit of its size; 0: no limit.
    Raises InvalidRequest, NotFound or Unavailable."""

    def __init__(self, url: str, repository: Path, name: str, max_bytes: int) -> None:
        self._address = parse_address(url)
        self._repository = repository
        self._max_bytes = max_bytes or _NO_LIMIT
        try:
            self._store, self.plan = _planned(self._address, name)
        except Missing as error:
            raise NotFound(f"{self._address}: {error}") from error
        except StoreError as error:
            raise Unavailable(f"{self._address}: {error}") from error
        if not MODEL_NAME.fullmatch(self.plan.name):
            raise InvalidRequest(f"'{escaped(self.plan.name)}' cannot be the name of a model; expected {NAME_RULE}")
        if self.plan.size > self._max_bytes:
            raise InvalidRequest(
                f"the model has {self.plan.size} bytes, more than the limit of {max_bytes} (--max-size)"
            )
        self.folder = repository / self.plan.name
        if self.folder.exists():
            raise InvalidRequest(f"{self.folder} exists; remove it, or choose another --name")

    def run(self, advance: Callable[[int], None]) -> None:
        """`advance(bytes)` is called for what has arrived, first for what an earlier pull has downloaded, by several
        threads. Raises Unavailable, and OSError if the repository cannot be written."""
        root = self._repository / ".pull" / self._address.key
        slot = CacheSlot.acquire(root, [])
        try:
            if slot.folder.name != "0":
                raise Unavailable(f"{self._address} is being pulled by another process")
            self._fetch(slot, advance)
            shutil.rmtree(root)
        except (StoreError, CacheFull) as error:
            raise Unavailable(f"{self._address}: {error}; the same command resumes the download") from error
        finally:
            slot.close()
        with suppress(OSError):  # of another pull
            root.parent.rmdir()

    def _fetch(self, slot: CacheSlot, advance: Callable[[int], None]) -> None:
        cache, pieces = RemoteCache(slot.folder, self._max_bytes), ThreadPoolExecutor(CONNECTIONS, "piece")
        download = Download(cache, pieces, lambda _: None, advance, threading.Event().wait, PIECE_BYTES, PAUSE_S)
        tree = slot.folder / "trees" / "new"
        try:
            for path, file in self.plan.files.items():
                sha256 = download.fetch(self._store, self._address.key, file)
                target = tree / path
                target.parent.mkdir(parents=True, exist_ok=True)
                os.link(cache.blob(sha256), target)
                target.chmod(0o644)
        finally:
            pieces.shutdown(cancel_futures=True)
        tree.rename(self.folder)


def _planned(address: RemoteAddress, name: str) -> tuple[Store, PullPlan]:
    parent, _, last = address.path.rpartition("/")
    if address.scheme == "hf" and PurePosixPath(last).suffix not in _ONE_FILE:
        hub = open_store(address, Redactor())
        if isinstance(hub, HubStore) and (network := hub.network):
            return hub, PullPlan(name or network, {file.path: file for file in hub.files(network)})
    store = open_store(address._replace(path=parent), Redactor())
    return store, _plan(store, address, last, name)


def _plan(store: Store, address: RemoteAddress, last: str, name: str) -> PullPlan:
    suffix = PurePosixPath(last).suffix
    if suffix in _ONE_FILE:
        return PullPlan(name or PurePosixPath(last).stem, {f"1/model{suffix}": store.file(last)})
    listed = store.files(last)
    if any(file.path == "config.pbtxt" or file.path.partition("/")[0].isdigit() for file in listed):
        return PullPlan(name or last.partition("@")[0], {file.path: file for file in listed})
    weights = [file for file in listed if file.path.endswith(".gguf") and "mmproj" not in file.path]
    if len(weights) != 1:
        raise NotFound(f"{address}: {_choice(weights)}")
    return PullPlan(name or PurePosixPath(weights[0].path).stem, {"1/model.gguf": weights[0]})


def _choice(weights: Sequence[RemoteFile]) -> str:
    if not weights:
        return "it has neither a configuration nor a version directory nor a GGUF file; name a file"
    more = f" and {len(weights) - SHOWN} more" if len(weights) > SHOWN else ""
    return f"name one of its files: {', '.join(file.path for file in weights[:SHOWN])}{more}"
