"""Deploys changes in the repositories, found by polling or by rereading them after SIGHUP.

Invariant: the loop never waits for a disk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from shmserve.broker.models.catalog import Catalog
from shmserve.broker.models.operations import ClientOperations
from shmserve.broker.models.poller import Poll, PollChanges
from shmserve.broker.models.repositories import ModelReading
from shmserve.broker.observability.logs import log_record
from shmserve.core import events
from shmserve.core.owners.model import Model
from shmserve.core.state import State
from shmserve.core.states import UNLOADED
from shmserve.errors import ServeError
from shmserve.repo.storage.store import ScannedModel

log = logging.getLogger("shmserve")


class DiskChanges:
    """`put` passes an event to the core."""

    def __init__(
        self, loop: Any, state: State, catalog: Catalog, operations: ClientOperations, put: Callable[[Any], None]
    ) -> None:
        self._loop = loop
        self._state = state
        self._catalog = catalog
        self._repositories = catalog.repositories
        self._operations = operations
        self._reader = operations.reader
        self._put = put
        self._poll: Poll | None = None
        self._poll_timer: Any = None
        self._poll_s = 0.0
        self._polling = False
        """A poll by timer is queued or running in the reader's thread, which resets this."""
        self._check_queued = False

    def close(self) -> None:
        if self._poll_timer is not None:
            self._poll_timer.cancel()

    # ------------------------------------------------------------------------------------ polling

    def poll(self, poll: Poll, every_s: float, first_s: float) -> None:
        """Starts polling for changes."""
        self._poll, self._poll_s = poll, every_s
        self._poll_timer = self._loop.call_later(min(first_s, every_s), self._start_poll)

    @property
    def is_polling(self) -> bool:
        return self._poll is not None

    def check_now(self) -> None:
        """Polls once, in addition to the polls by timer."""
        assert self._poll is not None
        if self._check_queued:
            return
        self._check_queued, poll = True, self._poll

        def check() -> PollChanges:
            self._check_queued = False  # this check may miss changes from now on
            return poll.check()

        self._reader.run(check, self._changed)

    def _start_poll(self) -> None:
        poll = self._poll
        assert poll is not None
        self._poll_timer = self._loop.call_later(self._poll_s, self._start_poll)
        if not self._polling:  # otherwise the disk is slower than the polling interval
            self._polling = True
            self._reader.run(lambda: self._check(poll), self._changed)

    def _check(self, poll: Poll) -> PollChanges:
        try:
            return poll.check()
        finally:
            self._polling = False

    def _changed(self, changes: PollChanges) -> None:
        for text in changes.problems:
            log.error("%s", text)
        for reading in changes.readings:
            self._operations.follow(reading)
        for name in changes.removed:
            self.unload_removed(name)
        self._repositories.names = changes.names
        self._operations.untidy = True
        if changes.recheck_s < self._poll_s:
            self._poll_timer.cancel()
            self._poll_timer = self._loop.call_later(changes.recheck_s, self._start_poll)

    # ------------------------------------------------------------------------------------ reread on request

    def reread(self, then: Callable[[], None]) -> None:
        """Rereads the repositories for SIGHUP. Calls `then` when the changes have been passed to the core."""
        if self._poll is not None:
            self._reader.run(self._poll.check, self._changed)
        elif self._operations.explicit:
            served = self.served_names()
            self._reader.run(lambda: self._read_again(served), lambda readings: self.renew(readings, None))
        else:
            self._reader.run(self._read_everything, lambda result: self.renew(*result))
        self._reader.run(lambda: None, lambda _: then())  # queued behind the above; runs even if that failed

    def served_names(self) -> list[str]:
        """The models that are served from a repository."""
        return [model.name for model in self._state.models.values() if self._is_from_repository(model)]

    def _is_from_repository(self, model: Model) -> bool:
        """Whether the model is served from the repository rather than from the body of a load call."""
        versions = (*model.versions.values(), *model.coming.values())
        served = [version.source for version in versions if version.reason != UNLOADED]
        return bool(model.reason or served) and not any(map(self._catalog.is_override, served))

    def _read_again(self, names: Collection[str]) -> list[ModelReading]:
        readings = []
        for name in names:
            try:
                readings.append(self._repositories.read(name))
            except (ServeError, OSError) as error:
                log_record(
                    "warning", f"cannot reread model '{name}', which is served unchanged: {error}", {"model": name}
                )
        return readings

    def _read_everything(self) -> tuple[list[ModelReading], Collection[str] | None]:
        try:
            return self._repositories.read_all(), self._repositories.names_on_disk()
        except (ServeError, OSError) as error:
            log.error("cannot reread the repositories; all models are served unchanged: %s", error)
            return [], None

    def refuse(self, model: str, reason: str) -> None:
        """Reports a model that cannot be read. Its served versions stay."""
        self._operations.adopt(ModelReading(ScannedModel.failed(model, Path(), reason)))

    def unload_removed(self, model: str) -> None:
        """Unloads a model that was removed from its repository."""
        log_record("info", f"model '{model}' was removed from the repository", {"model": model})
        self._catalog.forget(model)
        self._put(events.Unload(model))

    def renew(self, readings: Collection[ModelReading], names: Collection[str] | None) -> None:
        """Deploys the models that were read. `names`: all models in the repositories, to unload others; None: unload
        none."""
        for reading in readings:
            if not self._catalog.is_rejected(reading):
                self._operations.adopt(reading)
        if names is not None:
            for model in self._state.models.values():
                if model.name not in names and self._is_from_repository(model):
                    self.unload_removed(model.name)
            self._repositories.names = names
        self._operations.untidy = True
