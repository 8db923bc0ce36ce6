"""The HTTP endpoint of a real gateway, with http.client and plain sockets as its clients."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shmserve.testing import Server
from tests.support.cases import cases
from tests.support.ensemble_models import config_text
from tests.support.gateway.running_gateway import (
    FAILS_AT_ONCE,
    Gateway,
    binary,
    metric,
    model,
    open_gate,
    rows,
    talker,
    wait_in_flight,
)
from tests.support.model_files import python_model, write_model
from tests.support.patience import PATIENCE_S
from tests.support.shared_server import SharedServer

pytestmark = pytest.mark.process

GATEWAY = ("--http-max-input-size=8000000", "--limit=http_json_bytes=200000", "--allow-client-shm")


def write_models(repository: Path) -> None:
    model(repository, "row", ["FP32"], "[ -1 ]", 8, "dynamic_batching { }\n")
    talker(repository)
    write_model(repository, "echo", config_text("identity", "x:STRING:[1]", "y:STRING:[1]"))


def test_generate(gateway: Gateway) -> None:
    status, answer = gateway.ask("POST", "/v2/models/talker/generate", {"count": 1, "id": "me"})
    assert status == 200, answer
    assert json.loads(answer) == {"model_name": "talker", "model_version": "1", "id": "me", "number": 0}
    for body, text in (
        ({"count": 0}, "exactly 1 response"),
        ({"count": 1000}, "exactly 1 response"),
        ({}, "missing required input(s) ['count']. Please provide all required input(s). Expected {\"count\": INT32}"),
        ({"n": 1}, "'n' is not an input of the model. Expected"),
    ):
        status, answer = gateway.ask("POST", "/v2/models/talker/generate", body)
        assert (status, text in json.loads(answer)["error"]) == (400, True)


def test_a_form_may_be_larger_than_json(gateway: Gateway) -> None:
    def upload(size: int) -> tuple[int, Any]:
        head = b'--x\r\nContent-Disposition: form-data; name="x"; filename="f"\r\n\r\n'
        body = head + b"a" * size + b"\r\n--x--\r\n"
        kind = {"Content-Type": "multipart/form-data; boundary=x"}
        status, answer = gateway.ask("POST", "/v2/models/echo/generate", body, **kind)
        return status, json.loads(answer)

    status, answer = upload(3_000_000)
    assert (status, len(answer["y"])) == (200, 3_000_000)
    status, answer = upload(8_000_000)
    assert (status, "--http-max-input-size" in answer["error"]) == (400, True)


def test_generate_waits_for_a_loading_model(server: SharedServer, gateway: Gateway, tmp_path: Path) -> None:
    """It needs the configuration, which is known once the model has loaded."""
    os.mkfifo(ready := tmp_path / "ready")
    tensor = "data_type: TYPE_FP32 dims: 1"
    config = f'backend: "python" input {{ name: "x" {tensor} }} output {{ name: "y" {tensor} }}'
    write_model(tmp_path, "late", config, python_model("return self.respond(x)", f"open({str(ready)!r}).read()"))
    (server.root / "late").symlink_to(tmp_path / "late")
    with server.client() as client, ThreadPoolExecutor(2) as pool:
        loaded = pool.submit(client.load, "late")
        while not any(one["name"] == "late" and one["state"] == "LOADING" for one in client.models()):
            assert not loaded.done()
        answer = pool.submit(gateway.ask, "POST", "/v2/models/late/generate", {"x": 2.5})
        assert gateway.ask("GET", "/v2/models/late/config")[0] == 404
        open_gate(ready)
        status, body = answer.result(PATIENCE_S)
        assert (status, json.loads(body)["y"]) == (200, 2.5)
        loaded.result(PATIENCE_S)
        (server.root / "late").unlink()
        client.unload("late")


def test_generate_stream(gateway: Gateway) -> None:
    """Several streams over one connection, each with its own end."""
    with contextlib.closing(gateway.connection()) as made:

        def stream(body: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
            made.request("POST", "/v2/models/talker/generate_stream", json.dumps(body))
            answer = made.getresponse()
            if not answer.headers["Content-Type"].startswith("text/event-stream"):
                return answer.status, [json.loads(answer.read())]
            *events, end = answer.read().decode().split("\n\n")
            assert end == ""
            return answer.status, [json.loads(event.removeprefix("data: ")) for event in events]

        for count in (1, 0, 300):
            status, events = stream({"count": count})
            assert (status, [event["number"] for event in events]) == (200, list(range(count)))
        status, events = stream({"count": -2})
        assert (status, len(events)) == (200, 3)
        assert "no more today" in events[2]["error"]
        status, (failed,) = stream({"count": FAILS_AT_ONCE})
        assert (status, "no more today" in failed["error"]) == (500, True)
        assert stream({})[0] == 400, "an error before the first event is an ordinary answer"


BOMB = gzip.compress(bytes(9_000_000))
TEXT = b'{"parameters":{"a":"%b"},"inputs":[{"name":"i_FP32","shape":[1,2],"datatype":"FP32","data":[1,2]}]}'


@cases(
    (b" " * 200_001, {}, "--limit http_json_bytes"),
    (BOMB, {"Content-Encoding": "gzip", "Inference-Header-Content-Length": "5"}, "--http-max-input-size"),
    (TEXT % (b"x" * 65_537), {}, "has 65537 bytes, over the limit of 65536"),
    ids=["large JSON", "binary bomb", "large parameter"],
)
def test_bodies_over_the_limits(body: bytes, headers: dict[str, str], text: str, gateway: Gateway) -> None:
    """The limits are those of the command line, and the server accepts no more than the gateway."""
    found, answer = gateway.ask("POST", "/v2/models/row/infer", body, **headers)
    error = json.loads(answer)["error"]
    assert (found, text in error) == (400, True), error
    assert not re.search(r"/(tmp|run|dev)/|0x[0-9a-f]{6}", error)


def test_closing_the_connection_cancels_a_stream(gateway: Gateway, server: Server) -> None:
    with contextlib.closing(gateway.connection()) as made:
        made.request("POST", "/v2/models/talker/generate_stream", '{"count": 1000000}')
        with made.getresponse() as answer:
            assert answer.readline().startswith(b"data: ")
    wait_in_flight(server, 0, 0)


@pytest.mark.parametrize("width", [4, 30_000])
def test_closing_the_connection_cancels_its_request(gateway: Gateway, server: Server, gate: Path, width: int) -> None:
    """One request runs, five wait and are cancelled."""
    names = [f"nv_inference_request_{outcome}_total" for outcome in ("success", "failure")]
    before = [metric(server, name, model="gated") for name in names]
    callers = [gateway.socket() for _ in range(6)]
    body, headers = binary(rows(width))
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = f"POST /v2/models/gated/infer HTTP/1.1\r\nHost: x\r\n{lines}Content-Length: {len(body)}\r\n\r\n"
    for made in callers:
        made.sendall(head.encode() + body)
        wait_in_flight(server, 1, 6)
    wait_in_flight(server, 6, 6)
    for made in callers[1:]:
        made.close()
    wait_in_flight(server, 1, 2)  # the worker has a second request, and reads its cancellation after the first
    open_gate(gate)
    assert callers[0].recv(65536).startswith(b"HTTP/1.1 200 ")
    callers[0].close()
    wait_in_flight(server, 0, 0)
    after = [metric(server, name, model="gated") for name in names]
    assert [now - then for now, then in zip(after, before, strict=True)] == [1, 5]


def test_the_gateway_reconnects_after_a_server_restart(tmp_path: Path) -> None:
    model(tmp_path / "models", "row", ["FP32"], "[ -1 ]", 8)
    body, headers = binary(rows(3000))
    with Server(tmp_path / "models") as server:
        gateway = Gateway(server)
        assert gateway.ask("POST", "/v2/models/row/infer", body, **headers)[0] == 200
        server.kill()
        assert gateway.ask("GET", "/v2/health/live") == (400, b"")
        status, answer = gateway.ask("POST", "/v2/models/row/infer", body, **headers)
        assert status == 503
        assert str(tmp_path) not in answer.decode()
        server.start()
        assert gateway.ask("GET", "/v2/health/ready") == (200, b"")
        assert gateway.ask("POST", "/v2/models/row/infer", body, **headers)[0] == 200
        gateway.stop()


def test_modules_are_frozen_before_serving(tmp_path: Path) -> None:
    """A full collection would delay all requests."""
    reader, writer = os.pipe()
    code = "import gc, sys; from shmserve.clients.cli.main import main; main(); print(gc.get_freeze_count())"
    ports = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0", "--ready-fd", str(writer)]
    command = [sys.executable, "-c", code, "gateway", "--runtime-dir", str(tmp_path), *ports]
    process = subprocess.Popen(command, pass_fds=[writer], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    os.close(writer)
    with open(reader) as ready:
        assert ready.read().startswith("READY")
    process.send_signal(signal.SIGTERM)
    assert int(process.communicate(timeout=PATIENCE_S)[0]) > 10_000
