"""Loads models of remote repositories after they were downloaded, at startup and later.

Invariant: a model is read only after it was published, in the thread that reads all models. In mode explicit, only
loads read models; other changes are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from shmserve.broker.models.disk_changes import DiskChanges
from shmserve.broker.models.ensemble_members import needs
from shmserve.broker.models.operations import ClientOperations
from shmserve.broker.models.remote import NotDownloaded, RemoteModels
from shmserve.broker.models.repositories import ModelReading, Repositories
from shmserve.errors import ServeError
from shmserve.repo.storage.store import ScannedModel

_Readings = tuple[ModelReading, list[tuple[str, ModelReading]]]
"""A model and the models that it needs, each with the ensemble that names it."""


class RemoteChanges:
    """`wake()` schedules a turn of the core."""

    def __init__(
        self,
        remote: RemoteModels,
        repositories: Repositories,
        operations: ClientOperations,
        disk_changes: DiskChanges,
        wake: Callable[[], None],
    ) -> None:
        self._remote = remote
        self._repositories = repositories
        self._operations = operations
        self._disk_changes = disk_changes
        self._wake = wake
        self._remaining_models = 0
        """Number of models to load at startup that have not been read."""
        self.starting = True
        """The models to serve from the start are being downloaded."""

    @property
    def is_complete(self) -> bool:
        """Whether all repositories can be read, or were read before."""
        return not self._remote.unreadable

    def downloads(self) -> Mapping[str, str]:
        """Model -> the progress of its download."""
        return self._remote.downloads()

    def begin(self, models: Sequence[str]) -> None:
        """Starts the downloads. `models`: in mode explicit, the models to load at startup; * alone: all."""
        self._remote.start(self)
        if not self._operations.explicit or list(models) == ["*"]:
            self._remote.fetch_all(lambda failure, notes: self._fetched_all())
            return
        self._remaining_models = len(models)
        for name in models:
            self.load(name)
        if not models:
            self._end_of_start()

    # ------------------------------------------------------------------------------------ modes none and poll

    def _fetched_all(self) -> None:
        if self._disk_changes.is_polling:
            self._remote.poll()
        reader = self._operations.reader
        if self._operations.explicit:
            # This reads all models, including those that ensembles need.
            reader.run(self._repositories.read_all, self._operations.begin)
        # Queued behind this, or behind the models published so far; runs even if these cannot be read.
        reader.run(lambda: None, lambda _: self._end_of_start())

    def changed(self, model: str) -> None:
        if self._operations.explicit:
            return
        if self._disk_changes.is_polling:
            self._disk_changes.check_now()
        else:
            self._operations.reader.run(
                lambda: self._repositories.read_present(model), lambda reading: self._read(model, reading)
            )

    def failed(self, model: str, text: str) -> None:
        if not self._operations.explicit:
            self._disk_changes.refuse(model, text)

    def retired(self) -> None:
        self._operations.untidy = True
        self._wake()

    def _read(self, model: str, reading: ModelReading | None) -> None:
        if reading is None:
            self._disk_changes.unload_removed(model)
        else:
            self._disk_changes.renew([reading], None)

    def reread(self, then: Callable[[], None]) -> None:
        """Downloads changes, then rereads the repositories, for SIGHUP."""
        if not self._operations.explicit:
            self._remote.fetch_all(lambda failure, notes: self._disk_changes.reread(then))
            return
        names = [name for name in self._disk_changes.served_names() if self._remote.has(name)]
        remaining = len(names)

        def fetched(failure: str, notes: Sequence[str]) -> None:
            nonlocal remaining
            remaining -= 1
            if remaining <= 0:
                self._disk_changes.reread(then)

        for name in names:
            self._remote.fetch(name, fetched)
        if not names:
            self._disk_changes.reread(then)

    # ------------------------------------------------------------------------------------ mode explicit

    def load(self, name: str) -> None:
        """Loads a model, and those that it needs, at startup."""
        failures: dict[str, str] = {}

        def fetch(model: str) -> None:
            def fetched(failure: str, notes: Sequence[str]) -> None:
                if failure:
                    failures[model] = failure
                self._operations.reader.run(lambda: self._read_at_start(name, failures), loaded)

            self._remote.fetch(model, fetched)

        def loaded(result: _Readings | str) -> None:
            if isinstance(result, str):
                fetch(result)
                return
            reading, needed = result
            self._operations.begin([reading], needed)
            self._remaining_models -= 1
            if not self._remaining_models:
                self._end_of_start()

        fetch(name)

    def _read_at_start(self, name: str, failures: dict[str, str]) -> _Readings | str:
        """The model with those that it needs, or the name of a model to download first."""
        try:
            reading = self._repositories.read(name)
            return reading, list(needs(reading, self._repositories))
        except NotDownloaded as missing:
            if missing.model not in failures:
                return missing.model
            text = failures[missing.model]
        except ServeError as error:
            text = failures.get(name, error.message)
        except OSError as error:
            text = f"disk error: {error.strerror}"
        return ModelReading(ScannedModel.failed(name, Path(), text)), []

    def _end_of_start(self) -> None:
        self.starting = False
        self._wake()
        if self._operations.explicit:
            self._remote.list()
