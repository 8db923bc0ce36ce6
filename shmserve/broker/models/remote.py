"""The broker's view of remote repositories: requests to download models, and the state of downloads.

For the rest of the server, a remote repository is a directory in `folders`. The process that mirrors the repository
publishes complete models there, and replaces them as a whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from msgspec import Struct

from shmserve.broker.observability.logs import log_record
from shmserve.broker.processes.mirror import Event, MirrorProcess
from shmserve.errors import Unavailable
from shmserve.repo.remote.address import RemoteAddress
from shmserve.repo.remote.cache import CacheSlot, is_absent, tree_of
from shmserve.repo.remote.main import MirrorSettings

LOG_S = 10.0
"""Interval at which the progress of a download is logged."""


class RemoteSettings(NamedTuple):
    """`cache_bytes`: limit of the cache. `poll_s` 0: do not follow changes."""

    addresses: Sequence[RemoteAddress]
    cache: Path
    cache_bytes: int
    poll_s: float
    settle_s: float


Fetched = Callable[[str, Sequence[str]], None]
"""Called with the reason why the model cannot be downloaded, and notes for its owner. The reason is "" after a download
and if no repository has the model."""


class NotDownloaded(Exception):
    """The model is in a remote repository, but not on this machine."""

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.model = model


class _Download(Struct):
    done: int
    total: int
    began: float
    logged: float


class _Request(Struct):
    """A request that has not been answered."""

    document: Mapping[str, object]
    then: Fetched


def open_remote(loop: Any, settings: RemoteSettings, pids: set[int]) -> RemoteModels | None:
    """None without remote repositories. Raises Unavailable if the cache cannot be used."""
    if not settings.addresses:
        return None
    addresses = {address.key: str(address) for address in settings.addresses}
    try:
        slot = CacheSlot.acquire(settings.cache, list(addresses))
    except OSError as error:
        text = f"cannot use the cache directory {settings.cache}: {error.strerror or error}"
        raise Unavailable(f"{text}; give another one with --cache-directory") from None
    return RemoteModels(loop, slot, addresses, settings, pids)


class RemoteListener(Protocol):
    def changed(self, model: str) -> None:
        """A model of that name was published or removed."""

    def failed(self, model: str, text: str) -> None:
        """A model that is not served cannot be downloaded, with the reason."""

    def retired(self) -> None:
        """A directory was replaced, so that `drop_unused` can remove it."""


class RemoteModels:
    """`addresses`: repository key -> its address."""

    def __init__(
        self, loop: Any, slot: CacheSlot, addresses: Mapping[str, str], settings: RemoteSettings, pids: set[int]
    ) -> None:
        self.unreadable: set[str] = set()
        """Repositories that cannot be read and are not in the cache."""
        self.folders = [slot.view(key).resolve() for key in addresses]
        self._slot = slot
        self._addresses = addresses
        process = MirrorSettings(
            str(slot.folder), settings.cache_bytes, list(addresses.values()), settings.poll_s, settings.settle_s
        )
        self._process = MirrorProcess(loop, process, pids, self._handle, self._started)
        self._listener: RemoteListener | None = None
        self._numbers = count(1)
        self._requests: dict[int, _Request] = {}
        self._downloads: dict[tuple[str, str], _Download] = {}
        self._retired: set[str] = set()
        self._polling = False

    def start(self, listener: RemoteListener) -> None:
        """Starts the process. `listener` hears of what it downloads."""
        self._listener = listener
        self._process.start()

    def close(self) -> None:
        self._process.close()
        self._slot.close()

    # ------------------------------------------------------------------------------------ requests

    def fetch(self, model: str, then: Fetched) -> None:
        """Downloads the model, or its changes."""
        self._request({"do": "fetch", "model": model}, then)

    def fetch_all(self, then: Fetched) -> None:
        self._request({"do": "fetch_all"}, then)

    def poll(self) -> None:
        """Follows changes from now on."""
        self._polling = True
        self._process.send({"do": "poll"})

    def list(self) -> None:
        """Requests an update of the names of models that have not been downloaded."""
        self._process.send({"do": "list"})

    def release(self, model: str) -> None:
        """Allows evicting the files of a model that is no longer served from the cache."""
        if self.has(model):
            self._process.send({"do": "release", "model": model})

    def has(self, model: str) -> bool:
        """Whether a model of that name has been downloaded."""
        return any(tree_of(folder / model) and not is_absent(folder / model) for folder in self.folders)

    def drop_unused(self, used: Collection[str]) -> None:
        """Removes replaced directories, except those that loaded versions use."""
        trees = sorted(self._retired.difference(used))
        if trees:
            self._retired.difference_update(trees)
            self._process.send({"do": "drop", "trees": trees})

    def _request(self, document: Mapping[str, object], then: Fetched) -> None:
        number = next(self._numbers)
        request = self._requests[number] = _Request({**document, "id": number}, then)
        self._process.send(request.document)

    def _started(self) -> None:
        self._downloads.clear()
        for request in self._requests.values():
            self._process.send(request.document)
        if self._polling:
            self._process.send({"do": "poll"})

    # ------------------------------------------------------------------------------------ events

    def _handle(self, event: Event) -> None:
        match event["event"]:
            case "progress":
                self._progress(event)
            case "outcome":
                self._outcome(event)
            case "retired":
                self._retire(event["tree"])
            case "done":
                request = self._requests.pop(event["id"], None)
                if request is not None:
                    request.then(event["failed"], event["notes"])
            case "unreadable":
                self.unreadable.add(event["repository"])
            case "readable":
                self.unreadable.discard(event["repository"])
            case "log":
                log_record(event["level"], event["text"], {"model": event["model"]} if event["model"] else None)

    def _progress(self, event: Event) -> None:
        key, now = (event["repository"], event["model"]), time.monotonic()
        download = self._downloads.get(key)
        if download is None or download.total != event["total"]:
            self._downloads[key] = download = _Download(0, event["total"], now, now)
            text = f"downloading {size_text(download.total)} from {self._addresses[key[0]]}"
            log_record("info", f"model '{key[1]}': {text}", {"model": key[1]})
        download.done = event["done"]
        if now - download.logged >= LOG_S:
            download.logged = now
            log_record("info", f"model '{key[1]}': {self._text(download)}", {"model": key[1]})

    def _outcome(self, event: Event) -> None:
        model, state = event["model"], event["state"]
        download = self._downloads.pop((event["repository"], model), None)
        assert self._listener is not None
        if event["old"]:
            self._retire(event["old"])
        if state == "published" and download is not None:
            seconds = time.monotonic() - download.began
            text = f"downloaded {size_text(download.total)} in {seconds:.1f} s"
            log_record("info", f"model '{model}': {text}", {"model": model})
        if state in ("published", "offline") or (state == "absent" and event["old"]):
            self._listener.changed(model)
        elif state == "failed" and event["is_new"]:
            self._listener.failed(model, event["text"])

    def _retire(self, tree: str) -> None:
        assert self._listener is not None
        self._retired.add(tree)
        self._listener.retired()

    def downloads(self) -> dict[str, str]:
        """Model -> the progress of its download."""
        return {model: self._text(download) for (_, model), download in self._downloads.items()}

    def _text(self, download: _Download) -> str:
        done = min(download.done, download.total)
        return f"downloading {size_text(done, download.total)} of {size_text(download.total)}"


def size_text(size: int, like: int = 0) -> str:
    """The size with one decimal. With `like`, in the unit of that size, which is then omitted."""
    units = ("bytes", "kB", "MB", "GB", "TB")
    at = min(max((len(str(like or size)) - 1) // 3, 0), len(units) - 1)
    number = f"{size / 1000**at:.1f}" if at else str(size)
    return number if like else f"{number} {units[at]}"
