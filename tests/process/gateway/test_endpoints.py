"""The HTTP and gRPC endpoints of a real gateway, with http.client, plain sockets and grpcio as their clients."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from shmserve import Client
from shmserve.testing import Server
from tests.support.cases import cases
from tests.support.ensemble_models import config_text
from tests.support.gateway.rpc import Rpcs, infer_request, outputs, talk
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

GATEWAY = (
    *("--http-max-input-size=8000000", "--limit=http_json_bytes=200000", "--allow-client-shm"),
    "--grpc-infer-response-compression-level=low",
)


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


@pytest.fixture(scope="module")
def rpcs(gateway: Gateway) -> Iterator[Rpcs]:
    with Rpcs(gateway.grpc) as made:
        yield made


def succeeded(client: Client, model: str) -> int:
    """The number of requests to a model that have succeeded."""
    (found,) = client.statistics(model)["model_stats"]
    return int(found["inference_stats"]["success"]["count"])


def row(width: int, value: float = 0.0, name: str = "row", **more: Any) -> Any:
    array = np.full((1, width), value, np.float32)
    return infer_request(name, {"i_FP32": ("FP32", array, array.tobytes())}, **more)


def test_large_messages_with_and_without_compression(rpcs: Rpcs) -> None:
    large = row(5_000_000, 1.5)
    for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip):
        assert outputs(rpcs.ModelInfer(large, compression=compression))["o_FP32"] == large.raw_input_contents[0]


def test_no_call_is_lost_when_a_connection_reaches_its_maximum_age(server: Server) -> None:
    """A call that grpcio was about to send when the connection ended fails in the client. None that the gateway has
    received does."""
    gateway = Gateway(server, "--grpc-max-connection-age", "50")
    with Rpcs(gateway.grpc) as rpcs, server.client() as client:
        before, answered = succeeded(client, "row"), 0
        states: list[Any] = []
        rpcs.channel.subscribe(states.append)
        while states.count(grpc.ChannelConnectivity.READY) < 4:
            sent = [row(500, number) for number in range(20)]
            calls = [rpcs.ModelInfer.future(request) for request in sent]
            for request, call in zip(sent, calls, strict=True):
                if call.exception(PATIENCE_S) is None:
                    assert outputs(call.result())["o_FP32"] == request.raw_input_contents[0]
                    answered += 1
                else:
                    assert call.details().startswith("Stream removed"), call.details()
        assert answered == succeeded(client, "row") - before > 0
    assert "Traceback" not in gateway.stop().decode()


@pytest.mark.parametrize("way", ["cancel", "deadline", "stream", "channel"])
def test_a_disconnected_client_cancels_its_requests(gateway: Gateway, server: Server, gate: Path, way: str) -> None:
    with Rpcs(gateway.grpc) as rpcs:
        if way == "stream":
            with talk(rpcs) as stream:
                stream.say(*[row(4, name="gated") for _ in range(6)])
                wait_in_flight(server, 6, 6)
        else:
            calls = [rpcs.ModelInfer.future(row(30_000, name="gated"))]
            wait_in_flight(server, 1, 1)  # on a busy machine, none of those with a deadline might arrive
            limit = 0.5 if way == "deadline" else 60.0
            calls += [rpcs.ModelInfer.future(row(30_000, name="gated"), timeout=limit) for _ in range(5)]
            if way == "deadline":
                for call in calls[1:]:
                    assert call.exception(PATIENCE_S).code() is grpc.StatusCode.DEADLINE_EXCEEDED
            else:
                wait_in_flight(server, 6, 6)
            if way != "channel":
                for call in calls:
                    call.cancel()
    wait_in_flight(server, 1, 2)  # the worker has one running and one waiting request, and reads orders when it is done
    open_gate(gate)
    wait_in_flight(server, 0, 0)


def test_a_stream_of_many_requests(rpcs: Rpcs) -> None:
    """More requests than may be in flight, small and large, with one error, are answered in order."""
    with talk(rpcs) as stream:
        widths = [20_000 if number % 7 == 0 else 4 for number in range(600)]
        for number, width in enumerate(widths):
            stream.say(row(width, number, id=str(number)) if number != 300 else row(4, name="nothing", id="300"))
        answers = stream.rest()
    assert [answer.infer_response.id for answer in answers] == [str(number) for number in range(600)]
    for number, (answer, width) in enumerate(zip(answers, widths, strict=True)):
        if number == 300:
            assert "'nothing'" in answer.error_message
            continue
        assert answer.infer_response.parameters["triton_final_response"].bool_param
        assert outputs(answer.infer_response)["o_FP32"] == np.full(width, number, np.float32).tobytes()
