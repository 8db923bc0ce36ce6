"""Background load on a balancer: requests and sequences over HTTP and gRPC, from several threads.

Each response is checked, and names the server that sent it. Failures are recorded, and clients do not retry.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from tests.fleet.balancers import PATIENCE_S, Balancer
from tests.support import load
from tests.support.gateway.rpc import Rpcs, infer_request
from tests.support.living import group
from tests.support.load import Failed, Send
from tests.support.model_files import python_model, write_model

CONFIG = """
backend: "python" max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 2 ] } ]
"""
TWICE = """
select.select([], [], [], 0.002)
return self.respond(np.concatenate([x * 2, np.full_like(x, {server})], axis=1))
"""
SUMS = """
name, flags = request.correlation_id(), request.flags()
if flags & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
    self.sums[name] = 0.0
self.sums[name] += x[0, 0]
return self.respond(np.array([[self.sums[name], {server}]], np.float32))
"""
SEQUENCES = "sequence_batching { max_sequence_idle_microseconds: 600000000 oldest { max_candidate_sequences: 64 } }\n"
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
    write_model(root, "twice", CONFIG + group(2), python_model(TWICE.format(server=server)))
    write_model(root, "sums", CONFIG + SEQUENCES, python_model(SUMS.format(server=server), "self.sums = {}"))


Mark = tuple[int, bool, bool]
"""Sequence, start, end."""


@contextlib.contextmanager
def over_http(balancer: Balancer) -> Iterator[Send]:
    connection = http.client.HTTPConnection("127.0.0.1", balancer.ports.http, timeout=PATIENCE_S)

    def send(model: str, value: float, mark: Mark | None = None) -> tuple[float, int]:
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [value]}
        body: dict[str, Any] = {"inputs": [tensor]}
        headers = {}
        if mark is not None:
            body["parameters"] = dict(zip(("sequence_id", "sequence_start", "sequence_end"), mark, strict=True))
            headers[HEADER] = str(mark[0])
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

    with contextlib.closing(connection):
        yield send


@contextlib.contextmanager
def over_grpc(balancer: Balancer) -> Iterator[Send]:
    with Rpcs(balancer.ports.grpc) as rpcs:

        def send(model: str, value: float, mark: Mark | None = None) -> tuple[float, int]:
            x = np.array([[value]], np.float32)
            more: dict[str, Any] = {}
            metadata = []
            if mark is not None:
                more["parameters"] = dict(zip(("sequence_id", "sequence_start", "sequence_end"), mark, strict=True))
                metadata = [(HEADER, str(mark[0]))]
            request = infer_request(model, {"x": ("FP32", x, x.tobytes())}, **more)
            try:
                answer = rpcs.ModelInfer(request, metadata=metadata, timeout=PATIENCE_S)
            except grpc.RpcError as error:
                raise Failed(f"grpc {error.code().name}: {error.details()}") from error
            first, server = np.frombuffer(answer.raw_output_contents[0], np.float32)
            return float(first), int(server)

        yield send


WAYS = {"http": over_http, "grpc": over_grpc}
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
        total, server = self._send("sums", value, (self._number, start, end))
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
        works = [self._requests, *([self._sequences] if sequences else [])]
        super().__init__(
            {
                f"{work.__name__} {way} {number}": partial(work, way)
                for way in WAYS
                for work in works
                for number in range(clients)
            },
            PATIENCE_S,
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
