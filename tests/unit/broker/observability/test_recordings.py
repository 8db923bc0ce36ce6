"""The operation `record`: one at a time, read in pages, and discarded if no client reads it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shmserve.broker.observability.recordings import EXPIRES_S, PAGE, Recordings
from shmserve.errors import InvalidRequest, NotFound, Unavailable
from shmserve.protocol.messages import Infer
from tests.support.core.fakes.tensors import one_input
from tests.support.core.policies import plain
from tests.support.core.world import World
from tests.support.manual_loop import ManualLoop

pytestmark = pytest.mark.usefixtures("own_log")


class RecordingWorld(World):
    def __init__(self) -> None:
        super().__init__()
        self.loop = ManualLoop()
        self.recordings = Recordings(self.loop, self.core.state, lambda: self.now)
        self.deploy(plain())
        self.deploy(plain("n"))
        self.client = self.connect("c")
        self.sent = 0

    def do(self, what: str, recording: int = 0, **more: Any) -> dict[str, Any]:
        return self.recordings.change(json.dumps({"do": what, "recording": recording} | more).encode())

    def serve(self, count: int = 1, model: str = "m") -> None:
        for _ in range(count):
            self.sent += 1
            self.client.sends(self.sent)
            self.turn([(self.client.peer, Infer(self.sent, model, 0, (one_input(),)))])
            self.now += 1000
            self.finish_all()


def numbers(answer: dict[str, Any]) -> list[int]:
    return [request.own for record in answer["records"] for request in record.requests]


def test_a_recording_is_started_read_and_stopped() -> None:
    world = RecordingWorld()
    world.serve()
    number = world.do("start")["recording"]
    world.serve(2)
    world.serve(1, "n")
    answer = world.do("read", number)
    assert numbers(answer) == [2, 3, 4]
    assert answer["clients"] == {world.client.peer: "c"}
    assert (answer["more"], answer["left_out"], answer["time_ns"]) == (False, 0, world.now)
    world.serve()
    assert numbers(world.do("stop", number)) == [5]
    world.serve()
    assert world.core.state.observers.recording is None
    with pytest.raises(NotFound, match="has ended"):
        world.do("read", number)
    with pytest.raises(NotFound, match="'other' is not found"):
        world.do("start", models=["m", "other"])
    assert world.do("start", models=["n"])["recording"] == number + 1
    world.serve(1, "m")
    world.serve(1, "n")
    assert numbers(world.do("read", number + 1)) == [8], "only the named models are recorded"


def test_a_stopped_recording_is_read_in_pages() -> None:
    world = RecordingWorld()
    number = world.do("start")["recording"]
    world.serve(PAGE + 1)
    first = world.do("stop", number)
    world.serve()  # not recorded any more
    assert first["more"]
    with pytest.raises(Unavailable, match="another recording is running"):
        world.do("start")
    last = world.do("stop", number)
    assert numbers(first) + numbers(last) == list(range(1, PAGE + 2))
    assert not last["more"]


def test_a_recording_is_limited_and_ends_if_it_is_not_read() -> None:
    world = RecordingWorld()
    number = world.do("start")["recording"]
    world.do("read", number)
    assert world.loop.fire() == EXPIRES_S
    assert world.core.state.observers.recording is None
    with pytest.raises(NotFound, match=f"not read for {EXPIRES_S:g} s"):
        world.do("read", number)
    world.do("start")
    recording = world.core.state.observers.record((), 3)
    world.serve(5)
    for expected in ([1, 2, 3], [6]):
        answer = recording.take(10)
        assert (numbers(answer), answer["left_out"]) == (expected, 2)
        world.serve(1)


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b'{"do": "\xff"}', b'{"do": 1}', b"[" * 100_000),
        *(b'{"do": "pause"}', b'{"do": "read", "more": 1}'),
    ],
)
def test_an_invalid_body_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="body of 'record'"):
        RecordingWorld().recordings.change(body)
