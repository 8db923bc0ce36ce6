"""Polls the repositories for changes.

Invariant: a model is deployed only if it has not changed for `settle_s`, nor while it was read. A model that is being
copied waits for the next poll. Only at startup, as in the other modes, are models read as they are. Everything runs in
the reader thread; no other thread accesses a Poll's state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from shmserve.broker.models.backend_files import KnownBackends
from shmserve.broker.models.repositories import ModelReading, Repositories, read_doubled
from shmserve.errors import ServeError
from shmserve.repo.remote.cache import tree_of
from shmserve.repo.storage.snapshot import Snapshot, take


class PollChanges(NamedTuple):
    """Models to deploy, names of removed models, and errors. `recheck_s`: seconds until the next poll makes sense."""

    readings: list[ModelReading]
    removed: list[str]
    names: Collection[str]
    problems: list[str]
    recheck_s: float


class _Unsettled(NamedTuple):
    digest: str
    since: float


class _Pass(NamedTuple):
    """The backends of one poll, each listed once for all its models: before the models are read (by directory), and
    while they are read."""

    before: dict[Path, Snapshot | None]
    read: KnownBackends


class Poll:
    """`wall` and `clock` are time.time and time.monotonic."""

    def __init__(
        self,
        repositories: Repositories,
        settle_s: float,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._repositories = repositories
        self._settle_s = settle_s
        self._wall = wall
        self._clock = clock
        self._known: dict[str, str] = {}
        """Model -> digest of its files and those of its backend when it was read."""
        self._backends: dict[str, Path] = {}
        """Model -> the directory of its backend when it was read, if that is in the backend directory."""
        self._unsettled: dict[str, _Unsettled] = {}
        self._problems: list[str] = []
        """Those of the last poll, which are not reported again."""

    def check(self, at_start: bool = False) -> PollChanges:
        settle_s = 0.0 if at_start else self._settle_s
        try:
            names = self._repositories.names_on_disk()
        except ServeError as error:  # the repository itself cannot be read now
            return PollChanges([], [], list(self._known), self._new([error.message]), float("inf"))
        backends = _Pass({}, {})
        models = (self._model(name, folders, settle_s, backends) for name, folders in names.items())
        readings = [reading for reading in models if reading is not None]
        removed = [name for name in self._known if name not in names]
        for name in removed:
            del self._known[name]
            self._backends.pop(name, None)
        self._unsettled = {name: entry for name, entry in self._unsettled.items() if name in names}
        again = self._settle_s if self._unsettled else float("inf")
        return PollChanges(readings, removed, names, self._new(self._repositories.unread_files()), again)

    def _new(self, problems: list[str]) -> list[str]:
        before, self._problems = self._problems, problems
        return [text for text in problems if text not in before]

    def _model(self, name: str, folders: list[Path], settle_s: float, backends: _Pass) -> ModelReading | None:
        if len(folders) > 1:
            digest = f"in {len(folders)} repositories"
            if self._known.get(name) == digest:
                return None
            self._known[name] = digest
            return read_doubled(name, folders)
        snapshot: Snapshot | None = None
        backend: Snapshot | None = None
        try:
            snapshot, backend = take(folders[0]), self._backend(name, backends.before)
            digest = _digest(snapshot, backend)
            newest = max(snapshot.newest, backend.newest if backend is not None else 0)
        except (FileNotFoundError, NotADirectoryError):  # the model is being created or removed
            self._unsettled[name] = _Unsettled("", self._clock())
            return None
        except (OSError, ServeError) as error:  # reading the model reports the error
            digest, newest = f"cannot be read: {error}", -1
        if self._known.get(name) == digest:
            self._unsettled.pop(name, None)
            return None
        # Downloaded models are published as a whole, after their repository has settled.
        if settle_s and not tree_of(folders[0]) and not self._is_settled(name, digest, newest):
            return None
        reading = self._repositories.read_folder(folders[0], known=backends.read)
        after = reading.snapshot
        if after is None or snapshot is None:
            same = after is snapshot
        else:
            same = after.files == snapshot.files
        read = reading.backend
        if backend is not None and read is not None and read.origin == self._backends.get(name):
            same = same and read.snapshot.files == backend.files
        if not same:
            self._unsettled[name] = _Unsettled("", self._clock())
            return None
        self._unsettled.pop(name, None)
        self._backends.pop(name, None)
        if snapshot is not None and read is not None:
            self._backends[name] = read.origin
            digest = _digest(snapshot, read.snapshot)
        self._known[name] = digest
        return reading

    def _backend(self, name: str, known: dict[Path, Snapshot | None]) -> Snapshot | None:
        """The files of the model's backend; None if the backend has no directory, or it was removed."""
        folder = self._backends.get(name)
        if folder is None:
            return None
        if folder not in known:
            known[folder] = take(folder) if folder.is_dir() else None
        return known[folder]

    def _is_settled(self, name: str, digest: str, newest: int) -> bool:
        """Whether the model has not changed for `settle_s`: by the time of the last change or, as clocks of network
        disks may differ, by its digest."""
        if 0 <= newest <= (self._wall() - self._settle_s) * 1e9:
            return True
        seen = self._unsettled.get(name)
        if seen is None or seen.digest != digest:
            self._unsettled[name] = _Unsettled(digest, self._clock())
            return False
        return self._clock() - seen.since >= self._settle_s


def _digest(model: Snapshot, backend: Snapshot | None) -> str:
    return model.digest() + (backend.digest() if backend is not None else "")
