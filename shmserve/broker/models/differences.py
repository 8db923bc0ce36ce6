"""Finds loaded versions that differ from the current files in the repository.

Files are compared by size, time and inode, in a separate thread, because a disk may hang. A comparison runs at most
once per FRESH_S and stops after about FILES files; the next one continues from there. A caller waits at most
REPLY_TIMEOUT_S, and then gets the previous result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from shmserve.errors import InvalidRequest
from shmserve.repo.storage.snapshot import Snapshot, take

FRESH_S = 1.0
REPLY_TIMEOUT_S = 0.5
FILES = 20_000


class LoadedVersion(NamedTuple):
    """A loaded version, with digests of its files and of the model's configuration files from when it was loaded.
    `config_digest` None: do not compare configuration files. `source` identifies the version in the core."""

    source: int
    folder: Path
    version: int
    files_digest: str
    config_digest: str | None
    backend_folder: Path | None = None
    """The directory of its backend, if that is in the backend directory."""
    backend_digest: str = ""


class Differences:
    def __init__(self, loop: Any, loaded: Callable[[], Sequence[LoadedVersion]]) -> None:
        self._loop = loop
        self._loaded = loaded
        self._changed: set[int] = set()
        self._thread = ThreadPoolExecutor(1, "differences")
        self._comparing = False
        self._at = -FRESH_S
        """When the last comparison finished."""
        self._next = 0
        """Index of the version at which the next comparison starts, as the last one stopped before it."""
        self._waiting: list[Callable[[Set[int]], None]] = []
        self._timeout: Any = None

    def check(self, then: Callable[[Set[int]], None]) -> None:
        """Compares again, unless the last result is fresh. Calls `then` with the sources of the versions that differ
        when the comparison has finished, or after REPLY_TIMEOUT_S. Versions that were not reached keep their previous
        result."""
        if time.monotonic() - self._at < FRESH_S:
            then(self._changed)
            return
        self._waiting.append(then)
        if self._timeout is None:
            self._timeout = self._loop.call_later(REPLY_TIMEOUT_S, self._answer)
        if not self._comparing:
            self._compare()

    def _compare(self) -> None:
        self._comparing = True
        loaded = self._loaded()
        start = self._next % max(len(loaded), 1)
        self._thread.submit(compare, [*loaded[start:], *loaded[:start]]).add_done_callback(
            lambda future: self._loop.call_soon_threadsafe(self._compared, future, start, loaded)
        )

    def _compared(self, future: Future[dict[int, bool]], start: int, loaded: Sequence[LoadedVersion]) -> None:
        self._comparing = False
        compared = future.result()
        not_reached = self._changed.difference(compared).intersection(entry.source for entry in loaded)
        self._changed = not_reached | {source for source, differs in compared.items() if differs}
        self._next = start + len(compared)
        self._at = time.monotonic()
        self._answer()

    def _answer(self) -> None:
        if self._timeout is not None:
            self._timeout.cancel()
            self._timeout = None
        waiting, self._waiting = self._waiting, []
        for then in waiting:
            then(self._changed)

    def close(self) -> None:
        self._waiting.clear()
        self._thread.shutdown(wait=False, cancel_futures=True)


def compare(loaded: Iterable[LoadedVersion], limit: int = FILES) -> dict[int, bool]:
    """Returns source -> whether it differs, without versions that the limit of files excluded. Runs in a thread."""
    differs: dict[int, bool] = {}
    snapshots: dict[Path, Snapshot | None] = {}
    for entry in loaded:
        folders = [entry.folder] if entry.backend_folder is None else [entry.folder, entry.backend_folder]
        for folder in folders:
            if folder not in snapshots:
                if limit <= 0:
                    return differs
                snapshots[folder] = snapshot = _take(folder)
                limit -= len(snapshot.files) if snapshot is not None else 1
        differs[entry.source] = _differs(entry, *(snapshots[folder] for folder in folders))
    return differs


def _differs(entry: LoadedVersion, now: Snapshot | None, backend: Snapshot | None = None) -> bool:
    if now is None or now.of_version(entry.version) != entry.files_digest:
        return True
    if entry.backend_folder is not None and (backend is None or backend.digest() != entry.backend_digest):
        return True
    return entry.config_digest is not None and now.of_configuration() != entry.config_digest


def _take(folder: Path) -> Snapshot | None:
    try:
        return take(folder)
    except (OSError, InvalidRequest):  # the folder was removed, or no longer contains a model
        return None
