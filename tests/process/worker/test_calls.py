"""Models that call models, in a worker whose broker is the test: what a call says, what its answers become, and that
all that was given is given back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmserve.protocol.messages import (
    Answer,
    Ask,
    Call,
    Cancel,
    Done,
    Fail,
    FailHeld,
    Handle,
    Map,
    More,
    Options,
    Part,
    Ping,
    Pong,
    Released,
    Reply,
    Return,
    Row,
    Stop,
    Tensor,
    Wanted,
    Withdraw,
    Withdrawn,
)
from shmserve.shm.arena import Arena, Segment
from shmserve.shm.extents import memfd
from shmserve.workers.backends.python.pb_calls import REPLAYED_BYTES
from shmserve.workers.process.exit_codes import Exit
from tests.support.workers.calling_models import CALLER, LOADING
from tests.support.workers.worker_harness import PATIENCE_S, WORKER, WorkerProcess, config, work
from tests.support.workers.worker_models import python_model

Array = np.ndarray[Any, np.dtype[Any]]
pytestmark = pytest.mark.process

LARGE = 5000
"""So many floats do not travel inside a message."""
OTHER = 9
"""The number of the worker that answers the calls."""

segments = count(100, 100)


class Broker:
    """A worker, and the memory of the one who answers its calls."""

    def __init__(self, worker: WorkerProcess) -> None:
        self.worker = worker
        self.audience = "internal"
        make = lambda size: memfd.create(size, seal_future_write=True)  # noqa: E731
        self.arena = Arena(OTHER, make, limit_bytes=1 << 26, announce=self._announce)
        self.given: list[Handle] = []
        self.requests = 0

    def _announce(self, segment: Segment) -> None:
        found = segment.map()
        self.worker.send(Map(found.segment, found.size, None, self.audience), descriptors=[segment.fd])

    def output(self, array: Array) -> Tensor:
        block = self.arena.allocate(array.nbytes)
        block.memory()[: array.nbytes] = array.tobytes()
        handle = Handle(block.segment, block.offset, array.nbytes)
        self.given.append(handle)
        return Tensor("b", "FP32", array.shape, (handle,))

    def send(self, wish: str, array: Array, audience: str = "internal", **more: object) -> int:
        self.requests += 1
        options = Options(parameters={"wish": wish, **more})  # type: ignore[dict-item]
        tensor = self.worker.tensor("x", array)
        self.worker.execute(work(self.requests, tensor, audience=audience, options=options))
        return self.requests

    def call(self) -> Call:
        return self.worker.expect(Call)

    def inputs(self, call: Call) -> list[Array]:
        return [self.worker.array(tensor, np.float32) for tensor in call.inputs]

    def row(self) -> Row:
        rows, _ = self.worker.done()
        (row,) = rows
        return row

    def returned(self) -> None:
        """Waits until all that was given has been given back."""
        while self.given:
            self.worker.send(Ping(1))
            while not isinstance(message := self.worker.next()[0], Pong):
                assert isinstance(message, Return), message
                for handle in message.handles:
                    self.given.remove(handle)


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    settings = config("python", {"x": ("FP32", (-1,))}, {"y": ("FP32", (-1,))}, max_batch=4, name="caller")
    folder = tmp_path_factory.mktemp("models")
    python_model(folder, CALLER)
    with WorkerProcess(settings, folder, instance="caller_0_0") as process:
        process.loaded()
        for audience in ("internal", "uid:1"):  # makes all memory that the tests need
            broker = Broker(process)
            broker.arena._numbers = segments
            broker.send("computed", large(), audience)
            call = broker.call()
            process.send(Reply(call.call, 1, (broker.output(large()),)))
            broker.row()
            broker.returned()
            broker.arena.close()
        yield process


@pytest.fixture
def broker(module: WorkerProcess) -> Iterator[Broker]:
    found = Broker(module)
    found.arena._numbers = segments
    try:
        yield found
        found.returned()
    finally:
        found.arena.close()


def large(first: float = 0) -> Array:
    return np.arange(first, first + LARGE, dtype=np.float32).reshape(1, LARGE)


def floats(row: Row) -> Array:
    data = row.outputs[0].data
    assert isinstance(data, bytes)
    return np.frombuffer(data, np.float32)


def test_inputs_and_outputs_pass_as_they_are(broker: Broker) -> None:
    """The handle that came with the request goes on, and the one of the answer, too."""
    number = broker.send("pass_on", large())
    call = broker.call()
    assert (call.parent, call.model, call.version, call.held) == (number, "other", 0, True)
    assert call.outputs == (Wanted("b"),)
    (tensor,) = call.inputs
    assert isinstance(tensor.data, tuple)
    assert tensor.data[0].segment >> 32 != WORKER
    assert (broker.inputs(call)[0] == large()).all()
    given = broker.output(large(7))
    broker.worker.send(Reply(call.call, 1, (given,)))
    row = broker.row()
    assert row.error is None
    assert row.outputs[0].data == given.data


def test_a_part_of_an_input_passes_as_such(broker: Broker) -> None:
    broker.send("part", large())
    call = broker.call()
    (tensor,) = call.inputs
    assert isinstance(tensor.data, tuple)
    assert tensor.data[0].segment >> 32 != WORKER
    assert (broker.inputs(call)[0] == large()[:, 100:3000]).all()
    broker.worker.send(Fail(call.call, "NOT_FOUND", "no such model"))
    row = broker.row()
    assert row.error is not None
    assert "2: no such model" in row.error.text


def test_what_was_computed_is_in_memory_of_the_worker_until_it_is_answered(broker: Broker) -> None:
    places = set()
    for code in ("fail", "held", "reply"):
        broker.send("computed", large())
        call = broker.call()
        (tensor,) = call.inputs
        assert isinstance(tensor.data, tuple)
        assert tensor.data[0].segment >> 32 == WORKER
        places.add(tensor.data)
        assert (broker.inputs(call)[0] == large() + 1).all()
        if code == "fail":
            broker.worker.send(Fail(call.call, "UNAVAILABLE", "not now"))
        elif code == "held":
            broker.worker.send(FailHeld(call.call, "CANCELLED", "not now"), Released(call.call))
        else:
            broker.worker.send(Reply(call.call, 1, (Tensor("b", "FP32", (1, 1), bytes(4)),)))
        assert (broker.row().error is None) == (code == "reply")
    assert len(places) == 1


def test_an_answer_for_another_audience_is_copied(broker: Broker) -> None:
    broker.send("pass_on", large(), audience="uid:1")
    call = broker.call()
    given = broker.output(large(7))
    broker.worker.send(Reply(call.call, 1, (given,)))
    row = broker.row()
    assert isinstance(row.outputs[0].data, tuple)
    assert row.outputs[0].data[0].segment >> 32 == WORKER
    assert (broker.worker.array(row.outputs[0], np.float32) == large(7)).all()


def test_what_a_request_says(broker: Broker) -> None:
    broker.send("said", np.zeros((1, 1), np.float32), traceparent="00-1-2-01")
    call = broker.call()
    assert call.version == 3
    assert call.options == Options(
        id="r", sequence="c", sequence_start=True, priority=2, queue_timeout_us=70,
        parameters={"traceparent": "00-1-2-01", "k": 1},
    )  # fmt: skip
    broker.worker.send(Reply(call.call, 1, (Tensor("b", "FP32", (1, 1), bytes(4)),), {"said": True}))
    assert broker.row().error is None


def test_what_is_dropped_goes_back_after_the_batch(broker: Broker) -> None:
    broker.send("drop", np.zeros((1, 1), np.float32))
    call = broker.call()
    broker.worker.send(Reply(call.call, 1, (broker.output(large()),)))
    row = broker.row()
    assert floats(row)[0] == large().sum()


def test_strings(broker: Broker) -> None:
    broker.send("strings", np.zeros((1, 1), np.float32))
    call = broker.call()
    assert call.inputs[0].data == b"\1\0\0\0x\1\0\0\0y"
    data = b"\3\0\0\0one\3\0\0\0two"
    broker.worker.send(Reply(call.call, 1, (Tensor("b", "BYTES", (2,), data),)))
    assert broker.row().error is None


def part(call: Call, number: float, last: bool = False) -> Part:
    return Part(call.call, 1, (Tensor("b", "FP32", (1,), np.float32(number).tobytes()),), None, last)


def test_many_answers(broker: Broker) -> None:
    broker.send("parts", np.zeros((1, 1), np.float32))
    call = broker.call()
    assert call.options == Options(window=64)
    for number in range(64):
        broker.worker.send(part(call, number))
    room = 64 - 64
    for number in range(64, 100):
        while room < 1:
            more = broker.worker.expect(More)
            assert more.request == call.call
            room += more.count
        broker.worker.send(part(call, number))
        room -= 1
    broker.worker.send(Part(call.call, 1, (), None, True))
    while isinstance(broker.worker.reports[0][0] if broker.worker.reports else None, More):
        broker.worker.next()
    while not isinstance(message := broker.worker.next()[0], Done):
        assert isinstance(message, More)
    assert list(floats(message.rows[0])) == [101, sum(range(100))], "the last response has no outputs, and counts"


def test_answers_too_large_for_a_second_loop(broker: Broker) -> None:
    broker.send("large_parts", np.zeros((1, 1), np.float32))
    call = broker.call()
    size = large(0).nbytes
    count = REPLAYED_BYTES // size + 1
    for number in range(count):
        broker.worker.send(Part(call.call, 1, (broker.output(large(number)),), None, number == count - 1))
    while not isinstance(message := broker.worker.next()[0], Done):
        for handle in message.handles if isinstance(message, Return) else ():
            broker.given.remove(handle)
    assert message.rows[0].error is not None
    assert f"the {count * size} bytes of these responses are more than" in message.rows[0].error.text


def test_what_a_model_forks_leaves_its_link_alone(broker: Broker) -> None:
    """Nothing of a child's may reach the broker, which would take it for the worker's own."""
    broker.send("forked", np.zeros((1, 1), np.float32))
    call = broker.call()
    broker.worker.send(Reply(call.call, 1, (Tensor("b", "FP32", (1, 1), np.float32(5).tobytes()),)))
    row = broker.row()
    assert row.error is None, row.error
    assert list(floats(row)) == [5]


@pytest.mark.parametrize("cancel", [True, False])
def test_answers_that_nobody_takes(broker: Broker, cancel: bool) -> None:
    broker.send("few_parts", np.zeros((1, 1), np.float32), cancel=cancel)
    call = broker.call()
    given = [broker.output(large(number)) for number in range(3)]
    for tensor in given:
        broker.worker.send(Part(call.call, 1, (tensor,)))
    rows: list[Row] = []
    cancelled = False
    asked = 0
    while asked or not (rows and cancelled):
        if rows and not asked:
            broker.worker.send(Ping(1))
            asked = 1
        message, _ = broker.worker.next()
        if isinstance(message, Done):
            rows += message.rows
        elif isinstance(message, Return):
            for handle in message.handles:
                broker.given.remove(handle)
        elif isinstance(message, Cancel):
            assert message.request == call.call
            cancelled = True
        else:
            assert isinstance(message, Pong), message
            asked = 0
    assert rows[0].outputs[0].data == given[0].data
    broker.worker.send(Part(call.call, 1, (broker.output(large(9)),)), Fail(call.call, "CANCELLED", "it was cancelled"))


def answer_out_of_order(broker: Broker, parent: int, count: int = 4) -> Row:
    calls = [broker.call() for _ in range(count)]
    assert {call.parent for call in calls} == {parent}
    assert all(call.held for call in calls)
    broker.worker.send(Withdraw((99,)))
    assert broker.worker.expect(Withdrawn).requests == ()
    for call in reversed(calls):
        value = broker.inputs(call)[0] * 10
        broker.worker.send(Reply(call.call, 1, (Tensor("b", "FP32", (1, 1), value.tobytes()),)))
    row = broker.row()
    assert row.error is None
    assert list(floats(row)) == [0, 10, 20, 30]
    return row


@pytest.mark.parametrize("wish", ["threads", "own_loop"])
def test_several_at_once(broker: Broker, wish: str) -> None:
    answer_out_of_order(broker, broker.send(wish, np.zeros((1, 1), np.float32)))


def test_a_coroutine_calls(broker: Broker) -> None:
    broker.requests += 1
    tensor = broker.worker.tensor("x", np.zeros((1, 1), np.float32))
    broker.worker.execute(work(broker.requests, tensor, options=Options(parameters={"batch": "async"})))
    answer_out_of_order(broker, broker.requests)


def test_a_coroutine_reads_many_answers(broker: Broker) -> None:
    broker.send("parts_later", np.zeros((1, 1), np.float32))
    call = broker.call()
    broker.worker.send(part(call, 1), part(call, 2), part(call, 3, last=True))
    assert floats(broker.row())[0] == 3


def test_a_thread_calls_when_there_is_no_request(broker: Broker) -> None:
    broker.send("background", np.zeros((1, 1), np.float32))
    assert broker.row().error is None
    broker.send("released_now", np.zeros((1, 1), np.float32))
    messages = [broker.worker.next()[0] for _ in range(2)]
    (call,) = [message for message in messages if isinstance(message, Call)]
    assert any(isinstance(message, Done) for message in messages)
    assert call.parent in (0, broker.requests)  # its request may not have been answered yet
    given = broker.output(large())
    broker.worker.send(Reply(call.call, 1, (given,)))
    broker.send("heard_later", np.zeros((1, 1), np.float32))
    assert broker.row().outputs[0].data == given.data


def test_dlpack(broker: Broker) -> None:
    broker.send("dlpack", large())
    row = broker.row()
    assert row.error is None, row.error


def test_the_server_is_asked(broker: Broker) -> None:
    broker.send("control", np.zeros((1, 1), np.float32))
    for version, ready in ((0, True), (2, False)):
        ask = broker.worker.expect(Ask)
        assert (ask.what, ask.model, ask.version) == ("ready", "other", version)
        body = json.dumps({"ready": ready}).encode()
        broker.worker.send(Answer(ask.request, body[:5], True), Answer(ask.request, body[5:]))
    asks = [broker.worker.expect(Ask)]
    while asks[-1].more:
        asks.append(broker.worker.expect(Ask))
    assert len(asks) > 2
    assert {one.request for one in asks} == {asks[0].request}
    head, _, data = b"".join(one.body for one in asks).partition(b"\n")
    assert json.loads(head) == {"config": {"backend": "x"}, "files": [["1/model.py", 150_000]]}
    assert data == b"a" * 150_000
    broker.worker.send(Answer(asks[0].request, b"{}"))
    ask = broker.worker.expect(Ask)
    assert (ask.what, json.loads(ask.body)) == ("unload", {"unload_dependents": True, "wait": False})
    broker.worker.send(Answer(ask.request, b"{}"))
    assert broker.row().error is None


def test_the_server_refuses(broker: Broker) -> None:
    broker.send("refused", np.zeros((1, 1), np.float32))
    ask = broker.worker.expect(Ask)
    broker.worker.send(Fail(ask.request, "NOT_FOUND", "there is none"))
    row = broker.row()
    assert row.error is not None
    assert "there is none" in row.error.text


@pytest.mark.parametrize(("wish", "text"), [("unsayable", "model"), ("came", "this request came to the model")])
def test_calls_that_cannot_be_made(broker: Broker, wish: str, text: str) -> None:
    broker.send(wish, np.zeros((1, 1), np.float32))
    row = broker.row()
    assert row.error is not None
    assert "TritonModelException" in row.error.text
    assert text in row.error.text


def test_the_server_is_asked_while_the_model_is_loaded(tmp_path: Path) -> None:
    """Orders that come meanwhile wait."""
    settings = config("python", {"x": ("FP32", (-1,))}, {"y": ("FP32", (-1,))}, max_batch=4, name="early")
    python_model(tmp_path, LOADING)
    with WorkerProcess(settings, tmp_path) as process:
        ask = process.expect(Ask)
        process.send(Ping(5), Answer(ask.request, b'{"ready": false}'))
        ask = process.expect(Ask)
        assert (ask.what, ask.model) == ("load", "other")
        process.send(Answer(ask.request, b"{}"))
        process.loaded()
        assert process.expect(Pong).number == 5


@pytest.fixture
def lone(tmp_path: Path) -> Iterator[Broker]:
    """A worker of its own, that does not live long."""
    python_model(tmp_path, CALLER)
    settings = config("python", {"x": ("FP32", (-1,))}, {"y": ("FP32", (-1,))}, max_batch=4, name="caller")
    with WorkerProcess(settings, tmp_path) as process:
        process.loaded()
        yield Broker(process)


@pytest.mark.parametrize("wish", ["computed", "threads", "own_loop"])
def test_the_link_ends_while_the_model_waits(lone: Broker, wish: str) -> None:
    lone.send(wish, np.zeros((1, 1), np.float32))
    lone.call()
    lone.worker.sock.close()
    assert lone.worker.process.wait(PATIENCE_S) == Exit.LINK_LOST


def test_the_worker_is_stopped_while_a_thread_waits(lone: Broker) -> None:
    for wish in ("background", "released_now"):
        lone.send(wish, np.zeros((1, 1), np.float32))
    while not isinstance(lone.worker.next()[0], Call):
        pass
    lone.worker.send(Stop())
    assert lone.worker.ended() == Exit.STOPPED
