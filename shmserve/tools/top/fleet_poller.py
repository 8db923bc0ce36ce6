"""Reads servers at an interval, each in a separate thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from shmserve.errors import ServeError
from shmserve.tools.top.sources import FIRST, Source
from shmserve.tools.top.view import View, make_view

Times = dict[tuple[str, int | None], dict[int, int]]
"""Model and version -> histogram of its requests in the last interval."""
CLOSE_S = 1.0
"""How long `close` waits for reads in progress to end. Threads are daemons, so a later end does not delay the exit."""


class ServerSnapshot(Struct, frozen=True):
    """What is known about a server. `problem`: why its last read failed. `view` is the view of its last answer, None
    before the first. Times are those of the monotonic clock; `asked`: when the unanswered read began."""

    name: str
    where: str
    view: View | None = None
    times: Times = {}
    problem: str = ""
    answered: float | None = None
    asked: float | None = None

    @property
    def settled(self) -> bool:
        """Whether there is something to show: rates, or why there are none."""
        return bool(self.problem) or (self.view is not None and self.view.interval is not None)


class Poller:
    """One server. `name`: its displayed name. `notify` is called in the poller's thread after each read, and `interval`
    for the seconds until the next one."""

    def __init__(self, name: str, source: Source, interval: Callable[[], float], notify: Callable[[], None]) -> None:
        self._interval = interval
        self.snapshot = ServerSnapshot(name, source.where)
        self._source = source
        self._notify = notify
        self._before: Mapping[str, Any] | None = None
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"top {name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def refresh(self) -> None:
        """Reads again at once."""
        self._wake.set()

    def close(self) -> None:
        """Ends a read in progress."""
        self._closed.set()
        self._wake.set()
        self._source.close()

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)

    def _run(self) -> None:
        while not self._closed.is_set():
            first = self._before is None
            self.snapshot = replace(self.snapshot, asked=time.monotonic())
            self.snapshot = replace(self._read(), asked=None)
            if self._closed.is_set():
                return
            self._notify()
            self._wake.wait(self._interval() * (FIRST if first and not self.snapshot.problem else 1.0))
            self._wake.clear()

    def _read(self) -> ServerSnapshot:
        try:
            document = self._source.read()
        except ServeError as error:
            self._before = None  # rates across an outage would not belong to any interval that the user knows
            return replace(self.snapshot, problem=str(error), times={})
        before, self._before = self._before, document
        try:
            view = make_view(before, document)
            times = times_of(view)
        except (AttributeError, KeyError, TypeError, ValueError) as error:  # any program may listen at the address
            self._before = None
            return replace(self.snapshot, problem=f"its answer cannot be understood: {error!r}", times={})
        return replace(self.snapshot, view=view, times=times, problem="", answered=time.monotonic())


def times_of(view: View) -> Times:
    return {(row["model"], row["version"]): row["request_times"] for row in view.models if row["request_times"]}


class Pollers:
    """Several servers. `sources`: by displayed name; leaving the block closes them."""

    def __init__(self, sources: Mapping[str, Source], interval: float) -> None:
        self._interval = interval
        self._changed = threading.Condition()
        self._pollers = [
            Poller(name, source, lambda: self._interval, self._notified) for name, source in sources.items()
        ]

    def __enter__(self) -> Pollers:
        for poller in self._pollers:
            poller.start()
        return self

    def __exit__(self, *_: object) -> None:
        for poller in self._pollers:
            poller.close()
        end = time.monotonic() + CLOSE_S
        for poller in self._pollers:
            poller.join(max(0.0, end - time.monotonic()))

    @property
    def snapshots(self) -> Sequence[ServerSnapshot]:
        return [poller.snapshot for poller in self._pollers]

    def set_interval(self, seconds: float) -> None:
        self._interval = seconds

    def refresh(self) -> None:
        for poller in self._pollers:
            poller.refresh()

    def wait(self, seconds: float) -> None:
        """Waits until each server has rates or a problem, but at most this long."""
        with self._changed:
            self._changed.wait_for(lambda: all(snapshot.settled for snapshot in self.snapshots), seconds)

    def _notified(self) -> None:
        with self._changed:
            self._changed.notify_all()
