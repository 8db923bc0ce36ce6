"""A client written from docs/wire.md alone, with `zmq`, `msgpack` and numpy, against the real server.

The rule: the client below imports nothing of shmserve; every number in it is one that the page states.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq

from bench.lib import models
from bench.lib.setting import serving

pytestmark = pytest.mark.process

MAP, UNMAP, RETURN, PING, PONG = 1, 2, 3, 4, 5
HELLO, INFER, CANCEL, ASK, BYE, MORE = 6, 7, 8, 9, 10, 11
WELCOME, REPLY, FAIL, RELEASED, FAIL_HELD, ANSWER, RECLAIM, GOODBYE, PART = 32, 33, 34, 35, 36, 37, 38, 39, 40
SECONDS = 20.0

Message = list[Any]


class Speaker:
    """One DEALER. `frames` are those behind the packet read last; `named` the segments that the server has told of."""

    def __init__(self, place: Path, outputs: str, *, greet: bool = True) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(f"ipc://{place}/broker.sock")
        self._waiting: list[Message] = []
        self.frames: list[bytes] = []
        self.named: dict[int, tuple[str, int]] = {}
        self.owner = 0
        if greet:
            self.send([HELLO, 1, os.getpid(), "independent", outputs])
            tag, protocol, self.owner, server, limits = self.read()
            assert (tag, protocol) == (WELCOME, 1)
            assert isinstance(server, str)
            assert limits
            assert all(type(value) is int for value in limits.values())

    def send(self, *batch: Message, frames: tuple[bytes, ...] = ()) -> None:
        self._socket.send_multipart([msgpack.packb(list(batch)), *frames])

    def send_raw(self, *parts: bytes) -> None:
        self._socket.send_multipart(parts)

    def read(self) -> Message:
        """The next message; Maps and Unmaps are noted on the way."""
        while True:
            while not self._waiting:
                assert self._socket.poll(int(SECONDS * 1000)), "the server does not answer"
                packet, *frames = self._socket.recv_multipart()
                self.frames = frames or self.frames
                self._waiting = msgpack.unpackb(packet)
            message = self._waiting.pop(0)
            if message[0] == MAP:
                _, segment, size, name, *_ = message
                self.named[segment] = (name, size)
            elif message[0] == UNMAP:
                del self.named[message[1]]
            else:
                return message

    def infer(
        self, request: int, model: str, inputs: list[Message], *more: Any, frames: tuple[bytes, ...] = ()
    ) -> Message:
        self.send([INFER, request, model, 0, inputs, *more], frames=frames)
        answer = self.read()
        assert answer[1] == request
        return answer

    def bytes_of(self, tensor: Message) -> bytes:
        """Wherever they are: in the message, in a frame, or in a named segment of the server's."""
        data = tensor[3]
        if isinstance(data, bytes):
            return data
        if isinstance(data, int):
            return self.frames[data]
        found = b""
        for segment, offset, size in data:
            name, whole = self.named[segment]
            with (
                open(f"/dev/shm/{name.lstrip('/')}", "rb") as file,
                mmap.mmap(file.fileno(), whole, prot=mmap.PROT_READ) as memory,
            ):
                found += memory[offset : offset + size]
        return found

    def close(self) -> None:
        self.send([BYE])
        self._socket.close(linger=1000)
        self._context.term()

    def __enter__(self) -> Speaker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


SLOW = """\
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.3)
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("y", pb_utils.get_input_tensor_by_name(r, "x").as_numpy())])
            for r in requests
        ]
"""


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
    slow = models.Model("python", {"x": ("FP32", [-1])}, {"y": ("FP32", [-1])})
    models.write(root, "slow", slow, {"model.py": SLOW})
    models.write(root, "counts", slow, {"model.py": COUNTS})
    with (root / "counts" / "config.pbtxt").open("a") as config:
        config.write("model_transaction_policy { decoupled: true }\n")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The runtime directory of a server that these tests share."""
    root = tmp_path_factory.mktemp("repository")
    write_repository(root)
    with serving(root) as served:
        yield served.runtime_dir


@pytest.fixture
def own_place(tmp_path: Path) -> Iterator[Path]:
    """That of a server for one test, whose workers make named segments: these must be gone when it is."""
    models.write(tmp_path, "identity", models.identity(), {})
    with serving(tmp_path) as served:
        yield served.runtime_dir


def floats(count: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def test_ping(place: Path) -> None:
    with Speaker(place, "frames") as speaker:
        speaker.send([PING, 12345])
        assert speaker.read() == [PONG, 12345]


@pytest.mark.parametrize("outputs", ["frames", "posix"])
def test_inline_tensors_come_back_inline(place: Path, outputs: str) -> None:
    x = floats(1024)
    with Speaker(place, outputs) as speaker:
        tag, request, version, tensors, *_ = speaker.infer(1, "identity", [["x", "FP32", [1024], x.tobytes()]])
        assert (tag, request, version) == (REPLY, 1, 1)
        assert tensors == [["y", "FP32", [1024], x.tobytes()]]


def test_strings_are_a_length_and_bytes(place: Path) -> None:
    words = [b"", b"a", "größer".encode(), bytes(range(256))]
    body = b"".join(len(word).to_bytes(4, "little") + word for word in words)
    with Speaker(place, "frames") as speaker:
        answer = speaker.infer(1, "strings", [["x", "BYTES", [len(words)], body]])
        assert answer[3] == [["y", "BYTES", [len(words)], body]]


def test_frames_go_and_come(place: Path) -> None:
    x = floats(200_000)
    with Speaker(place, "frames") as speaker:
        answer = speaker.infer(1, "identity", [["x", "FP32", [200_000], 0]], frames=(x.tobytes(),))
        name, dtype, shape, data = answer[3][0]
        assert (answer[0], name, dtype, shape) == (REPLY, "y", "FP32", [200_000])
        assert type(data) is int
        assert speaker.frames[data] == x.tobytes()


def test_a_frame_that_did_not_come(place: Path) -> None:
    with Speaker(place, "frames") as speaker:
        answer = speaker.infer(1, "identity", [["x", "FP32", [2000], 3]], frames=(bytes(8000),))
        assert answer[:3] == [FAIL, 1, "INVALID_ARG"]
        assert "frame 3" in answer[3]
        assert "'x'" in answer[3]


def test_an_answer_too_large_for_frames_is_refused(place: Path) -> None:
    """A client that took its input from a segment, but wants the answer in frames."""
    x = floats(400_000)
    with Speaker(place, "frames") as speaker, Segment(speaker, x.tobytes()) as segment:
        answer = speaker.infer(1, "identity", [["x", "FP32", [400_000], [segment.handle]]])
        assert answer[:3] == [FAIL, 1, "INVALID_ARG"]
        assert str(1024 * 1024) in answer[3]
        assert speaker.infer(2, "identity", [["x", "FP32", [1], b"1234"]])[0] == REPLY


class Segment:
    """A named object in /dev/shm that this process owns and has announced."""

    def __init__(self, speaker: Speaker, content: bytes) -> None:
        self.name = f"independent-{secrets.token_hex(16)}"
        self.number = speaker.owner << 32 | 1
        descriptor = os.open(f"/dev/shm/{self.name}", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(descriptor, content)
        finally:
            os.close(descriptor)
        self.handle = [self.number, 0, len(content)]
        self._speaker = speaker
        speaker.send([MAP, self.number, len(content), "/" + self.name])

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *_: object) -> None:
        self._speaker.send([UNMAP, self.number])
        os.unlink(f"/dev/shm/{self.name}")


def test_named_segments_go_and_come(own_place: Path) -> None:
    """The input lies in the client's segment, the output in one of the server's; what was held is given back once."""
    x = floats(1_000_000)
    with Speaker(own_place, "posix") as speaker, Segment(speaker, x.tobytes()) as segment:
        for request in range(1, 4):
            answer = speaker.infer(request, "identity", [["x", "FP32", [1_000_000], [segment.handle]]])
            assert answer[0] == REPLY, answer
            output = answer[3][0]
            assert output[:3] == ["y", "FP32", [1_000_000]]
            assert output[3][0][0] >> 32 != speaker.owner
            assert speaker.bytes_of(output) == x.tobytes()
            speaker.send([RETURN, output[3]])
        speaker.send([RETURN, output[3]])
        refused = speaker.read()
        assert refused[:3] == [FAIL, 0, "INVALID_ARG"]


def test_an_answer_where_the_client_wants_it(own_place: Path) -> None:
    """The output is written into the client's own segment, behind the input."""
    x = floats(5000)
    with Speaker(own_place, "posix") as speaker, Segment(speaker, x.tobytes() + bytes(20_000)) as segment:
        number = segment.number
        inputs = [["x", "FP32", [5000], [[number, 0, 20_000]]]]
        answer = speaker.infer(1, "identity", inputs, [["y", [number, 20_000, 20_000]]])
        assert answer[0] == REPLY, answer
        assert answer[3] == [["y", "FP32", [5000], [[number, 20_000, 20_000]]]]
        written = Path(f"/dev/shm/{segment.name}").read_bytes()[20_000:]
        assert written == x.tobytes()


def test_cancel_ends_what_waits_and_what_runs(place: Path) -> None:
    """Each request is answered once; inputs of one that a worker still reads are released later."""
    tensor = ["x", "FP32", [1], b"1234"]
    with Speaker(place, "frames") as speaker:
        speaker.send(*([INFER, request, "slow", 0, [tensor]] for request in (1, 2, 3)))
        speaker.send([CANCEL, 3], [CANCEL, 2], [CANCEL, 99])
        answers: dict[int, Message] = {}
        while len(answers) < 3:
            answer = speaker.read()
            if answer[0] == RELEASED:
                continue
            assert answer[1] not in answers
            answers[answer[1]] = answer
        assert answers[1][0] == REPLY
        for request in (2, 3):
            assert answers[request][0] in (FAIL, FAIL_HELD)
            assert answers[request][2] == "CANCELLED"


def test_a_timeout_comes_on_time_and_releases_later(place: Path) -> None:
    with Speaker(place, "frames") as speaker:
        answer = speaker.infer(1, "slow", [["x", "FP32", [1], b"1234"]], None, 50_000)
        assert answer[0] in (FAIL, FAIL_HELD)
        assert answer[2] == "DEADLINE_EXCEEDED"
        if answer[0] == FAIL_HELD:
            assert speaker.read() == [RELEASED, 1]


def test_streams_are_parts_as_many_as_are_allowed(place: Path) -> None:
    def count(number: int) -> Message:
        return ["x", "FP32", [1], np.float32(number).tobytes()]

    with Speaker(place, "frames") as speaker:
        speaker.send([INFER, 1, "counts", 0, [count(5)], None, 0, {"window": 2}])
        for number in range(5):
            tag, request, version, outputs, *rest = speaker.read()
            assert (tag, request, version) == (PART, 1, 1)
            assert outputs == [["y", "FP32", [2], np.full(2, number, np.float32).tobytes()]]
            assert True not in rest
            if number == 1:
                speaker.send([PING, 7])
                assert speaker.read() == [PONG, 7]  # there is no room for more
                speaker.send([MORE, 1, 100], [MORE, 99, 1])
        assert speaker.read() == [PART, 1, 1, [], None, True]
        speaker.send([INFER, 2, "counts", 0, [count(1000)], None, 0, {"window": 1}])
        assert speaker.read()[:2] == [PART, 2]
        speaker.send([CANCEL, 2])
        ended = speaker.read()
        assert ended[0] in (FAIL, FAIL_HELD)
        assert ended[1:3] == [2, "CANCELLED"]
        if ended[0] == FAIL_HELD:
            assert speaker.read() == [RELEASED, 2]
        assert speaker.infer(3, "counts", [count(0)], None, 0, {"window": 1})[3:] == [[], None, True]
        assert speaker.infer(4, "counts", [count(1)])[:3] == [FAIL, 4, "UNSUPPORTED"]
        answer = speaker.infer(5, "identity", [count(7)], None, 0, {"window": 1})
        assert answer == [REPLY, 5, 1, [["y", "FP32", [1], np.float32(7).tobytes()]], None]


def ask(speaker: Speaker, what: str, model: str = "", version: int = 0) -> Any:
    speaker.send([ASK, 77, what, model, version, b""])
    body = b""
    while True:
        answer = speaker.read()
        assert answer[:2] == [ANSWER, 77], answer
        body += answer[2]
        if not answer[3]:
            return json.loads(body)


def test_questions(place: Path) -> None:
    with Speaker(place, "frames") as speaker:
        assert ask(speaker, "live")["live"] is True
        assert ask(speaker, "ready")["ready"] is True
        assert ask(speaker, "ready", "identity", 1)["ready"] is True
        assert {entry["name"] for entry in ask(speaker, "models")} == {"identity", "strings", "slow", "counts"}
        metadata = ask(speaker, "metadata", "identity")
        assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1]}]
        assert ask(speaker, "config", "identity")["name"] == "identity"
        assert ask(speaker, "statistics", "identity")["model_stats"][0]["name"] == "identity"


@pytest.mark.parametrize(
    ("message", "code", "words"),
    [
        ([INFER, 5, "nobody", 0, []], "NOT_FOUND", "nobody"),
        ([INFER, 5, "identity", 9, []], "NOT_FOUND", "9"),
        ([INFER, 5, "identity", 0, [["x", "INT8", [1], b"1"]]], "INVALID_ARG", "INT8"),
        ([INFER, 5, "identity", 0, [["x", "FP32", [2], b"1234"]]], "INVALID_ARG", "Expected 8, got 4"),
        ([INFER, 5, "identity", 0, "tensors"], "PROTOCOL", "inputs"),
        ([INFER, 5, "identity"], "PROTOCOL", "Infer"),
        ([ASK, 5, "nothing", "", 0, b""], "INVALID_ARG", "nothing"),
        ([ASK, 5, "config", "nobody", 0, b""], "NOT_FOUND", "nobody"),
    ],
)
def test_errors_name_the_request_and_the_thing(place: Path, message: Message, code: str, words: str) -> None:
    with Speaker(place, "frames") as speaker:
        speaker.send([PING, 1], message, [PING, 2])
        assert speaker.read() == [PONG, 1]
        answers = [speaker.read(), speaker.read()]
        answers.sort(key=lambda answer: answer[0] == PONG)
        assert answers[1] == [PONG, 2]
        assert answers[0][:3] == [FAIL, 5, code]
        assert words in answers[0][3]


def test_what_is_no_packet_is_told_and_survived(place: Path) -> None:
    with Speaker(place, "frames") as speaker:
        for parts in ((b"\xc1",), (b"",), (msgpack.packb({"a": 1}),), (msgpack.packb([[INFER]])[:-1],)):
            speaker.send_raw(*parts)
            answer = speaker.read()
            assert answer[:3] == [FAIL, 0, "PROTOCOL"]
        speaker.send([PING, 9])
        assert speaker.read() == [PONG, 9]


def test_another_protocol_is_refused_by_number(place: Path) -> None:
    with Speaker(place, "frames", greet=False) as speaker:
        speaker.send([HELLO, 2, os.getpid(), "from the future", "frames"])
        answer = speaker.read()
        assert answer[:2] == [GOODBYE, "PROTOCOL"]
        assert "protocol 2" in answer[2]


def test_hello_comes_first(place: Path) -> None:
    with Speaker(place, "frames", greet=False) as speaker:
        speaker.send([PING, 1], [INFER, 1, "identity", 0, []])
        answers = [speaker.read()]
        if answers[0][0] == PONG:
            answers.append(speaker.read())
        assert answers[-1][:2] == [GOODBYE, "CONNECTION_LOST"]
        assert "Hello" in answers[-1][2]


def test_bye_ends_only_this_client(place: Path) -> None:
    with Speaker(place, "frames") as staying:
        with Speaker(place, "frames") as leaving:
            leaving.send([INFER, 1, "slow", 0, [["x", "FP32", [1], b"1234"]]], [BYE])
        assert staying.infer(1, "identity", [["x", "FP32", [1], b"1234"]])[0] == REPLY
