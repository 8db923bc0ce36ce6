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
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from shmserve.dtypes import ITEM_BYTES
from shmserve.testing import Server
from tests.conformance.client_ways import NUMBERS, data
from tests.support.gateway.running_gateway import (
    FAILS_AT_ONCE,
    Gateway,
    binary,
    metric,
    model,
    open_gate,
    outputs,
    rows,
    talker,
    wait_in_flight,
)
from tests.support.model_files import python_model, write_model

pytestmark = pytest.mark.process

ODD = "row, too (v2)"
LIMITS = ("--http-max-input-size=8000000", "--http-max-json-size=200000")


@pytest.fixture(scope="module")
def server(repository: Path, gate: Path) -> Iterator[Server]:
    model(repository, "types", list(ITEM_BYTES), "[ -1, -1 ]", 0)
    model(repository, "row", ["FP32"], "[ -1 ]", 8, "dynamic_batching { }\n")
    model(repository, "spare", ["FP32"], "[ -1 ]", 8)
    model(repository, "word", ["BYTES"], "[ 1 ]", 8)
    model(repository, ODD, ["FP32"], "[ -1 ]", 8)
    talker(repository)
    with Server(repository, "--model-control-mode", "explicit", "--load-model", "*") as running:
        yield running


@pytest.fixture(scope="module")
def gateway(server: Server) -> Iterator[Gateway]:
    made = Gateway(server, *LIMITS, "--allow-client-shm")
    yield made
    log = made.stop().decode()
    assert "Traceback" not in log
    assert "ERROR" not in log


# ---------------------------------------------------------------------------------------- queries


def test_health_and_documents(gateway: Gateway) -> None:
    assert gateway.ask("GET", "/v2/health/live") == (200, b"")
    assert gateway.ask("GET", "/v2/health/ready") == (200, b"")
    assert gateway.ask("GET", "/v2/models/row/ready") == (200, b"")
    assert gateway.ask("GET", "/v2/models/row/versions/1/ready")[0] == 200
    assert gateway.ask("GET", "/v2/models/nothing/ready")[0] == 400
    server = json.loads(gateway.ask("GET", "/v2")[1])
    assert server["name"] == "shmserve"
    assert "binary_tensor_data" in server["extensions"]
    metadata = json.loads(gateway.ask("GET", "/v2/models/row")[1])
    assert metadata["inputs"] == [{"name": "i_FP32", "datatype": "FP32", "shape": [-1, -1]}]
    config = json.loads(gateway.ask("GET", "/v2/models/row/config")[1])
    assert config["max_batch_size"] == 8
    index = json.loads(gateway.ask("POST", "/v2/repository/index")[1])
    assert {(one["name"], one["state"]) for one in index} >= {("row", "READY"), ("types", "READY")}
    stats = json.loads(gateway.ask("GET", "/v2/models/row/stats")[1])
    assert stats["model_stats"][0]["name"] == "row"
    assert gateway.ask("GET", "/v2/systemsharedmemory/status") == (200, b"[]")


def test_missing_roles_and_unknown_paths_are_refused(gateway: Gateway) -> None:
    """The default roles are infer and observe. A refused request's body is not read."""
    for path in ("/v2/repository/models/row/load", "/v2/repository/models/row/unload", "/v2/logging"):
        status, body = gateway.ask("POST", path, b"{}")
        assert status == 403
        assert "needs the role operate" in json.loads(body)["error"]
    handle = {"raw_handle": {"b64": "AA=="}, "device_id": 0, "byte_size": 1}
    assert gateway.ask("POST", "/v2/cudasharedmemory/region/r/register", handle)[0] == 400
    assert gateway.ask("GET", "/nowhere") == (404, b'{"error":"Not Found"}')
    assert gateway.ask("PUT", "/v2/health/live")[0] == 405
    assert gateway.ask("GET", "/v2/models/nothing/config")[0] == 404


def test_load_and_unload_with_the_role_operate(server: Server) -> None:
    gateway = Gateway(server, "--http-roles", "observe,operate")
    body, headers = binary(rows(4))
    assert gateway.ask("POST", "/v2/models/spare/infer", body, **headers)[0] == 403
    assert gateway.ask("POST", "/v2/repository/models/spare/unload") == (200, b"")
    assert gateway.ask("POST", "/v2/repository/models/nothing/unload") == (200, b"")
    assert gateway.ask("POST", "/v2/repository/models/spare/load") == (200, b"")
    assert gateway.ask("GET", "/v2/models/spare/ready")[0] == 200
    config = {"backend": "identity", "max_batch_size": 3,
              "input": [{"name": "i", "data_type": "TYPE_FP32", "dims": [-1]}],
              "output": [{"name": "o", "data_type": "TYPE_FP32", "dims": [-1]}]}  # fmt: skip
    load = {"parameters": {"config": json.dumps(config), "file:1/weights": "eA=="}}
    assert gateway.ask("POST", "/v2/repository/models/sent/load", load) == (200, b"")
    assert json.loads(gateway.ask("GET", "/v2/models/sent/config")[1])["max_batch_size"] == 3
    status, answer = gateway.ask("POST", "/v2/repository/models/nothing/load")
    assert status == 404
    assert "failed to load 'nothing', failed to poll from model repository" in json.loads(answer)["error"]
    gateway.stop()
    with server.client() as client:
        client.unload("sent")  # returns when the model's process has ended


def test_metrics(gateway: Gateway) -> None:
    with contextlib.closing(gateway.connection(gateway.metrics)) as made:
        made.request("GET", "/metrics")
        answer = made.getresponse()
        assert answer.headers["Content-Type"].startswith("text/plain")
        names = {family.name for family in text_string_to_metric_families(answer.read().decode())}
        assert {"nv_inference_request_success", "shmserve_gateway_http_connections"} <= names
        made.request("GET", "/metrics", headers={"Accept-Encoding": "gzip"})
        answer = made.getresponse()
        assert answer.headers["Content-Encoding"] == "gzip"
        assert b"nv_inference_request_success" in gzip.decompress(answer.read())
        made.request("GET", "/v2/health/live")
        assert made.getresponse().status == 404


# ---------------------------------------------------------------------------------------- inference


@pytest.mark.parametrize("shape", [(2, 3), (40, 300), (0, 4)], ids=str)
def test_all_types_as_binary_data(gateway: Gateway, shape: tuple[int, int]) -> None:
    """Small tensors are sent in messages, large ones in shared memory."""
    given: dict[str, tuple[str, np.ndarray[Any, Any], bytes]] = {}
    for name in NUMBERS:
        array = data(name, shape)
        given[f"i_{name}"] = (name, array, array.tobytes())
    words = b"".join(len(word).to_bytes(4, "little") + word for word in [b"\xffword"] * (shape[0] * shape[1]))
    given["i_BYTES"] = ("BYTES", np.empty(shape), words)
    with contextlib.closing(gateway.connection()) as made:
        made.request("POST", "/v2/models/types/infer", *binary(given, id="me"))
        document, found = outputs(made.getresponse())
    assert (document["model_name"], document["model_version"], document["id"]) == ("types", "1", "me")
    assert found == {f"o{name[1:]}": raw for name, (_, _, raw) in given.items()}
    assert all(tuple(output["shape"]) == shape for output in document["outputs"])


def test_json_inputs_and_outputs(gateway: Gateway) -> None:
    x = [[1.5, float("nan"), -2.0]]
    asked = {"inputs": [{"name": "i_FP32", "shape": [1, 3], "datatype": "FP32", "data": x}]}
    status, body = gateway.ask("POST", "/v2/models/row/versions/1/infer", asked)
    assert status == 200
    (output,) = json.loads(body)["outputs"]
    assert output["name"] == "o_FP32"
    np.testing.assert_array_equal(output["data"], x[0])


def test_many_requests_on_one_connection(gateway: Gateway) -> None:
    """Large and small requests alternate and reuse the same memory."""
    with contextlib.closing(gateway.connection()) as made:
        for number in range(30):
            given = rows(16 if number % 3 else 300_000, number)
            made.request("POST", "/v2/models/row/infer", *binary(given))
            assert outputs(made.getresponse())[1]["o_FP32"] == given["i_FP32"][2]


def test_a_raw_body_is_the_only_input(gateway: Gateway) -> None:
    for path, body, expected in (
        ("row", rows(7)["i_FP32"][2], rows(7)["i_FP32"][2]),
        ("row", rows(70_000)["i_FP32"][2], rows(70_000)["i_FP32"][2]),
        ("word", b"hello", b"\5\0\0\0hello"),
    ):
        with contextlib.closing(gateway.connection()) as made:
            made.request("POST", f"/v2/models/{path}/infer", body, {"Inference-Header-Content-Length": "0"})
            assert list(outputs(made.getresponse())[1].values()) == [expected]


@pytest.mark.parametrize("way", ["gzip", "deflate"])
def test_compressed_bodies(gateway: Gateway, way: str) -> None:
    body, headers = binary(rows(5000))
    packed = gzip.compress(body) if way == "gzip" else zlib.compress(body)
    with contextlib.closing(gateway.connection()) as made:
        headers |= {"Content-Encoding": way, "Accept-Encoding": way}
        made.request("POST", "/v2/models/row/infer", packed, headers)
        answer = made.getresponse()
        assert answer.status == 200
        assert answer.headers["Content-Encoding"] == way
        found = zlib.decompress(answer.read(), 47)
    assert found.endswith(rows(5000)["i_FP32"][2])


def test_a_chunked_body(gateway: Gateway) -> None:
    body, headers = binary(rows(50_000))
    with contextlib.closing(gateway.connection()) as made:
        pieces = iter([body[:10], body[10:1000], body[1000:]])
        made.request("POST", "/v2/models/row/infer", pieces, headers, encode_chunked=True)
        assert outputs(made.getresponse())[1]["o_FP32"] == rows(50_000)["i_FP32"][2]


# ---------------------------------------------------------------------------------------- generate


def test_generate_waits_for_a_loading_model(server: Server, gateway: Gateway, repository: Path, tmp_path: Path) -> None:
    """It needs the configuration, which is known once the model has loaded."""
    os.mkfifo(ready := tmp_path / "ready")
    tensor = "data_type: TYPE_FP32 dims: 1"
    config = f'backend: "python" input {{ name: "x" {tensor} }} output {{ name: "y" {tensor} }}'
    write_model(repository, "late", config, python_model("return self.respond(x)", f"open({str(ready)!r}).read()"))
    with server.client() as client, ThreadPoolExecutor(2) as pool:
        loaded = pool.submit(client.load, "late")
        while not any(one["name"] == "late" and one["state"] == "LOADING" for one in client.models()):
            assert not loaded.done()
        answer = pool.submit(gateway.ask, "POST", "/v2/models/late/generate", {"x": 2.5})
        assert gateway.ask("GET", "/v2/models/late/config")[0] == 404
        open_gate(ready)
        status, body = answer.result(60)
        assert (status, json.loads(body)["y"]) == (200, 2.5)
        loaded.result(60)
        client.unload("late")


def test_generate(gateway: Gateway) -> None:
    status, answer = gateway.ask("POST", "/v2/models/talker/generate", {"count": 1, "id": "me"})
    assert status == 200, answer
    assert json.loads(answer) == {"model_name": "talker", "model_version": "1", "id": "me", "number": 0}
    status, answer = gateway.ask("POST", "/v2/models/row/generate", {"i_FP32": [1, 2]})
    assert json.loads(answer)["o_FP32"] == [1, 2]
    for body, text in (
        ({"count": 0}, "exactly 1 response"),
        ({"count": 3}, "exactly 1 response"),
        ({"count": 1000}, "exactly 1 response"),
        ({}, "missing required input(s) ['count']. Please provide all required input(s). Expected {\"count\": INT32}"),
        ({"n": 1}, "'n' is not an input of the model. Expected"),
    ):
        status, answer = gateway.ask("POST", "/v2/models/talker/generate", body)
        assert (status, text in json.loads(answer)["error"]) == (400, True)


def test_a_model_name_with_a_comma_and_spaces(gateway: Gateway) -> None:
    infer = {"inputs": [{"name": "i_FP32", "shape": [1, 1], "datatype": "FP32", "data": [2.5]}]}
    for action, body in (("infer", infer), ("generate", {"i_FP32": 2.5})):
        status, answer = gateway.ask("POST", f"/v2/models/{quote(ODD)}/{action}", body)
        assert (status, json.loads(answer)["model_name"]) == (200, ODD)


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


def test_closing_the_connection_cancels_a_stream(gateway: Gateway, server: Server) -> None:
    body = json.dumps({"count": 1_000_000}).encode()
    head = f"POST /v2/models/talker/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with gateway.socket() as made:
        made.sendall(head + body)
        assert made.recv(1000).startswith(b"HTTP/1.1 200 OK")
    wait_in_flight(server, 0, 0)


# ---------------------------------------------------------------------------------------- errors


def errors() -> dict[str, tuple[str, bytes, dict[str, str], int, str]]:
    small, headers = binary(rows(4))
    text = b'{"inputs":[{"name":"%b","shape":[1,2],"datatype":"%b","data":[1,2]}]}'
    return {
        "unknown model": ("nothing", small, headers, 404, "Request for unknown model: 'nothing' is not found"),
        "unknown model, no inputs": ("nothing", b"{}", {}, 404, "Request for unknown model: 'nothing' is not found"),
        "unknown model, large body": ("nothing", b" " * 100_000, {}, 404, "Request for unknown model: 'nothing'"),
        "no inputs": ("row", b"{}", {}, 400, "missing required field `inputs`"),
        "bytes missing": ("row", small[:-1], headers, 400, "16 bytes should follow the JSON, but 15 do"),
        "bytes too many": ("row", small + b"x", headers, 400, "unexpected additional input data for model 'row'"),
        "longer than all": ("row", small, {"Inference-Header-Content-Length": "9999"}, 400, "the body has"),
        "no JSON": ("row", b"{", {}, 400, "failed to parse the request JSON buffer"),
        "large JSON": ("row", b" " * 200_001, {}, 400, "--http-max-json-size"),
        "large body": ("row", bytes(8_000_001), {"Inference-Header-Content-Length": "0"}, 400, "--http-max-input-size"),
        "bomb": ("row", gzip.compress(bytes(9_000_000)), {"Content-Encoding": "gzip"}, 400, "--http-max-json-size"),
        "binary bomb": ("row", gzip.compress(bytes(9_000_000)), {"Content-Encoding": "gzip",
                        "Inference-Header-Content-Length": "5"}, 400, "--http-max-input-size"),
        "compressed otherwise": ("row", small, {"Content-Encoding": "br"}, 501, "Unsupported compression type"),
        "large parameter": ("row", b'{"parameters":{"a":"%b"},' % (b"x" * 65_537)
                            + (text % (b"i_FP32", b"FP32"))[1:], {}, 400, "has 65537 bytes, over the limit of 65536"),
        "with an id": ("row", b'{"id":"me",' + (text % (b"x", b"FP32"))[1:], {}, 400, "[request id: me] unexpected"),
    }  # fmt: skip


@pytest.mark.parametrize("case", errors())
def test_errors(gateway: Gateway, case: str) -> None:
    name, body, headers, status, text = errors()[case]
    found, answer = gateway.ask("POST", f"/v2/models/{name}/infer", body, **headers)
    error = json.loads(answer)["error"]
    assert (found, text in error) == (status, True), error
    assert not re.search(r"/(tmp|run|dev)/|0x[0-9a-f]{6}", error)


@pytest.mark.parametrize(
    "path", ["/v2/models/row/infer", "/v2/models/row/generate", "/v1/completions", "/v1/chat/completions"]
)
def test_oversized_json_is_refused_before_the_body_is_read(gateway: Gateway, path: str) -> None:
    with gateway.socket() as made:
        made.sendall(b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: 200001\r\n\r\n" % path.encode())
        answer = made.recv(10_000)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"--http-max-json-size" in answer
    assert (b"binary" in answer) is path.startswith("/v2/")


def gated_request(width: int) -> bytes:
    body, headers = binary(rows(width))
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return (
        f"POST /v2/models/gated/infer HTTP/1.1\r\nHost: x\r\n{lines}Content-Length: {len(body)}\r\n\r\n".encode() + body
    )


@pytest.mark.parametrize("width", [4, 30_000])
def test_closing_the_connection_cancels_its_request(gateway: Gateway, server: Server, gate: Path, width: int) -> None:
    """One request runs, five wait and are cancelled."""
    names = [f"nv_inference_request_{outcome}_total" for outcome in ("success", "failure")]
    before = [metric(server, name, model="gated") for name in names]
    callers = [gateway.socket() for _ in range(6)]
    for made in callers:
        made.sendall(gated_request(width))
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


# ---------------------------------------------------------------------------------------- the process


def test_requests_in_flight_are_answered_at_shutdown(server: Server, gate: Path) -> None:
    gateway = Gateway(server)
    idle, busy = gateway.socket(), gateway.socket()
    busy.sendall(gated_request(4))
    wait_in_flight(server, 1, 1)
    gateway.process.send_signal(signal.SIGTERM)
    assert idle.recv(1) == b""
    open_gate(gate)
    assert busy.recv(65536).startswith(b"HTTP/1.1 200 ")
    assert busy.recv(1) == b""
    idle.close()
    busy.close()
    gateway.process.communicate(timeout=60)
    assert gateway.process.returncode == 0


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


def test_a_port_in_use(server: Server, gateway: Gateway) -> None:
    command = [sys.executable, "-m", "shmserve.clients.cli.main", "gateway", "--runtime-dir", str(server.runtime_dir)]
    found = subprocess.run([*command, "--http-port", str(gateway.http)], capture_output=True, timeout=60)
    assert found.returncode == 1
    assert found.stderr.startswith(b"shmserve gateway: cannot listen on 127.0.0.1, port")


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
    assert int(process.communicate(timeout=60)[0]) > 10_000
