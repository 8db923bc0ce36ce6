"""generate and generate_stream of a real gateway, with a Python model that says as much as it is asked for."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from urllib.parse import quote

import pytest

from shmserve.testing import Server
from tests.process.gateway.test_http import Gateway, wait_in_flight

pytestmark = pytest.mark.process

TALKER = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            text = pb_utils.get_input_tensor_by_name(request, "text").as_numpy()
            count = int(pb_utils.get_input_tensor_by_name(request, "count").as_numpy().ravel()[0])
            for number in range(0 if count == -1000 else abs(count)):
                if request.is_cancelled():
                    break
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("said", text + str(number).encode())]))
            if count < 0:
                sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("no more today")))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
FAILS_AT_ONCE = -1000
CONFIG = """
name: "talker" backend: "python" max_batch_size: 0
input [ { name: "text" data_type: TYPE_STRING dims: [ 1 ] }, { name: "count" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "said" data_type: TYPE_STRING dims: [ 1 ] } ]
model_transaction_policy { decoupled: true }
"""
ROW = """
name: "row" backend: "identity" max_batch_size: 8
input [ { name: "i" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "o" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""


ODD = "row, too (v2)"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("models")
    for name, text in (("talker", CONFIG), ("row", ROW), (ODD, ROW.replace('name: "row"', ""))):
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(text)
    (repository / "talker" / "1" / "model.py").write_text(TALKER)
    with Server(repository, "--exit-on-error", "true") as running:
        yield running


@pytest.fixture(scope="module")
def gateway(server: Server) -> Iterator[Gateway]:
    made = Gateway(server)
    yield made
    assert b"Traceback" not in made.stop()


def test_generate(gateway: Gateway) -> None:
    status, answer = gateway.ask("POST", "/v2/models/talker/generate", {"text": "a", "count": 1, "id": "me"})
    assert status == 200, answer
    assert json.loads(answer) == {"model_name": "talker", "model_version": "1", "id": "me", "said": "a0"}
    for count in (0, 3, 1000):
        status, answer = gateway.ask("POST", "/v2/models/talker/generate", {"text": "a", "count": count})
        assert status == 400
        assert "exactly 1 response" in json.loads(answer)["error"]
    status, answer = gateway.ask("POST", "/v2/models/row/generate", {"i": [1, 2]})
    assert json.loads(answer)["o"] == [1, 2]
    status, answer = gateway.ask("POST", "/v2/models/talker/generate", {"text": "a"})
    assert status == 400
    assert "missing required input" in json.loads(answer)["error"]


def test_a_model_whose_name_has_more_than_letters(gateway: Gateway) -> None:
    with contextlib.closing(gateway.connection()) as made:
        for action in ("infer", "generate"):
            infer = {"inputs": [{"name": "i", "shape": [1, 1], "datatype": "FP32", "data": [2.5]}]}
            body = json.dumps(infer if action == "infer" else {"i": 2.5})
            made.request("POST", f"/v2/models/{quote(ODD)}/{action}", body)
            answer = made.getresponse()
            assert json.loads(answer.read())["model_name"] == ODD
            assert answer.status == 200


def test_generate_stream(gateway: Gateway) -> None:
    """Several over one connection: where each ends is known by its chunks."""
    path = "/v2/models/talker/generate_stream"
    with contextlib.closing(gateway.connection()) as made:
        for count in (1, 0, 300):
            made.request("POST", path, json.dumps({"text": "a", "count": count}))
            answer = made.getresponse()
            assert answer.headers["Content-Type"].startswith("text/event-stream")
            *events, end = answer.read().decode().split("\n\n")
            assert end == ""
            said = [json.loads(one.removeprefix("data: "))["said"] for one in events]
            assert said == [f"a{number}" for number in range(count)]
        made.request("POST", path, json.dumps({"text": "a", "count": -2}))
        answer = made.getresponse()
        assert answer.status == 200
        *_, last, _ = answer.read().decode().split("\n\n")
        assert "no more today" in json.loads(last.removeprefix("data: "))["error"]
        made.request("POST", path, json.dumps({"text": "a", "count": -1}))
        answer = made.getresponse()
        assert answer.read().decode().count("data: ") == 2
        made.request("POST", path, json.dumps({"text": "a", "count": FAILS_AT_ONCE}))
        answer = made.getresponse()
        assert (answer.status, answer.headers["Content-Type"]) == (500, "text/event-stream; charset=utf-8")
        (failed,) = answer.read().decode().strip().split("\n\n")
        assert "no more today" in json.loads(failed.removeprefix("data: "))["error"]
        made.request("POST", path, json.dumps({"text": "a"}))
        answer = made.getresponse()
        assert answer.status == 400, "before the first of them an error is an answer like others"
        answer.read()


def test_a_caller_who_leaves_a_stream(gateway: Gateway, server: Server) -> None:
    body = json.dumps({"text": "a" * 1000, "count": 1_000_000}).encode()
    head = f"POST /v2/models/talker/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with gateway.socket() as made:
        made.sendall(head + body)
        assert made.recv(1000).startswith(b"HTTP/1.1 200 OK")
    wait_in_flight(server, 0, 0)
