"""Background load on a balancer: requests and sequences over HTTP and gRPC, from several threads.

Each response is checked, and names the server that sent it. Failures are recorded, and clients do not retry.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from tests.fleet.balancers import Balancer
from tests.support import load
from tests.support.living import group
from tests.support.load import Failed, Send

HEADER = "x-sequence-id"
STEPS = 25
SEQUENCE_ERRORS = (
    "must specify the START flag on the first request of the sequence",
    "the server failed while processing this request; do not retry it, because it may have run",
    "the server behind this gateway is unreachable, or ended before it responded",
    "Stream removed (RST_STREAM",
    "RemoteDisconnected",
    "upstream connect error or disconnect/reset before headers",
    "upstream_reset_before_response_started",
)
"""Errors that a sequence may get if its server is gone: from another server, from HAProxy, from the gateway, which may
outlive its broker for a moment, from HAProxy if it closes a reused connection, and from Envoy."""


def write_models(root: Path, server: int) -> None:
    load.write_times(root, "twice", str(server), more=group(2))
    load.write_sums(root, str(server))


WAYS: dict[str, Callable[[Balancer], AbstractContextManager[Send]]] = {
    "http": lambda balancer: load.over_http(balancer.ports.http, HEADER),
    "grpc": lambda balancer: load.over_grpc(balancer.ports.grpc, HEADER),
}
_NUMBERS = itertools.count(1000)


class Sequence:
    """A sequence whose responses are the running sums."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._number = next(_NUMBERS)
        self._sum = 0.0
        self.server = -1

    def step(self, value: float, end: bool = False) -> int:
        """Sends the next value. Returns the server that answered."""
        start = self.server < 0
        total, server = self._send("sums", value, self._number, start, end)
        self._sum += value
        assert total == self._sum, f"sequence {self._number}: {total}, expected {self._sum}"
        assert start or server == self.server, "another server has continued it"
        self.server = server
        return server


class Load(load.Load):
    """Sends requests from `clients` threads per protocol, and sequences from as many, until the block ends."""

    def __init__(self, balancer: Balancer, clients: int = 3, sequences: bool = True) -> None:
        self.last: dict[int, int] = {}
        """Server -> total number of responses at the time of its last one."""
        self.broken: list[str] = []
        """Errors of sequences."""
        self._balancer = balancer
        work_items = [self._requests, *([self._sequences] if sequences else [])]
        super().__init__(
            {
                f"{work.__name__} {way} {number}": partial(work, way)
                for way in WAYS
                for work in work_items
                for number in range(clients)
            }
        )

    def summary(self) -> tuple[Any, ...]:
        return *super().summary(), self.broken[:5]

    def until_each_serves(self, servers: int, count: int = 30) -> None:
        """Waits until each server has sent this many more responses over each protocol."""
        before = self.served.copy()
        keys = [(way, server) for way in WAYS for server in range(servers)]
        self.until(lambda: all(self.served[key] >= before[key] + count for key in keys))

    def until_avoided(self, server: int, count: int = 400) -> None:
        """Waits for this many consecutive responses from other servers."""
        self.until(lambda: self.total >= self.last.get(server, 0) + count)

    def count(self, value: float, first: float, server: int) -> None:
        self.last[server] = self.total

    def _requests(self, way: str) -> None:
        with WAYS[way](self._balancer) as send:
            self.send_all(way, send)

    def _sequences(self, way: str) -> None:
        with WAYS[way](self._balancer) as send:
            while not self._over.is_set():
                sequence = Sequence(send)
                try:
                    for step in range(1, STEPS + 1):
                        sequence.step(float(step), end=step == STEPS)
                except Failed as error:
                    self.broken.append(str(error))
