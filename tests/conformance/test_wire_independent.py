"""An independent client (`wire_client`) against the real server."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.lib import models
from bench.lib.setting import serving
from tests.conformance import wire_client as wire
from tests.conformance.wire_client import Message, Segment, WireClient
from tests.support.model_files import python_model

pytestmark = pytest.mark.process
SLOW = python_model("select.select([], [], [], 0.3)\nreturn self.respond(x)")
COUNTS = """\
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def stream(self, request):
        for number in range(int(request.inputs()[0].as_numpy()[0])):
            yield pb_utils.InferenceResponse([pb_utils.Tensor("y", np.full(2, number, np.float32))])
"""


def write_repository(root: Path) -> None:
    models.write(root, "identity", models.identity(), {})
    models.write(root, "strings", models.identity("STRING"), {})
    models.write(root, "batching", models.identity(dims=[2], max_batch=8), {})
    slow = models.Model("python", {"x": ("FP32", [-1])}, {"y": ("FP32", [-1])})
    models.write(root, "slow", slow, {"model.py": SLOW})
    models.write(root, "counts", slow, {"model.py": COUNTS})
    with (root / "counts" / "config.pbtxt").open("a") as config:
        config.write("model_transaction_policy { decoupled: true }\n")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The runtime directory of a server shared by these tests."""
    root = tmp_path_factory.mktemp("repository")
    write_repository(root)
    with serving(root) as served:
        yield served.runtime_dir


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Path]:
    """The runtime directory of a server for one test. Its workers create named segments, which must be removed with
    it."""
    models.write(tmp_path, "identity", models.identity(), {})
    with serving(tmp_path) as served:
        yield served.runtime_dir


def floats(count: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


@pytest.mark.parametrize("outputs", ["frames", "posix"])
def test_inline_tensors_come_back_inline(server: Path, outputs: str) -> None:
    x = floats(1024)
    with WireClient(server, outputs) as client:
        tag, request, version, tensors, *_ = client.infer(1, "identity", [["x", "FP32", [1024], x.tobytes()]])
        assert (tag, request, version) == (wire.REPLY, 1, 1)
        assert tensors == [["y", "FP32", [1024], x.tobytes()]]


def results(client: WireClient, count: int) -> dict[int, Message]:
    """The answers to this many requests; those in a ReplyBatch or FailBatch are converted to Replies and Fails."""
    found: dict[int, Message] = {}
    while len(found) < count:
        message = client.read()
        if message[0] == wire.RELEASED:
            continue
        if message[0] == wire.FAIL_BATCH:
            assert found.keys().isdisjoint(message[1])
            found |= {request: [wire.FAIL, request, *message[2:]] for request in message[1]}
            continue
        if message[0] != wire.REPLY_BATCH:
            assert message[1] not in found
            found[message[1]] = message
            continue
        client.batched += 1
        _, version, (forms, requests, rows, data) = message
        assert len(requests) == len(rows) == len(data)
        for request, axis, blobs in zip(requests, rows, data, strict=True):
            assert request not in found
            tensors = [
                [name, dtype, [axis, *dims], blob] for (name, dtype, dims), blob in zip(forms, blobs, strict=True)
            ]
            found[request] = [wire.REPLY, request, version, tensors, None]
    return found


def test_requests_in_a_batch_have_the_answers_of_requests_one_by_one(server: Path) -> None:
    """Sends several batches, so that requests run together. Some requests are invalid."""
    with WireClient(server, "frames") as client:
        most = client.limits["batch_requests"]
        assert most > 1
        batches: list[Message] = []
        singly: list[Message] = []
        for first in range(1, 6 * most, most):
            numbers = list(range(first, first + most))
            rows = [9 if number % 50 == 0 else 1 + number % 3 for number in numbers]
            data = [floats(2 * axis, number).tobytes() for number, axis in zip(numbers, rows, strict=True)]
            data[7] = data[7][4:]
            columns = [[["x", "FP32", [2]]], numbers, rows, [[blob] for blob in data]]
            batches.append([wire.INFER_BATCH, "batching", 0, columns])
            for number, axis, blob in zip(numbers, rows, data, strict=True):
                singly.append([wire.INFER, number, "batching", 0, [["x", "FP32", [axis, 2], blob]]])
        client.send(*batches)
        together = results(client, 6 * most)
        client.send(*singly)
        assert client.batched, "those that run together are answered in columns"
        batched = client.batched
        assert together == results(client, 6 * most)
        assert client.batched == batched, "what came by Infer is answered by Reply"
        assert {answer[0] for answer in together.values()} == {wire.REPLY, wire.FAIL}


@pytest.mark.parametrize("batched", [False, True], ids=["one by one", "batch"])
def test_requests_are_cancelled_by_number_and_have_timeouts(server: Path, batched: bool) -> None:
    """Each request is answered once; inputs that a worker still reads are released later."""

    def infer(numbers: list[int], *more: Any) -> list[Message]:
        if batched:
            columns = [[["x", "FP32", []]], numbers, [1] * len(numbers), [[b"1234"] for _ in numbers]]
            return [[wire.INFER_BATCH, "slow", 0, columns, *more]]
        return [[wire.INFER, number, "slow", 0, [["x", "FP32", [1], b"1234"]], None, *more] for number in numbers]

    with WireClient(server, "frames") as client:
        client.send(*infer([1, 2, 3]), [wire.CANCEL, 2], [wire.CANCEL, 99])
        client.send(*infer([4], 50_000))
        answers = results(client, 4)
        assert [answers[number][0] for number in (1, 3)] == [wire.REPLY] * 2
        assert [answers[number][2] for number in (2, 4)] == ["CANCELLED", "DEADLINE_EXCEEDED"]


def test_strings_have_a_length_prefix(server: Path) -> None:
    words = [b"", b"a", "größer".encode(), bytes(range(256))]
    body = b"".join(len(word).to_bytes(4, "little") + word for word in words)
    with WireClient(server, "frames") as client:
        answer = client.infer(1, "strings", [["x", "BYTES", [len(words)], body]])
        assert answer[3] == [["y", "BYTES", [len(words)], body]]


def test_tensors_in_frames(server: Path) -> None:
    x = floats(200_000)
    with WireClient(server, "frames") as client:
        answer = client.infer(1, "identity", [["x", "FP32", [200_000], 0]], frames=(x.tobytes(),))
        name, dtype, shape, data = answer[3][0]
        assert (answer[0], name, dtype, shape) == (wire.REPLY, "y", "FP32", [200_000])
        assert type(data) is int
        assert client.frames[data] == x.tobytes()


def test_a_response_too_large_for_frames_is_refused(server: Path) -> None:
    """The input is in a segment, but the client wants outputs in frames."""
    x = floats(400_000)
    with WireClient(server, "frames") as client, Segment(client, x.tobytes()) as segment:
        answer = client.infer(1, "identity", [["x", "FP32", [400_000], [segment.handle]]])
        assert answer[:3] == [wire.FAIL, 1, "INVALID_ARG"]
        assert str(1024 * 1024) in answer[3]
        assert client.infer(2, "identity", [["x", "FP32", [1], b"1234"]])[0] == wire.REPLY


def test_tensors_in_named_segments(own_server: Path) -> None:
    """The input is in the client's segment, the output in a segment of the server, which can be returned once."""
    x = floats(1_000_000)
    with WireClient(own_server, "posix") as client, Segment(client, x.tobytes()) as segment:
        for request in range(1, 4):
            answer = client.infer(request, "identity", [["x", "FP32", [1_000_000], [segment.handle]]])
            assert answer[0] == wire.REPLY, answer
            output = answer[3][0]
            assert output[:3] == ["y", "FP32", [1_000_000]]
            assert output[3][0][0] >> 32 != client.owner
            assert client.bytes_of(output) == x.tobytes()
            client.send([wire.RETURN, output[3]])
        client.send([wire.RETURN, output[3]])
        refused = client.read()
        assert refused[:3] == [wire.FAIL, 0, "INVALID_ARG"]


def test_an_output_in_a_segment_of_the_client(own_server: Path) -> None:
    x = floats(5000)
    with WireClient(own_server, "posix") as client, Segment(client, x.tobytes() + bytes(20_000)) as segment:
        number = segment.number
        inputs = [["x", "FP32", [5000], [[number, 0, 20_000]]]]
        answer = client.infer(1, "identity", inputs, [["y", [number, 20_000, 20_000]]])
        assert answer[0] == wire.REPLY, answer
        assert answer[3] == [["y", "FP32", [5000], [[number, 20_000, 20_000]]]]
        written = Path(f"/dev/shm/{segment.name}").read_bytes()[20_000:]
        assert written == x.tobytes()


def test_a_stream_sends_as_many_parts_as_its_window_allows(server: Path) -> None:
    def count(number: int) -> Message:
        return ["x", "FP32", [1], np.float32(number).tobytes()]

    with WireClient(server, "frames") as client:
        client.send([wire.INFER, 1, "counts", 0, [count(5)], None, 0, {"window": 2}])
        for number in range(5):
            tag, request, version, outputs, *rest = client.read()
            assert (tag, request, version) == (wire.PART, 1, 1)
            assert outputs == [["y", "FP32", [2], np.full(2, number, np.float32).tobytes()]]
            assert True not in rest
            if number == 1:
                client.send([wire.PING, 7])
                assert client.read() == [wire.PONG, 7]  # the window is full
                client.send([wire.MORE, 1, 100], [wire.MORE, 99, 1])
        assert client.read() == [wire.PART, 1, 1, [], None, True]
        client.send([wire.INFER, 2, "counts", 0, [count(1000)], None, 0, {"window": 1}])
        assert client.read()[:2] == [wire.PART, 2]
        client.send([wire.CANCEL, 2])
        ended = client.read()
        assert ended[0] in (wire.FAIL, wire.FAIL_HELD)
        assert ended[1:3] == [2, "CANCELLED"]
        if ended[0] == wire.FAIL_HELD:
            assert client.read() == [wire.RELEASED, 2]
        assert client.infer(3, "counts", [count(0)], None, 0, {"window": 1})[3:] == [[], None, True]
        assert client.infer(4, "counts", [count(1)])[:3] == [wire.FAIL, 4, "UNSUPPORTED"]
        answer = client.infer(5, "identity", [count(7)], None, 0, {"window": 1})
        assert answer == [wire.REPLY, 5, 1, [["y", "FP32", [1], np.float32(7).tobytes()]], None]


def ask(client: WireClient, what: str, model: str = "", version: int = 0) -> Any:
    client.send([wire.ASK, 77, what, model, version, b""])
    body = b""
    while True:
        answer = client.read()
        assert answer[:2] == [wire.ANSWER, 77], answer
        body += answer[2]
        if not answer[3]:
            return json.loads(body)


def test_queries_are_answered_in_json(server: Path) -> None:
    with WireClient(server, "frames") as client:
        assert ask(client, "live")["live"] is True
        assert ask(client, "ready", "identity", 1)["ready"] is True
        assert {entry["name"] for entry in ask(client, "models")} > {"identity", "strings"}
        metadata = ask(client, "metadata", "identity")
        assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1]}]
        assert ask(client, "statistics", "identity")["model_stats"][0]["name"] == "identity"


def test_another_protocol_is_refused_by_number(server: Path) -> None:
    with WireClient(server, "frames", greet=False) as client:
        client.send([wire.HELLO, 2, os.getpid(), "from the future", "frames"])
        answer = client.read()
        assert answer[:2] == [wire.GOODBYE, "PROTOCOL"]
        assert "protocol 2" in answer[2]
