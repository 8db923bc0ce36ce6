"""Which loaded versions differ from the files that are in the repository now.

Files are compared by size, time and inode, in a separate thread, because a disk may hang. A comparison runs at most
once per FRESH_S and stops after about FILES files; the next one continues from there. A caller waits at most
PATIENCE_S, and then gets the previous result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from shmserve.errors import InvalidRequest
from shmserve.repo.storage.snapshot import Snapshot, take

FRESH_S = 1.0
PATIENCE_S = 0.5
FILES = 20_000


class LoadedVersion(NamedTuple):
    """A loaded version. `files` and `configuration`: digests, when it was loaded, of its files and of the model's
    configuration files ("": configuration files are not compared). `source` identifies it in the core."""

    source: int
    folder: Path
    version: int
    files: str
    configuration: str


class Differences:
    """The sources of the versions that differ: test with `in`, after `look`."""

    def __init__(self, loop: Any, loaded: Callable[[], Sequence[LoadedVersion]]) -> None:
        self._loop = loop
        self._loaded = loaded
        self._changed: set[int] = set()
        self._thread = ThreadPoolExecutor(1, "differences")
        self._looking = False
        self._at = -FRESH_S
        """When the last comparison finished."""
        self._next = 0
        """Index of the first version of the next comparison; the last one stopped before it."""
        self._waiting: list[Callable[[], None]] = []

    def __contains__(self, source: object) -> bool:
        """Whether the source differed at the last comparison that covered it."""
        return source in self._changed

    def look(self, then: Callable[[], None]) -> None:
        """Compares again, unless the last result is fresh, and calls `then` when that has finished or after
        PATIENCE_S."""
        if time.monotonic() - self._at < FRESH_S:
            then()
            return
        self._waiting.append(then)
        if len(self._waiting) == 1:
            self._loop.call_later(PATIENCE_S, self._answer)
        if not self._looking:
            self._looking = True
            loaded = self._loaded()
            start = self._next % max(len(loaded), 1)
            self._thread.submit(compare, [*loaded[start:], *loaded[:start]]).add_done_callback(
                lambda future: self._loop.call_soon_threadsafe(self._known, future, start, loaded)
            )

    def _known(self, future: Future[dict[int, bool]], start: int, loaded: Sequence[LoadedVersion]) -> None:
        self._looking = False
        found = future.result()
        # Versions that this comparison did not reach keep their previous result.
        kept = self._changed.difference(found).intersection(entry.source for entry in loaded)
        self._changed = kept | {source for source, differs in found.items() if differs}
        self._next = start + len(found)
        self._at = time.monotonic()
        self._answer()

    def _answer(self) -> None:
        waiting, self._waiting = self._waiting, []
        for then in waiting:
            then()

    def close(self) -> None:
        self._waiting.clear()
        self._thread.shutdown(wait=False, cancel_futures=True)


def compare(loaded: Iterable[LoadedVersion], limit: int = FILES) -> dict[int, bool]:
    """Source -> whether it differs. Versions that were not reached within the limit of files are missing. Runs in a
    thread."""
    found: dict[int, bool] = {}
    looks: dict[Path, Snapshot | None] = {}
    for entry in loaded:
        if entry.folder not in looks:
            if limit <= 0:
                break
            looks[entry.folder] = look = _take(entry.folder)
            limit -= len(look.files) if look is not None else 1
        look = looks[entry.folder]
        found[entry.source] = look is None or not (
            look.of_version(entry.version) == entry.files and entry.configuration in ("", look.of_configuration())
        )
    return found


def _take(folder: Path) -> Snapshot | None:
    try:
        return take(folder)
    except (OSError, InvalidRequest):  # the folder has been removed, or is no longer that of a model
        return None
