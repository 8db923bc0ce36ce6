"""What callers send to an application meanwhile, over handles, HTTP and gRPC. Each answer is checked, and nothing is
sent again."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import grpc
import numpy as np

from tests.fleet.balancers import PATIENCE_S
from tests.support.gateway.rpc import Rpcs, infer_request

PAUSE_S = 0.01
"""Between an answer and the next request of a thread, so that the nodes have time for other work."""
Send = Callable[..., tuple[float, int]]
"""`send(model, value, sequence=0, start=False, end=False)` returns the two numbers of the answer."""


class Failed(Exception):
    """A request has failed; the text says how."""


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


class Load:
    """Requests of `clients` threads over each way to "twice", until the block ends."""

    def __init__(self, place: Any, clients: int = 2, factors: tuple[float, ...] = (2.0,)) -> None:
        self.served: Counter[tuple[str, int]] = Counter()
        """Way and pid of the model -> answers."""
        self.factors: Counter[float] = Counter()
        """Factor -> answers in a row with it, up to now."""
        self.failed: list[str] = []
        self._place = place
        self._expected = factors
        self._news = threading.Condition()
        self._over = threading.Event()
        self._errors: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._guarded, args=(way,), name=f"{way} {number}")
            for way in WAYS
            for number in range(clients)
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, where: TracebackType | None) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        if error is None and self._errors:
            raise self._errors[0]

    @property
    def total(self) -> int:
        return sum(self.served.values())

    def pids(self) -> set[int]:
        return {pid for _, pid in self.served}

    def until(self, holds: Callable[[], object]) -> None:
        """Waits for answers until it is so."""
        with self._news:
            reached = self._news.wait_for(lambda: holds() or self._errors, PATIENCE_S)
            assert reached, (self.served, self.factors, self.failed[:5])

    def until_served_by(self, count: int, without: frozenset[int] = frozenset()) -> set[int]:
        """Until so many processes, without these, have given some answers over each way from now on. Returns them."""
        before = self.served.copy()

        def busy() -> set[int]:
            return {
                pid for pid in self.pids() - without if all(self.served[way, pid] > before[way, pid] for way in WAYS)
            }

        self.until(lambda: len(busy()) >= count)
        return busy()

    def until_more(self, count: int) -> None:
        wanted = self.total + count
        self.until(lambda: self.total >= wanted)

    def _guarded(self, way: str) -> None:
        try:
            self._send(way)
        except BaseException as error:
            self._errors.append(error)
            with self._news:
                self._news.notify_all()

    def _send(self, way: str) -> None:
        with WAYS[way](self._place) as send:
            for value in itertools.cycle(map(float, range(1, 100))):
                if self._over.is_set():
                    return
                try:
                    first, pid = send("twice", value)
                except Failed as error:
                    with self._news:
                        self.failed.append(str(error))
                        self._news.notify_all()
                    continue
                factor = first / value
                assert factor in self._expected, f"{way}: {value} became {first}"
                with self._news:
                    self.served[way, pid] += 1
                    self.factors[factor] += 1
                    self._news.notify_all()
                self._over.wait(PAUSE_S)
