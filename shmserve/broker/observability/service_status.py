"""What the service manager is told: what is waited for, ready, alive, reloading, stopping (sd_notify's protocol).

The rule of the file: WATCHDOG=1 is sent by a timer of the broker's own loop and by nothing else, so that a loop that
hangs is not fed. Without a manager nothing here costs anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from shmserve.broker.observability.logs import printable
from shmserve.core.models.deployment import UNLOADED
from shmserve.core.models.model import Model
from shmserve.core.states import VersionState
from shmserve.system.service_manager import Manager

BEAT_S = 5.0
"""How often the manager hears from us, at least."""
EXTENSION_S = 60.0
"""While models load, each beat asks for so much more time. What takes too long to load is ended by the core."""
STOP_S = 10.0
"""Asked for beyond the time that requests in flight have at a stop. The server ends well before (stop_deadline.py)."""
NAMES = 8
"""Models named in a status, at most; a line is short."""


class Census(NamedTuple):
    """How it stands with the models."""

    total: int
    loading: list[str]
    failed: list[str]

    @classmethod
    def of(cls, models: Iterable[Model]) -> Census:
        total, loading, failed = 0, [], []
        for model in models:
            versions = [version for version in model.versions.values() if version.reason != UNLOADED]
            if not versions and not model.reason:
                continue
            total += 1
            if any(version.state is VersionState.LOADING for version in [*versions, *model.coming.values()]):
                loading.append(model.name)
            elif model.reason or any(version.state is VersionState.UNAVAILABLE for version in versions):
                failed.append(model.name)
        return cls(total, loading, failed)

    def text(self) -> str:
        """In one line, for `systemctl status`."""
        if self.loading:
            text = f"loading {len(self.loading)} of {self.total} models: {_some(self.loading)}"
        else:
            text = f"serving {self.total - len(self.failed)} of {self.total} models"
        return text + (f"; failed: {_some(self.failed)}" if self.failed else "")


def _some(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:NAMES])
    return printable(shown) + (f" and {len(names) - NAMES} more" if len(names) > NAMES else "")


class Announcer:
    """Tells the manager what there is to tell, from `begin` to `close`. `in_flight` counts requests."""

    def __init__(
        self, loop: Any, manager: Manager, models: Callable[[], Iterable[Model]], in_flight: Callable[[], int]
    ) -> None:
        self._loop = loop
        self._manager = manager
        self._models = models
        self._in_flight = in_flight
        self._every_s = min(BEAT_S, manager.watchdog_s / 2 or BEAT_S)
        self._timer: Any = None
        self._status = ""
        self._ready = False
        self._stopping = False
        self._reloading = False

    def begin(self) -> None:
        """Before the repositories are read."""
        if self._manager:
            self._beat()

    def look(self) -> None:
        """Something may have changed: tells the status, if it is another one."""
        if self._manager:
            self._say()

    def ready(self) -> None:
        """The first round of loading has ended."""
        self._ready = True
        if self._manager:
            self._say("READY=1", once=True)

    def reloading(self) -> None:
        """The repositories are read again."""
        self._reloading = True
        if self._manager and self._ready and not self._stopping:
            now = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
            self._say("RELOADING=1", f"MONOTONIC_USEC={now}", once=True)

    def reloaded(self) -> bool:
        """What came of it is served, or has failed. False: that is known already."""
        known, self._reloading = not self._reloading, False
        if self._manager and self._ready and not (self._stopping or known):
            self._say("READY=1", once=True)
        return not known

    def stopping(self, limit_s: float) -> None:
        """No request is taken any more; those in flight have so long."""
        first, self._stopping = not self._stopping, True
        if self._manager and first:
            self._say("STOPPING=1", _extension(limit_s + STOP_S), once=True)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._manager.close()

    def _beat(self) -> None:
        self._timer = self._loop.call_later(self._every_s, self._beat)
        fields = ["WATCHDOG=1"] if self._manager.watchdog_s else []
        if not self._stopping and (self._reloading or not self._ready):
            fields.append(_extension(EXTENSION_S))
        self._say(*fields)

    def _say(self, *fields: str, once: bool = False) -> None:
        status = self._text()
        if status != self._status:
            self._status = status
            fields += (f"STATUS={status}",)
        if fields:
            self._manager.tell(*fields, once=once)

    def _text(self) -> str:
        if self._stopping:
            return f"stopping: {self._in_flight()} request(s) in flight"
        census = Census.of(self._models())
        if not (self._ready or census.total):
            return "reading the repositories"
        return census.text()


def _extension(seconds: float) -> str:
    return f"EXTEND_TIMEOUT_USEC={round(seconds * 1e6)}"
