"""The HTTP door of a real gateway before a real server, spoken to with the library's own client and bare sockets."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import posix_ipc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from shmserve.dtypes import ITEM_BYTES, TO_CONFIG
from shmserve.testing import Server
from tests.conformance.client_ways import NUMBERS, data

pytestmark = pytest.mark.process

LIMITS = ("--http-max-input-size=8000000", "--http-max-json-size=200000")


class Gateway:
    """Beside a server; `http`, `grpc` and `metrics` are its ports."""

    def __init__(self, server: Server, *options: str) -> None:
        reader, writer = os.pipe()
        command = [
            sys.executable,
            "-m",
            "shmserve.clients.cli.main",
            "gateway",
            "--runtime-dir",
            str(server.runtime_dir),
        ]
        command += ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0", "--ready-fd", str(writer), *options]
        self.process = subprocess.Popen(command, pass_fds=[writer], stderr=subprocess.PIPE)
        os.close(writer)
        with open(reader) as ready:
            words = ready.readline().split()
        assert words[:1] == ["READY"], self.process.communicate()
        ports = dict(word.split("=") for word in words[1:])
        self.http, self.grpc, self.metrics = (int(ports.get(door, 0)) for door in ("http", "grpc", "metrics"))

    def connection(self, port: int = 0) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", port or self.http, timeout=30)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, bytes]:
        with contextlib.closing(self.connection()) as made:
            text = json.dumps(body) if isinstance(body, dict) else body
            made.request(method, path, text, {name.replace("_", "-"): value for name, value in headers.items()})
            answer = made.getresponse()
            return answer.status, answer.read()

    def socket(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.http), 30)

    def stop(self) -> bytes:
        self.process.send_signal(signal.SIGTERM)
        _, log = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, log
        return log


def model(repository: Path, name: str, dtypes: list[str], dims: str, batch: int, more: str = "") -> None:
    tensors = "".join(
        f'{kind} [ {{ name: "{letter}_{dtype}" data_type: {TO_CONFIG[dtype]} dims: {dims} }} ]\n'
        for dtype in dtypes
        for kind, letter in (("input", "i"), ("output", "o"))
    )
    (repository / name / "1").mkdir(parents=True)
    text = f'name: "{name}" backend: "identity" max_batch_size: {batch}\n{tensors}{more}'
    (repository / name / "config.pbtxt").write_text(text)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("models")
    model(repository, "types", list(ITEM_BYTES), "[ -1, -1 ]", 0)
    model(repository, "row", ["FP32"], "[ -1 ]", 8, "dynamic_batching { }\n")
    model(repository, "spare", ["FP32"], "[ -1 ]", 8)
    model(repository, "word", ["BYTES"], "[ 1 ]", 8)
    delay = 'parameters { key: "delay_us" value: { string_value: "400000" } }\n'
    model(repository, "slow", ["FP32"], "[ -1 ]", 1, delay)
    with Server(repository, "--model-control-mode", "explicit", "--load-model", "*") as running:
        yield running


@pytest.fixture(scope="module")
def gateway(server: Server) -> Iterator[Gateway]:
    made = Gateway(server, *LIMITS, "--allow-client-shm")
    yield made
    log = made.stop().decode()
    assert "Traceback" not in log
    assert "ERROR" not in log


def binary(inputs: dict[str, tuple[str, np.ndarray[Any, Any], bytes]], **more: Any) -> tuple[bytes, dict[str, str]]:
    """A body of the binary data extension: JSON, and the tensors behind it."""
    given = {
        "inputs": [
            {"name": name, "datatype": dtype, "shape": array.shape, "parameters": {"binary_data_size": len(raw)}}
            for name, (dtype, array, raw) in inputs.items()
        ],
        "parameters": {"binary_data_output": True},
    }
    text = json.dumps(given | more).encode()
    body = text + b"".join(raw for _, _, raw in inputs.values())
    return body, {"Inference-Header-Content-Length": str(len(text))}


def outputs(answer: http.client.HTTPResponse) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The JSON of an answer, and the bytes of its outputs."""
    body = answer.read()
    assert answer.status == 200, body
    length = int(answer.headers["Inference-Header-Content-Length"])
    said, at, found = json.loads(body[:length]), length, {}
    for output in said["outputs"]:
        size = output["parameters"]["binary_data_size"]
        found[output["name"]] = body[at : at + size]
        at += size
    assert at == len(body)
    return said, found


def rows(width: int, value: float = 0.0) -> dict[str, tuple[str, np.ndarray[Any, Any], bytes]]:
    array = np.arange(width, dtype=np.float32).reshape(1, width) + np.float32(value)
    return {"i_FP32": ("FP32", array, array.tobytes())}


# ---------------------------------------------------------------------------------------- what is asked of a server


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


def test_what_this_door_does_not_do(gateway: Gateway) -> None:
    """The roles of callers are infer and observe; what they may not is refused before its body is read."""
    for path in ("/v2/repository/models/row/load", "/v2/repository/models/row/unload", "/v2/logging"):
        status, body = gateway.ask("POST", path, b"{}")
        assert status == 403
        assert "needs the role operate" in json.loads(body)["error"]
    handle = {"raw_handle": {"b64": "AA=="}, "device_id": 0, "byte_size": 1}
    assert gateway.ask("POST", "/v2/cudasharedmemory/region/r/register", handle)[0] == 400
    assert gateway.ask("GET", "/nowhere") == (404, b'{"error":"Not Found"}')
    assert gateway.ask("PUT", "/v2/health/live")[0] == 405
    assert gateway.ask("GET", "/v2/models/nothing/config")[0] == 404


def test_load_and_unload_for_those_who_may(server: Server) -> None:
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
        client.unload("sent")  # which returns when its process has ended


def test_metrics(gateway: Gateway) -> None:
    with contextlib.closing(gateway.connection(gateway.metrics)) as made:
        made.request("GET", "/metrics")
        answer = made.getresponse()
        assert answer.headers["Content-Type"].startswith("text/plain")
        names = {family.name for family in text_string_to_metric_families(answer.read().decode())}
        assert {"nv_inference_request_success", "shmserve_gateway_http_connections"} <= names
        made.request("GET", "/v2/health/live")
        assert made.getresponse().status == 404


# ---------------------------------------------------------------------------------------- inference


@pytest.mark.parametrize("shape", [(2, 3), (40, 300), (0, 4)], ids=str)
def test_all_types_as_binary_data(gateway: Gateway, shape: tuple[int, int]) -> None:
    """Bytes that went in come out; small ones travel in the message, large ones in shared memory."""
    given: dict[str, tuple[str, np.ndarray[Any, Any], bytes]] = {}
    for name in NUMBERS:
        array = data(name, shape)
        given[f"i_{name}"] = (name, array, array.tobytes())
    words = b"".join(len(word).to_bytes(4, "little") + word for word in [b"\xffword"] * (shape[0] * shape[1]))
    given["i_BYTES"] = ("BYTES", np.empty(shape), words)
    with contextlib.closing(gateway.connection()) as made:
        made.request("POST", "/v2/models/types/infer", *binary(given, id="me"))
        said, found = outputs(made.getresponse())
    assert (said["model_name"], said["model_version"], said["id"]) == ("types", "1", "me")
    assert found == {f"o{name[1:]}": raw for name, (_, _, raw) in given.items()}
    assert all(tuple(output["shape"]) == shape for output in said["outputs"])


def test_json_both_ways(gateway: Gateway) -> None:
    x = [[1.5, float("nan"), -2.0]]
    asked = {"inputs": [{"name": "i_FP32", "shape": [1, 3], "datatype": "FP32", "data": x}]}
    status, body = gateway.ask("POST", "/v2/models/row/versions/1/infer", asked)
    assert status == 200
    (output,) = json.loads(body)["outputs"]
    assert output["name"] == "o_FP32"
    np.testing.assert_array_equal(output["data"], x[0])


def test_one_connection_many_requests(gateway: Gateway) -> None:
    """Large and small in turn, each answer its own, and the memory of the last one is used again."""
    with contextlib.closing(gateway.connection()) as made:
        for number in range(30):
            given = rows(16 if number % 3 else 300_000, number)
            made.request("POST", "/v2/models/row/infer", *binary(given))
            assert outputs(made.getresponse())[1]["o_FP32"] == given["i_FP32"][2]


def test_classes(gateway: Gateway) -> None:
    x = np.array([[1, 5, 3]], np.float32)
    body, headers = binary(
        {"i_FP32": ("FP32", x, x.tobytes())}, outputs=[{"name": "o_FP32", "parameters": {"classification": 2}}],
        parameters={},
    )  # fmt: skip
    status, answer = gateway.ask("POST", "/v2/models/row/infer", body, **headers)
    assert status == 200
    assert json.loads(answer)["outputs"][0]["data"] == ["5.000000:1", "3.000000:2"]


def test_a_body_that_is_the_tensor(gateway: Gateway) -> None:
    for path, body, expected in (
        ("row", rows(7)["i_FP32"][2], rows(7)["i_FP32"][2]),
        ("row", rows(70_000)["i_FP32"][2], rows(70_000)["i_FP32"][2]),
        ("word", b"hello", b"\5\0\0\0hello"),
    ):
        with contextlib.closing(gateway.connection()) as made:
            made.request("POST", f"/v2/models/{path}/infer", body, {"Inference-Header-Content-Length": "0"})
            assert list(outputs(made.getresponse())[1].values()) == [expected]


@pytest.mark.parametrize("way", ["gzip", "deflate"])
def test_compressed(gateway: Gateway, way: str) -> None:
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


def test_chunks(gateway: Gateway) -> None:
    body, headers = binary(rows(50_000))
    with contextlib.closing(gateway.connection()) as made:
        pieces = iter([body[:10], body[10:1000], body[1000:]])
        made.request("POST", "/v2/models/row/infer", pieces, headers, encode_chunked=True)
        assert outputs(made.getresponse())[1]["o_FP32"] == rows(50_000)["i_FP32"][2]


@pytest.mark.parametrize("width", [4, 70_000])
def test_tensors_in_memory_that_is_registered(gateway: Gateway, width: int) -> None:
    x, size = rows(width)["i_FP32"][2], 4 * width
    key = f"/h-{os.getpid()}-{secrets.token_hex(8)}"
    memory = posix_ipc.SharedMemory(key, posix_ipc.O_CREX, size=3 * size)
    try:
        os.pwrite(memory.fd, x, size)
        region = {"key": key, "byte_size": 2 * size, "offset": size}
        assert gateway.ask("POST", "/v2/systemsharedmemory/region/r/register", region) == (200, b"")
        status = json.loads(gateway.ask("GET", "/v2/systemsharedmemory/region/r/status")[1])
        assert status == [region | {"name": "r"}]
        place = {"shared_memory_region": "r", "shared_memory_byte_size": size}
        for offset, code, said in ((size, 200, None), (size + 4, 400, "Invalid offset + byte size")):
            there = place | {"shared_memory_offset": offset}
            asked = {
                "inputs": [{"name": "i_FP32", "shape": [1, width], "datatype": "FP32", "parameters": place}],
                "outputs": [{"name": "o_FP32", "parameters": there}],
            }
            found, answer = gateway.ask("POST", "/v2/models/row/infer", asked)
            assert found == code, answer
            if said is None:
                assert json.loads(answer)["outputs"] == [{"name": "o_FP32", "datatype": "FP32", "shape": [1, width]}]
                assert os.pread(memory.fd, size, 2 * size) == x
            else:
                assert said in json.loads(answer)["error"]
        assert gateway.ask("POST", "/v2/systemsharedmemory/region/r/unregister") == (200, b"")
        assert gateway.ask("GET", "/v2/systemsharedmemory/status") == (200, b"[]")
    finally:
        memory.close_fd()
        posix_ipc.unlink_shared_memory(key)


# ---------------------------------------------------------------------------------------- mistakes


def wrong() -> dict[str, tuple[str, bytes, dict[str, str], int, str]]:
    small, headers = binary(rows(4))
    text = b'{"inputs":[{"name":"%b","shape":[1,2],"datatype":"%b","data":[1,2]}]}'
    return {
        "unknown model": ("nothing", small, headers, 404, "Request for unknown model: 'nothing' is not found"),
        "unknown input": ("row", text % (b"x", b"FP32"), {}, 400, "unexpected inference input 'x'"),
        "other type": ("row", text % (b"i_FP32", b"INT8"), {}, 400, "data-type is 'INT8'"),
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
        "half": ("row", b"%b" % rows(5)["i_FP32"][2][:-1], {"Inference-Header-Content-Length": "0"}, 400, "19 bytes"),
        "region": ("row", json.dumps({"inputs": [{"name": "i_FP32", "shape": [1, 1], "datatype": "FP32",
                   "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 4}}]}).encode(), {}, 404,
                   "Unable to find shared memory region: 'r'"),
        "large parameter": ("row", b'{"parameters":{"a":"%b"},' % (b"x" * 65_537)
                            + (text % (b"i_FP32", b"FP32"))[1:], {}, 400, "has 65537 bytes, over the limit of 65536"),
        "with an id": ("row", b'{"id":"me",' + (text % (b"x", b"FP32"))[1:], {}, 400, "[request id: me] "),
    }  # fmt: skip


@pytest.mark.parametrize("case", wrong())
def test_mistakes(gateway: Gateway, case: str) -> None:
    name, body, headers, status, said = wrong()[case]
    found, answer = gateway.ask("POST", f"/v2/models/{name}/infer", body, **headers)
    error = json.loads(answer)["error"]
    assert (found, said in error) == (status, True), error
    assert not re.search(r"/(tmp|run|dev)/|0x[0-9a-f]{6}", error)


def test_garbage(gateway: Gateway) -> None:
    for noise in (b"\0\1\2\r\n\r\n", b"GET\r\n\r\n", b"\x16\x03\x01" + bytes(300), b"A" * 40_000):
        with gateway.socket() as made:
            made.sendall(noise)
            made.shutdown(socket.SHUT_WR)
            answer = b""
            while piece := made.recv(65536):
                answer += piece
            assert not answer or re.match(rb"HTTP/1.1 (400|431|505) ", answer)
    assert gateway.ask("GET", "/v2/health/live")[0] == 200


def test_those_who_stop_halfway_are_not_waited_for(server: Server) -> None:
    """A gateway of its own: on a busy machine, a timeout this short hits honest callers as well."""
    gateway = Gateway(server, "--http-read-timeout=0.4")
    body, headers = binary(rows(10_000))
    lines = f"Inference-Header-Content-Length: {headers['Inference-Header-Content-Length']}\r\n"
    head = f"POST /v2/models/row/infer HTTP/1.1\r\nHost: x\r\n{lines}Content-Length: {len(body)}\r\n\r\n".encode()
    for sent in (b"POST /v2/mod", head, head + body[:50], head + body[:-1]):
        with gateway.socket() as made:
            made.sendall(sent)
            answer = made.recv(65536)
            assert answer.startswith(b"HTTP/1.1 408 "), sent[:20]
    assert gateway.ask("GET", "/v2/health/live")[0] == 200
    gateway.stop()


def metric(server: Server, name: str, **labels: str) -> float:
    with server.client() as client:
        families = text_string_to_metric_families(client.metrics())
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


def wait_in_flight(server: Server, least: int, most: int) -> None:
    """Returns when so many requests are with the server."""
    while not least <= metric(server, "shmserve_requests_in_flight") <= most:
        continue


def slow_request(width: int) -> bytes:
    body, headers = binary(rows(width))
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return (
        f"POST /v2/models/slow/infer HTTP/1.1\r\nHost: x\r\n{lines}Content-Length: {len(body)}\r\n\r\n".encode() + body
    )


@pytest.mark.parametrize("width", [4, 30_000])
def test_a_caller_who_goes_away_takes_his_request_back(gateway: Gateway, server: Server, width: int) -> None:
    """One runs and the others wait; when their callers go, not all of them are run, and nothing is left of them."""
    before = [metric(server, f"nv_inference_request_{what}_total", model="slow") for what in ("success", "failure")]
    callers = [gateway.socket() for _ in range(6)]
    for made in callers:
        made.sendall(slow_request(width))
    wait_in_flight(server, 3, 6)
    for made in callers[1:]:
        made.close()
    assert callers[0].recv(65536).startswith(b"HTTP/1.1 200 ")
    callers[0].close()
    wait_in_flight(server, 0, 0)
    after = [metric(server, f"nv_inference_request_{what}_total", model="slow") for what in ("success", "failure")]
    assert sum(after) == sum(before) + 6
    assert after[1] > before[1]


# ---------------------------------------------------------------------------------------- the process


def test_requests_in_flight_are_answered_at_the_end(server: Server) -> None:
    gateway = Gateway(server)
    idle, busy = gateway.socket(), gateway.socket()
    busy.sendall(slow_request(4))
    wait_in_flight(server, 1, 1)
    gateway.process.send_signal(signal.SIGTERM)
    assert idle.recv(1) == b""
    assert busy.recv(65536).startswith(b"HTTP/1.1 200 ")
    assert busy.recv(1) == b""
    idle.close()
    busy.close()
    gateway.process.communicate(timeout=60)
    assert gateway.process.returncode == 0


def test_a_server_that_goes_and_comes_back(tmp_path: Path) -> None:
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


def test_a_port_that_is_taken(server: Server, gateway: Gateway) -> None:
    command = [sys.executable, "-m", "shmserve.clients.cli.main", "gateway", "--runtime-dir", str(server.runtime_dir)]
    found = subprocess.run([*command, "--http-port", str(gateway.http)], capture_output=True, timeout=60)
    assert found.returncode == 1
    assert found.stderr.startswith(b"shmserve gateway: cannot listen on 127.0.0.1, port")


def test_its_modules_are_no_part_of_collections(tmp_path: Path) -> None:
    """A full collection that goes through them keeps all callers waiting."""
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
