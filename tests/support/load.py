"""Requests to servers behind one address: the models, ways to send, and threads that send until a block ends.

Each response of the models is checked, and names the server that sent it.
"""

from __future__ import annotations

import http.client
import itertools
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import grpc
import numpy as np

from tests.support.ensemble_models import config_text
from tests.support.gateway.rpc import Rpcs, infer_request
from tests.support.living import group
from tests.support.model_files import python_model, write_model
from tests.support.patience import CLUSTER_PATIENCE_S

TIMES = """
select.select([], [], [], {seconds})
return self.respond(np.concatenate([x * {factor}, np.full_like(x, {server})], axis=1))
"""
SUMS = """
name, flags = request.correlation_id(), request.flags()
if flags & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
    self.sums[name] = 0.0
self.sums[name] += x[0, 0]
return self.respond(np.array([[self.sums[name], {server}]], np.float32))
"""
SEQUENCES = "sequence_batching { max_sequence_idle_microseconds: 600000000 oldest { max_candidate_sequences: 64 } }\n"
WORK_S = 0.002
"""Duration of a request, so that some are always in flight."""

L = TypeVar("L", bound="Load")

Send = Callable[..., tuple[float, int]]
"""send(model, value, sequence=0, start=False, end=False) sends a value to a model, in a sequence if it has a number.
Returns the first value of the response, and the server that sent it."""


class Failed(Exception):
    """A request failed; the text is that of the error."""


def config(more: str) -> str:
    """x has one value, y two."""
    return config_text("python", "x:FP32:[1]", "y:FP32:[2]", f"max_batch_size: 8 {more}")


def write_times(
    root: Path,
    name: str,
    server: str,
    factor: float = 2.0,
    seconds: float = WORK_S,
    more: str = group(1),
    load: str = "pass",
) -> None:
    """y[0] = factor * x, y[1] = `server`, an expression. `load`: code that runs when the model is loaded."""
    source = python_model(TIMES.format(factor=factor, seconds=seconds, server=server), load)
    write_model(root, name, config(more), source)


def write_sums(root: Path, server: str) -> None:
    """y[0] = the sum of the sequence, y[1] = `server`."""
    source = python_model(SUMS.format(server=server), "self.sums = {}")
    write_model(root, "sums", config(group(1) + SEQUENCES), source)


def _in_sequence(sequence: int, start: bool, end: bool) -> dict[str, Any]:
    return {"sequence_id": sequence, "sequence_start": start, "sequence_end": end} if sequence else {}


@contextmanager
def over_http(port: int, header: str = "", address: str = "127.0.0.1") -> Iterator[Send]:
    """`header`: the name of a header that carries the number of the sequence."""
    connection = http.client.HTTPConnection(address, port, timeout=CLUSTER_PATIENCE_S)

    def send(model: str, value: float, sequence: int = 0, start: bool = False, end: bool = False) -> tuple[float, int]:
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [value]}
        body = {"inputs": [tensor], "parameters": _in_sequence(sequence, start, end)}
        headers = {header: str(sequence)} if header and sequence else {}
        try:
            connection.request("POST", f"/v2/models/{model}/infer", json.dumps(body), headers)
            answer = connection.getresponse()
            text = answer.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise Failed(f"http: {error!r}") from error
        if answer.status != 200:
            raise Failed(f"http {answer.status}: {text.decode()}")
        first, server = json.loads(text)["outputs"][0]["data"]
        return float(first), int(server)

    with closing(connection):
        yield send


@contextmanager
def over_grpc(port: int, header: str = "") -> Iterator[Send]:
    with Rpcs(port) as rpcs:

        def send(
            model: str, value: float, sequence: int = 0, start: bool = False, end: bool = False
        ) -> tuple[float, int]:
            x = np.array([[value]], np.float32)
            parameters = _in_sequence(sequence, start, end)
            request = infer_request(model, {"x": ("FP32", x, x.tobytes())}, parameters=parameters)
            metadata = [(header, str(sequence))] if header and sequence else []
            try:
                answer = rpcs.ModelInfer(request, metadata=metadata, timeout=CLUSTER_PATIENCE_S)
            except grpc.RpcError as error:
                raise Failed(f"grpc {error.code().name}: {error.details()}") from error
            first, server = np.frombuffer(answer.raw_output_contents[0], np.float32)
            return float(first), int(server)

        yield send


class Load:
    """`work_items`: name of a thread -> its function. Nothing is sent again."""

    def __init__(self, work_items: Mapping[str, Callable[[], None]], pause_s: float = 0.0) -> None:
        self.served: Counter[tuple[str, int]] = Counter()
        """Way and server -> number of responses of the model "twice"."""
        self.failed: list[str] = []
        self._pause_s = pause_s
        self._news = threading.Condition()
        self._over = threading.Event()
        self._errors: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,), name=name) for name, work in work_items.items()
        ]

    def __enter__(self: L) -> L:
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

    def until(self, holds: Callable[[], object]) -> None:
        with self._news:
            reached = self._news.wait_for(lambda: holds() or self._errors, CLUSTER_PATIENCE_S)
            assert reached, self.summary()

    def until_more(self, count: int) -> None:
        wanted = self.total + count
        self.until(lambda: self.total >= wanted)

    def summary(self) -> tuple[Any, ...]:
        return self.served, self.failed[:5]

    def send_all(self, way: str, send: Send) -> None:
        for value in itertools.cycle(map(float, range(1, 100))):
            if self._over.is_set():
                return
            try:
                first, server = send("twice", value)
            except Failed as error:
                with self._news:
                    self.failed.append(str(error))
                    self._news.notify_all()
                continue
            self.check(way, value, first)
            with self._news:
                self.served[way, server] += 1
                self.count(value, first, server)
                self._news.notify_all()
            if self._pause_s:
                self._over.wait(self._pause_s)

    def check(self, way: str, value: float, first: float) -> None:
        assert first == 2 * value, f"{way}: {value} became {first}"

    def count(self, value: float, first: float, server: int) -> None:
        """A hook for subclasses that record more about a response."""

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._errors.append(error)
            with self._news:
                self._news.notify_all()
