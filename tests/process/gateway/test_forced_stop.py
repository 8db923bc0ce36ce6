"""Requests in flight when a server stops without them: clients of the network endpoints get an error, not the end of
their connection."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path

import grpc
import numpy as np
import pytest

import shmserve
from tests.support.gateway.rpc import Rpcs, infer_request
from tests.support.gateway.served_gateways import (
    ANY_PORTS,
    END_S,
    WAITING_REQUEST,
    Serving,
    ask,
    serving,
    waiting_model,
)
from tests.support.living import IDENTITY, PYTHON, until
from tests.support.model_files import write_model

pytestmark = pytest.mark.process

STOPPED = "the server stopped before this request completed (--exit-timeout-secs)"
PART_OF_A_REQUEST = b"POST /v2/models/waits/infer HTTP/1.1\r\nHost: h\r\nContent-Length: 1000\r\n\r\n{"


@contextlib.contextmanager
def requests_in_flight(folder: Path, *options: str) -> Iterator[Serving]:
    """A request over HTTP and one over gRPC that the model never answers, and an incomplete one over HTTP. The test
    stops the server, and all of them get an error."""
    os.mkfifo(gate := folder / "gate")
    write_model(folder / "models", "waits", PYTHON, waiting_model(gate))
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(folder / "models", folder, *ANY_PORTS, *options))
        http_port = int(server.until(r"HTTP on 127.0.0.1, port (\d+)")[1])
        grpc_port = int(server.until(r"gRPC on 127.0.0.1, port (\d+)")[1])
        server.until("ready: serving 1 of 1")
        pool = stack.enter_context(ThreadPoolExecutor(1))
        answer = pool.submit(ask, http_port, "/v2/models/waits/infer", WAITING_REQUEST)
        incomplete = stack.enter_context(socket.create_connection(("127.0.0.1", http_port), END_S))
        incomplete.sendall(PART_OF_A_REQUEST)
        rpcs = stack.enter_context(Rpcs(grpc_port))
        x = np.array([[7]], np.float32)
        call = rpcs.ModelInfer.future(infer_request("waits", {"x": ("FP32", x, x.tobytes())}))
        stack.enter_context(gate.open("w"))  # blocks until the model has the first request
        with shmserve.Client(runtime_dir=server.runtime_dir) as client:
            until(client, lambda: client.activity()["server"]["in_flight"] == 2, "both requests")
        yield server
        status, body = answer.result(END_S)
        assert (status, json.loads(body)["error"]) == (503, STOPPED)
        assert incomplete.recv(4096).startswith(b"HTTP/1.1 503 ")
        failed = call.exception(END_S)
        assert (failed.code(), failed.details()) == (grpc.StatusCode.UNAVAILABLE, STOPPED)
        assert server.end() == 0, "after its clients"


def test_a_request_in_flight_is_answered_before_the_server_stops(tmp_path: Path) -> None:
    os.mkfifo(gate := tmp_path / "gate")
    write_model(tmp_path / "models", "waits", PYTHON, waiting_model(gate))
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


def test_an_idle_connection_is_answered_once_more_while_the_server_stops(tmp_path: Path) -> None:
    write_model(tmp_path / "models", "passes", IDENTITY, "")
    with serving(tmp_path / "models", tmp_path, *ANY_PORTS, "--http-keep-idle", "true") as server:
        caller = HTTPConnection("127.0.0.1", int(server.until(r"HTTP on 127.0.0.1, port (\d+)")[1]), timeout=END_S)
        server.until("ready: serving 1 of 1")
        for connection in (None, "close"):
            caller.request("GET", "/v2/models/passes/ready")
            answer = caller.getresponse()
            answer.read()
            assert (answer.status, answer.getheader("Connection")) == (200, connection)
            if connection is None:
                server.process.send_signal(signal.SIGTERM)
                server.until(r"\[gateway\] shutting down: new requests are refused")
        assert server.end() == 0, "it waits for nothing else"


def test_requests_in_flight_are_answered_at_a_second_ctrl_c(tmp_path: Path) -> None:
    with requests_in_flight(tmp_path, "--exit-timeout-secs", "3600") as server:
        server.process.send_signal(signal.SIGINT)
        server.until("for up to 3600 s; Ctrl-C again fails them")
        server.until(r"\[gateway\] shutting down: new requests are refused")
        server.process.send_signal(signal.SIGINT)
        server.until(r"SIGINT again: failing the \d request\(s\) in flight")


def test_requests_in_flight_are_answered_at_the_exit_timeout(tmp_path: Path) -> None:
    with requests_in_flight(tmp_path, "--exit-timeout-secs", "0.5") as server:
        server.process.send_signal(signal.SIGTERM)
