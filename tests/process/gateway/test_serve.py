"""`shmserve serve` and its gateways, as real processes: gateways start, restart and stop with the server. When it stops
without the requests in flight, clients of the network endpoints get an error, not the end of their connection.

The tests wait for a line of the server's log, or for the end of a process.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path

import grpc
import numpy as np
import pytest

import shmserve
from shmserve.testing import Server
from tests.support.cases import cases
from tests.support.gateway.rpc import Rpcs, infer_request
from tests.support.gateway.served_gateways import (
    ANY_PORTS,
    END_S,
    WAITING_REQUEST,
    Serving,
    ask,
    gateways_of,
    serving,
    waiting_model,
)
from tests.support.launch import await_end, descriptors_of, identity
from tests.support.living import PYTHON, until
from tests.support.model_files import write_model

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models")
    identity(place, "same")
    return place


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """The named pipe that releases the model `waits`, in tmp_path/models."""
    os.mkfifo(made := tmp_path / "gate")
    write_model(tmp_path / "models", "waits", PYTHON, waiting_model(made))
    return made


@contextlib.contextmanager
def served(repository: Path, place: Path, *options: str) -> Iterator[tuple[Serving, int]]:
    """A server that is ready, and its port for HTTP."""
    with serving(repository, place, *ANY_PORTS, *options) as server:
        port = int(server.until(r"HTTP on 127.0.0.1, port (\d+)")[1])
        server.until("ready: serving 1 of 1")
        yield server, port


def test_a_killed_gateway_is_restarted_on_its_port_and_stops_with_the_server(repository: Path, tmp_path: Path) -> None:
    with serving(repository, tmp_path, *ANY_PORTS, "--log-format", "ISO8601") as server:
        port = int(server.until(r"INFO \[gateway\] HTTP on 127.0.0.1, port (\d+)")[1])
        metrics = int(server.until(r"INFO \[gateway\] Prometheus on 127.0.0.1, port (\d+)")[1])
        server.until("ready: serving 1 of 1")
        assert ask(port, "/v2/health/ready")[0] == 200
        assert b"nv_inference_request_success" in ask(metrics, "/metrics")[1]
        with shmserve.Client(runtime_dir=server.runtime_dir) as client:
            (first,) = server.gateways()
            os.kill(first, signal.SIGKILL)
            server.until(r"ERROR gateway 0 exited \(signal SIGKILL\); restarting it immediately")
            assert client.ready("same")  # no other process was affected
            assert int(server.until(r"HTTP on 127.0.0.1, port (\d+)")[1]) == port
            assert int(server.until(r"Prometheus on 127.0.0.1, port (\d+)")[1]) == metrics
        status, body = ask(port, "/v2/models/same/infer", WAITING_REQUEST)
        assert (status, json.loads(body)["outputs"][0]["data"]) == (200, [7])
        assert b"\nshmserve_gateway_restarts_total 1\n" in ask(metrics, "/metrics")[1]
        (second,) = server.gateways()
        server.process.send_signal(signal.SIGHUP)
        server.until(r"\[gateway\] certificates and tokens reloaded")
        server.process.kill()
        await_end(second)
        server.end()
        server.process.returncode = 0


def test_several_gateways_share_the_ports(repository: Path, tmp_path: Path) -> None:
    with serving(repository, tmp_path, *ANY_PORTS, "--gateways", "2") as server:
        ports = {server.until(r"HTTP on 127.0.0.1, port (\d+)")[1] for _ in range(2)}
        server.until("ready: serving 1 of 1")
        (port,) = map(int, ports)
        first, second = server.gateways()
        os.kill(first, signal.SIGKILL)
        await_end(first)
        assert ask(port, "/v2/health/ready")[0] == 200
        server.until("HTTP on")
        assert second in server.gateways()


def test_a_gateway_that_cannot_start_ends_the_server(repository: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for option, code, text in (
            (f"--http-port={port}", 1, f"cannot listen on 127.0.0.1, port {port}.*; use other ports"),
            ("--http-roles=never", 2, "'never' is not a role"),
        ):
            server = Serving(repository, tmp_path / str(code), *ANY_PORTS, option)
            found = server.until("ERROR cannot start the gateway").string
            assert server.end() == code
            assert re.search(text, found)
            assert ("use other ports" in found) == (code == 1)
            assert "ready:" not in "".join(server.log)


def test_log_and_trace_settings_are_changed_over_http(repository: Path, tmp_path: Path) -> None:
    file = tmp_path / "traces.json"
    options = ("--http-roles", "infer,observe,operate", "--trace-config", f"triton,file={file}")
    with served(repository, tmp_path, *options) as (server, port):
        asked, told = ask(port, "/v2/logging", {"log_format": "json", "log_verbose_level": 2})
        assert (asked, json.loads(told)["log_verbose_level"]) == (200, 2)
        assert json.loads(server.until("log settings changed").string)["log_format"] == "json"
        assert ask(port, "/v2/logging") == (200, told)
        wanted = {"trace_level": ["TIMESTAMPS"], "trace_rate": "2", "trace_count": "3"}
        status, body = ask(port, "/v2/models/same/trace/setting", wanted)
        assert (status, json.loads(body)["trace_file"]) == (200, file.name)
        for _ in range(9):
            assert ask(port, "/v2/models/same/infer", WAITING_REQUEST | {"id": "mine"})[0] == 200
            assert json.loads(server.until("ran batch").string)["level"] == "debug"
        assert json.loads(ask(port, "/v2/models/same/trace/setting")[1])["trace_count"] == "0"
        wrong = {"inputs": [WAITING_REQUEST["inputs"][0] | {"name": "x\nforged"}]}
        assert ask(port, "/v2/models/same/infer", wrong)[0] == 400
        assert "x\nforged" in json.loads(server.until("refused 1 request").string)["message"]
    found = json.loads(file.read_text())
    assert [line["request_id"] for line in found if "model_name" in line] == ["mine"] * 3
    times = {line["timestamps"][0]["name"]: line["timestamps"][0]["ns"] for line in found if "timestamps" in line}
    assert sorted(times, key=lambda name: times[name]) == list(times)  # they are in order
    assert {"COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"} <= times.keys()


TRITON_COMMAND_LINE = """
    --triton-compatible --http-address=127.0.0.1 --grpc-address=127.0.0.1 --model-control-mode=explicit --load-model=*
    --strict-model-config=false --strict-readiness=true --exit-on-error=true --exit-timeout-secs=30 --allow-http=true
    --allow-grpc=true --allow-metrics=true --allow-client-shm=true --log-verbose=1 --log-info=true --http-thread-count=8
    --pinned-memory-pool-byte-size=0 --min-supported-compute-capability=6.0 --cache-config=local,size=1048576
    --backend-config=python,shm-default-byte-size=1048576 --rate-limit=off --id=mine
"""
"""Flags that scripts give to tritonserver."""
NONE = r'{"error":"Request for unknown model: \'none\' is not found"}'
LOADING = "/v2/repository/models"
TRITON_FORMS = (
    # Scripts compare the output of curl -s -w '%{http_code}' with 200.
    ("GET /v2/health/live", "", "200 OK", ""),
    ("GET /v2/health/ready", "", "200 OK", ""),
    ("GET /health", "", "200 OK", ""),
    ("GET /v2/models/same/ready", "", "200 OK", ""),
    ("GET /v2/models/same/versions/1/ready", "", "200 OK", ""),
    ("GET /v2/models/same/versions/2/ready", "", "400 Bad Request", r'{"error":"Model version not ready.*"}'),
    ("GET /v2/models/none/ready", "", "400 Bad Request", r'{"error":"Model version not ready.*"}'),
    ("GET /v2/models/none", "", "404 Not Found", NONE),
    ("GET /v2/models/none/stats", "", "404 Not Found", NONE),
    ("GET /v2/models/same", "", "200 OK", r'{"name":"same","versions":\["1"\],"platform":"identity","inputs":.*}'),
    ("GET /v2/models/same/config", "", "200 OK", r'{"name":"same",.*"max_batch_size":8,.*}'),
    ("GET /v2/models/same/stats", "", "200 OK", r'{"model_stats":\[{"name":"same","version":"1",.*}\]}'),
    ("GET /v2/nothing", "", "404 Not Found", r'{"error":"Not Found"}'),
    ("GET /v2", "", "200 OK", r'{"name":"mine","version":"[^"]+","extensions":\[.*"system_shared_memory".*\]}'),
    ("POST /v2/models/none/infer", "{}", "404 Not Found", NONE),
    ("POST /v2/models/none/infer", "?", "404 Not Found", NONE),
    ("POST /v2/models/none/generate", "{}", "404 Not Found", NONE),
    ("POST /v2/models/same/infer", "{}", "400 Bad Request", r'{"error":"failed to parse the request JSON buffer.*"}'),
    ("POST /v2/repository/index", "", "200 OK", r'\[{"name":"same","version":"1","state":"READY".*}\]'),
    ("POST /v2/systemsharedmemory/unregister", "", "200 OK", ""),
    # Triton: 500
    (f"POST {LOADING}/none/load", "", "404 Not Found", r'{"error":"failed to load \'none\', failed to poll from.*"}'),
    (f"POST {LOADING}/none/unload", "", "200 OK", ""),
    (f"POST {LOADING}/same/load", "", "200 OK", ""),
    (f"POST {LOADING}/same/unload", "", "200 OK", ""),
    ("GET /v2/models/same/ready", "", "400 Bad Request", r'{"error":"Model version not ready.*"}'),
    ("GET /metrics", "", "200 OK", r'(?s).*\nnv_inference_request_success{model="same",version="1"} 0\n.*'),
)


def test_scripts_for_triton_get_the_responses_that_they_compare(tmp_path: Path) -> None:
    """Status line and whole body of each response, in this order, and a start with the flags of such scripts."""
    identity(tmp_path / "models", "same")
    with Server(tmp_path / "models", *TRITON_COMMAND_LINE.split(), gateway=True) as server:
        for line, body, status, pattern in TRITON_FORMS:
            host, _, port = server.endpoints["metrics" if "/metrics" in line else "http"].partition(":")
            with socket.create_connection((host, int(port)), END_S) as caller:
                caller.sendall(
                    f"{line} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
                    f"{body}".encode()
                )
                with caller.makefile("rb") as answer:
                    head, _, found = answer.read().decode().partition("\r\n\r\n")
            assert head.partition("\r\n")[0] == f"HTTP/1.1 {status}", line
            assert re.fullmatch(pattern, found), (line, found)


@cases(
    ("--model-repository={broken} --exit-on-error=true", 1),
    ("--model-repository={broken} --triton-compatible", 1),
    ("--model-repository={broken}/none", 2),  # Triton: 1
    ("--model-repository={broken} --no-such-flag", 2),  # Triton: 1
    ("--help", 0),
)
def test_exit_codes_of_a_start_that_fails(words: str, code: int, tmp_path: Path) -> None:
    write_model(tmp_path, "broken", PYTHON, "raise ValueError")
    command = [sys.executable, "-m", "shmserve.broker.main", "--runtime-dir", str(tmp_path / "run"), "--no-gateway"]
    done = subprocess.run([*command, *words.format(broken=tmp_path).split()], capture_output=True, timeout=END_S)
    assert done.returncode == code, done.stderr


def test_r15_only_the_gateway_listens_on_ports_and_only_on_loopback(repository: Path) -> None:
    with Server(repository, "--limit=http_idle_secs=5", gateway=True) as server:
        assert set(server.endpoints) == {"http", "grpc", "metrics"}
        assert ask(int(server.endpoints["http"].partition(":")[2]), "/v2/health/ready")[0] == 200
        assert listening(server.pid) == set()
        (gateway,) = gateways_of(server.pid)
        assert listening(gateway) == set(server.endpoints.values())


def listening(pid: int) -> set[str]:
    """The TCP addresses at which the process listens, according to the kernel."""
    owned = set(descriptors_of(pid))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in owned:
                place, _, port = fields[1].partition(":")
                address = ".".join(map(str, bytes.fromhex(place)[::-1])) if table == "tcp" else place
                found.add(f"{address}:{int(port, 16)}")
    return found


STOPPED = "the server stopped before this request completed (--exit-timeout-secs)"
PART_OF_A_REQUEST = b"POST /v2/models/waits/infer HTTP/1.1\r\nHost: h\r\nContent-Length: 1000\r\n\r\n{"


@contextlib.contextmanager
def requests_in_flight(gate: Path, *options: str) -> Iterator[Serving]:
    """A request over HTTP and one over gRPC that the model never answers, and an incomplete one over HTTP. The test
    stops the server, and all of them get an error."""
    with contextlib.ExitStack() as stack:
        server, http_port = stack.enter_context(served(gate.with_name("models"), gate.parent, *options))
        grpc_port = int(server.until(r"gRPC on 127.0.0.1, port (\d+)")[1])
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


def test_a_request_in_flight_is_answered_before_the_server_stops(gate: Path, tmp_path: Path) -> None:
    with served(tmp_path / "models", tmp_path) as (server, port), ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, port, "/v2/models/waits/infer", WAITING_REQUEST)
        with gate.open("w"):  # opens once the model waits at the gate
            server.process.send_signal(signal.SIGTERM)
            server.until(r"\[gateway\] shutting down: new requests are refused")
            assert server.process.poll() is None, "it waits for its gateway"
        status, body = answer.result(END_S)
    assert (status, json.loads(body)["outputs"][0]["data"]) == (200, [7])


def test_an_idle_connection_is_answered_once_more_while_the_server_stops(repository: Path, tmp_path: Path) -> None:
    with served(repository, tmp_path, "--http-keep-idle", "true") as (server, port):
        caller = HTTPConnection("127.0.0.1", port, timeout=END_S)
        for connection in (None, "close"):
            caller.request("GET", "/v2/models/same/ready")
            answer = caller.getresponse()
            answer.read()
            assert (answer.status, answer.getheader("Connection")) == (200, connection)
            if connection is None:
                server.process.send_signal(signal.SIGTERM)
                server.until(r"\[gateway\] shutting down: new requests are refused")
        assert server.end() == 0, "it waits for nothing else"


def test_requests_in_flight_are_answered_at_a_second_ctrl_c(gate: Path) -> None:
    with requests_in_flight(gate, "--exit-timeout-secs", "3600") as server:
        server.process.send_signal(signal.SIGINT)
        server.until("for up to 3600 s; Ctrl-C again fails them")
        server.until(r"\[gateway\] shutting down: new requests are refused")
        server.process.send_signal(signal.SIGINT)
        server.until(r"SIGINT again: failing the \d request\(s\) in flight")


def test_requests_in_flight_are_answered_at_the_exit_timeout(gate: Path) -> None:
    with requests_in_flight(gate, "--exit-timeout-secs", "0.5") as server:
        server.process.send_signal(signal.SIGTERM)
