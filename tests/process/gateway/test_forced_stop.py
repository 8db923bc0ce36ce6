"""Requests in flight when a server stops without them: clients of the network endpoints get an error, not the end of
their connection."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from tests.support.gateway.rpc import Rpcs, infer_request
from tests.support.gateway.served_gateways import (
    ANY_PORTS,
    END_S,
    WAITING_MODEL,
    WAITING_REQUEST,
    Serving,
    ask,
    serving,
)
from tests.support.living import PYTHON
from tests.support.model_files import write_model

pytestmark = pytest.mark.process

STOPPED = "the server stopped before this request completed (--exit-timeout-secs)"
PART_OF_A_REQUEST = b"POST /v2/models/waits/infer HTTP/1.1\r\nHost: h\r\nContent-Length: 1000\r\n\r\n{"


class InFlight:
    """A request over HTTP and one over gRPC that the model never answers, and an incomplete one over HTTP."""

    def __init__(self, server: Serving, gate: Path) -> None:
        http_port = int(server.until(r"HTTP on 127.0.0.1, port (\d+)")[1])
        grpc_port = int(server.until(r"gRPC on 127.0.0.1, port (\d+)")[1])
        server.until("ready: serving 1 of 1")
        self.http_answers: list[tuple[int, bytes]] = []
        self._thread = threading.Thread(
            target=lambda: self.http_answers.append(ask(http_port, "/v2/models/waits/infer", WAITING_REQUEST))
        )
        self._thread.start()
        self._incomplete = socket.create_connection(("127.0.0.1", http_port), END_S)
        self._incomplete.sendall(PART_OF_A_REQUEST)
        self._rpcs = Rpcs(grpc_port)
        x = np.array([[7]], np.float32)
        request = infer_request("waits", {"x": ("FP32", x, x.tobytes())})
        self._call: Any = self._rpcs.ModelInfer.future(request)
        self._gate = gate.open("w")  # blocks until the model has the first request

    def await_failures(self) -> None:
        self._thread.join(END_S)
        status, body = self.http_answers[0]
        assert (status, json.loads(body)["error"]) == (503, STOPPED)
        with self._incomplete:
            assert self._incomplete.recv(4096).startswith(b"HTTP/1.1 503 ")
        failed = self._call.exception(END_S)
        assert (failed.code(), failed.details()) == (grpc.StatusCode.UNAVAILABLE, STOPPED)

    def close(self) -> None:
        self._gate.close()
        self._rpcs.channel.close()
        self._incomplete.close()


@contextlib.contextmanager
def requests_in_flight(folder: Path, *options: str) -> Iterator[tuple[Serving, InFlight]]:
    gate = folder / "gate"
    os.mkfifo(gate)
    write_model(folder / "models", "waits", PYTHON, WAITING_MODEL.format(gate=gate))
    with serving(folder / "models", folder, *ANY_PORTS, *options) as server:
        with contextlib.closing(InFlight(server, gate)) as requests:
            yield server, requests
        assert server.end() == 0


def test_a_request_in_flight_is_answered_before_the_server_stops(tmp_path: Path) -> None:
    os.mkfifo(gate := tmp_path / "gate")
    write_model(tmp_path / "models", "waits", PYTHON, WAITING_MODEL.format(gate=gate))
    with serving(tmp_path / "models", tmp_path, *ANY_PORTS) as server, ThreadPoolExecutor(1) as pool:
        port = int(server.until(r"HTTP on 127.0.0.1, port (\d+)")[1])
        server.until("ready: serving 1 of 1")
        answer = pool.submit(ask, port, "/v2/models/waits/infer", WAITING_REQUEST)
        with gate.open("w"):  # opens once the model waits at the gate
            server.process.send_signal(signal.SIGTERM)
            server.until(r"\[gateway\] shutting down: new requests are refused")
            assert server.process.poll() is None, "it waits for its gateway"
        status, body = answer.result(END_S)
    assert (status, json.loads(body)["outputs"][0]["data"]) == (200, [7])


def test_requests_in_flight_are_answered_at_a_second_ctrl_c(tmp_path: Path) -> None:
    with requests_in_flight(tmp_path, "--exit-timeout-secs", "3600") as (server, requests):
        server.process.send_signal(signal.SIGINT)
        server.until("for up to 3600 s; Ctrl-C again fails them")
        server.until(r"\[gateway\] shutting down: new requests are refused")
        server.process.send_signal(signal.SIGINT)
        server.until(r"SIGINT again: failing the \d request\(s\) in flight")
        requests.await_failures()


def test_requests_in_flight_are_answered_at_the_exit_timeout(tmp_path: Path) -> None:
    with requests_in_flight(tmp_path, "--exit-timeout-secs", "0.5") as (server, requests):
        server.process.send_signal(signal.SIGTERM)
        requests.await_failures()
