"""Background load on an application, over handles, HTTP and gRPC. Each response is checked, and callers do not
retry."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import grpc
import numpy as np

from tests.fleet.balancers import PATIENCE_S
from tests.support import load
from tests.support.gateway.rpc import Rpcs, infer_request
from tests.support.load import Failed, Send

PAUSE_S = 0.01
"""Pause between a response and a thread's next request, so that the nodes have time for other work."""


@contextlib.contextmanager
def over_http(place: Any) -> Iterator[Send]:
    connection = http.client.HTTPConnection("127.0.0.1", place.http, timeout=PATIENCE_S)

    def send(model: str, value: float, sequence: int = 0, start: bool = False, end: bool = False) -> tuple[float, int]:
        document: dict[str, Any] = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [value]}]}
        if sequence:
            document["parameters"] = {"sequence_id": sequence, "sequence_start": start, "sequence_end": end}
        connection.request("POST", f"/v2/models/{model}/infer", json.dumps(document))
        answer = connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise Failed(f"http {answer.status}: {body.decode()}")
        first, pid = json.loads(body)["outputs"][0]["data"]
        return first, int(pid)

    with contextlib.closing(connection):
        yield send


@contextlib.contextmanager
def over_grpc(place: Any) -> Iterator[Send]:
    with Rpcs(place.grpc) as rpcs:

        def send(
            model: str, value: float, sequence: int = 0, start: bool = False, end: bool = False
        ) -> tuple[float, int]:
            x = np.array([[value]], np.float32)
            more = {"sequence_id": sequence, "sequence_start": start, "sequence_end": end} if sequence else {}
            request = infer_request(model, {"x": ("FP32", x, x.tobytes())}, parameters=more)
            try:
                answer = rpcs.ModelInfer(request, timeout=PATIENCE_S)
            except grpc.RpcError as error:
                raise Failed(f"grpc {error.code().name}: {error.details()}") from error
            first, pid = np.frombuffer(answer.raw_output_contents[0], np.float32)
            return float(first), int(pid)

        yield send


@contextlib.contextmanager
def over_handle(place: Any) -> Iterator[Send]:
    from shmserve.errors import ServeError
    from shmserve.ray import Handle

    handle = Handle(timeout=PATIENCE_S)

    def send(model: str, value: float, sequence: int = 0, start: bool = False, end: bool = False) -> tuple[float, int]:
        more = {"sequence": sequence, "sequence_start": start, "sequence_end": end} if sequence else {}
        try:
            first, pid = handle.infer(model, {"x": np.array([[value]], np.float32)}, **more)["y"][0]
        except ServeError as error:
            raise Failed(f"handle {error.code}: {error}") from error
        return float(first), int(pid)

    yield send


WAYS = {"handle": over_handle, "http": over_http, "grpc": over_grpc}


class Load(load.Load):
    """Sends requests from `clients` threads over each way, until the block ends. The pid of the model identifies the
    server."""

    def __init__(self, place: Any, clients: int = 2, factors: tuple[float, ...] = (2.0,)) -> None:
        self.factors: Counter[float] = Counter()
        """Factor -> number of consecutive latest responses with it."""
        self._place = place
        self._expected = factors
        works = {f"{way} {number}": partial(self._requests, way) for way in WAYS for number in range(clients)}
        super().__init__(works, PATIENCE_S, PAUSE_S)

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
