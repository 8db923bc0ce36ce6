"""Models whose responses name their process, which identifies the node, and background load on an application, over
handles, HTTP and gRPC. Each response is checked, and callers do not retry."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.support import load
from tests.support.living import group
from tests.support.load import Failed, Send
from tests.support.patience import CLUSTER_PATIENCE_S

PAUSE_S = 0.01
"""Pause between a response and a thread's next request, so that the nodes have time for other work."""

PID = "os.getpid()"


def write_times(
    root: Path, name: str, factor: float = 2.0, seconds: float = load.WORK_S, more: str = "", load_seconds: float = 0.0
) -> None:
    """y[0] = factor * x, y[1] = pid."""
    load.write_times(root, name, PID, factor, seconds, group(1) + more, f"select.select([], [], [], {load_seconds})")


@contextlib.contextmanager
def over_handle(place: Any) -> Iterator[Send]:
    from shmserve.errors import ServeError
    from shmserve.ray import Handle

    handle = Handle(timeout=CLUSTER_PATIENCE_S)

    def send(model: str, value: float, sequence: int = 0, start: bool = False, end: bool = False) -> tuple[float, int]:
        more = {"sequence": sequence, "sequence_start": start, "sequence_end": end} if sequence else {}
        try:
            first, pid = handle.infer(model, {"x": np.array([[value]], np.float32)}, **more)["y"][0]
        except ServeError as error:
            raise Failed(f"handle {error.code}: {error}") from error
        return float(first), int(pid)

    yield send


def over_http(place: Any) -> contextlib.AbstractContextManager[Send]:
    return load.over_http(place.http)


WAYS: dict[str, Callable[[Any], contextlib.AbstractContextManager[Send]]] = {
    "handle": over_handle,
    "http": over_http,
    "grpc": lambda place: load.over_grpc(place.grpc),
}


class Load(load.Load):
    """Sends requests from `clients` threads over each way, until the block ends. The pid of the model identifies the
    server."""

    def __init__(self, place: Any, clients: int = 2, factors: tuple[float, ...] = (2.0,)) -> None:
        self.factors: Counter[float] = Counter()
        """Factor -> number of consecutive latest responses with it."""
        self._place = place
        self._expected = factors
        work_items = {f"{way} {number}": partial(self._requests, way) for way in WAYS for number in range(clients)}
        super().__init__(work_items, PAUSE_S)

    def pids(self) -> set[int]:
        return {pid for _, pid in self.served}

    def summary(self) -> tuple[Any, ...]:
        return *super().summary(), self.factors

    def until_served_by(self, count: int, without: frozenset[int] = frozenset()) -> set[int]:
        """Waits until this many processes, except those in `without`, have sent some responses over each way. Returns
        the processes."""
        before = self.served.copy()

        def busy() -> set[int]:
            return {
                pid for pid in self.pids() - without if all(self.served[way, pid] > before[way, pid] for way in WAYS)
            }

        self.until(lambda: len(busy()) >= count)
        return busy()

    def check(self, way: str, value: float, first: float) -> None:
        assert first / value in self._expected, f"{way}: {value} became {first}"

    def count(self, value: float, first: float, server: int) -> None:
        self.factors[first / value] += 1

    def _requests(self, way: str) -> None:
        with WAYS[way](self._place) as send:
            self.send_all(way, send)
