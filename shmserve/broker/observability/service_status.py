"""Notifies the service manager (sd_notify): status, readiness, watchdog, reload and stop.

Invariant: WATCHDOG=1 is sent only by a timer of the broker's loop, so that a hung loop misses the watchdog. Without a
service manager, this costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from shmserve.broker.observability.logs import printable
from shmserve.core.owners.model import Model
from shmserve.core.states import UNLOADED, VersionState
from shmserve.system.service_manager import ServiceManager

HEARTBEAT_S = 5.0
"""Maximum interval between heartbeats to the service manager."""
EXTENSION_S = 60.0
"""Start timeout requested with each heartbeat while models load. The core ends loads that take too long."""
STOP_S = 10.0
"""Stop timeout requested in addition to the time for requests in flight. The server exits well before
(stop_deadline.py)."""
NAMES = 8
"""Maximum number of models named in the status line."""


class Census(NamedTuple):
    """Models by state, without models that are unloaded or being unloaded."""

    total: int
    loading: list[str]
    failed: list[str]

    @classmethod
    def of(cls, models: Iterable[Model]) -> Census:
        total, loading, failed = 0, [], []
        for model in models:
            versions = [
                version
                for version in model.versions.values()
                if version.reason != UNLOADED and version.state is not VersionState.UNLOADING
            ]
            if not versions and not model.coming and not model.reason:
                continue
            total += 1
            if any(version.state is VersionState.LOADING for version in [*versions, *model.coming.values()]):
                loading.append(model.name)
            elif model.reason or any(version.state is VersionState.UNAVAILABLE for version in versions):
                failed.append(model.name)
        return cls(total, loading, failed)

    def text(self) -> str:
        """One line, for `systemctl status`."""
        if self.loading:
            text = f"loading {len(self.loading)} of {self.total} models: {_some(self.loading)}"
        else:
            text = f"serving {self.total - len(self.failed)} of {self.total} models"
        return text + (f"; failed: {_some(self.failed)}" if self.failed else "")


def _some(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:NAMES])
    return printable(shown) + (f" and {len(names) - NAMES} more" if len(names) > NAMES else "")


class Announcer:
    """Sends notifications from `begin` to `close`. `in_flight` returns the number of requests in flight;
    `out_of_service` returns whether an operator has taken the server out of service."""

    def __init__(
        self,
        loop: Any,
        manager: ServiceManager,
        models: Callable[[], Iterable[Model]],
        in_flight: Callable[[], int],
        out_of_service: Callable[[], bool],
    ) -> None:
        self._loop = loop
        self._manager = manager
        self._models = models
        self._in_flight = in_flight
        self._out_of_service = out_of_service
        self._every_s = min(HEARTBEAT_S, manager.watchdog_s / 2 or HEARTBEAT_S)
        self._timer: Any = None
        self._status = ""
        self._ready = False
        self._stopping = False
        self._reloading = False

    def begin(self) -> None:
        """Called before the repositories are read."""
        if self._manager:
            self._heartbeat()

    def check_status(self) -> None:
        """Sends the status if it has changed."""
        if self._manager:
            self._notify()

    def ready(self) -> None:
        """Called when the initial loading has finished."""
        self._ready = True
        if self._manager:
            self._notify("READY=1", once=True)

    def reloading(self) -> None:
        """Called when the repositories are reread."""
        self._reloading = True
        if self._manager and self._ready and not self._stopping:
            now = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
            self._notify("RELOADING=1", f"MONOTONIC_USEC={now}", once=True)

    def reloaded(self) -> bool:
        """Called when the reread models are served or have failed. False if this was already reported."""
        known, self._reloading = not self._reloading, False
        if self._manager and self._ready and not (self._stopping or known):
            self._notify("READY=1", once=True)
        return not known

    def stopping(self, limit_s: float) -> None:
        """Called when the server stops accepting requests; `limit_s` is the time for requests in flight."""
        first, self._stopping = not self._stopping, True
        if self._manager and first:
            self._notify("STOPPING=1", _extension(limit_s + STOP_S), once=True)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._manager.close()

    def _heartbeat(self) -> None:
        self._timer = self._loop.call_later(self._every_s, self._heartbeat)
        fields = ["WATCHDOG=1"] if self._manager.watchdog_s else []
        if not self._stopping and (self._reloading or not self._ready):
            fields.append(_extension(EXTENSION_S))
        self._notify(*fields)

    def _notify(self, *fields: str, once: bool = False) -> None:
        status = self._text()
        if status != self._status:
            self._status = status
            fields += (f"STATUS={status}",)
        if fields:
            self._manager.notify(*fields, once=once)

    def _text(self) -> str:
        if self._stopping:
            return f"stopping: {self._in_flight()} request(s) in flight"
        census = Census.of(self._models())
        if not (self._ready or census.total):
            return "reading the repositories"
        if self._out_of_service():
            return f"out of service: {self._in_flight()} request(s) in flight; {census.text()}"
        return census.text()


def _extension(seconds: float) -> str:
    return f"EXTEND_TIMEOUT_USEC={round(seconds * 1e6)}"
