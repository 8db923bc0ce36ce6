"""Models that call models, in a worker for which the test acts as broker: calls, answers, and the return of all
memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from shmserve.protocol.messages import (
    Answer,
    Ask,
    Cancel,
    Fail,
    FailHeld,
    Failure,
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
    Tensor,
    Wanted,
)
from shmserve.protocol.worker_messages import Call, Done, Row, Stop, Withdraw, Withdrawn
from shmserve.shm.arena import Arena, Segment
from shmserve.shm.extents import memfd
from shmserve.workers.backends.python.pb_calls import REPLAYED_BYTES
from shmserve.workers.process.exit_codes import Exit
from tests.support.patience import PATIENCE_S
from tests.support.workers.models.calling_models import CALLER, LOADING
from tests.support.workers.models.worker_models import python_model
from tests.support.workers.worker_harness import WORKER, WorkerProcess, assert_failed, config, running, work

Array = np.ndarray[Any, np.dtype[Any]]
pytestmark = pytest.mark.process

LARGE = 5000
"""An array of this many floats is too large for a message."""
others = count(9)
"""The numbers of the workers that answer the calls, one for each test."""
CONFIG = config("python", {"x": ("FP32", (-1,))}, {"y": ("FP32", (-1,))}, max_batch=4, name="caller")
ZERO = np.zeros((1, 1), np.float32)


def large(first: float = 0) -> Array:
    return np.arange(first, first + LARGE, dtype=np.float32).reshape(1, LARGE)


def small(value: float = 0) -> Tensor:
    return Tensor("b", "FP32", (1, 1), np.float32(value).tobytes())


def floats(row: Row) -> list[float]:
    data = row.outputs[0].data
    assert isinstance(data, bytes)
    found: list[float] = np.frombuffer(data, np.float32).tolist()
    return found


class Broker:
    """The broker of a worker, and the memory of another worker, which answers the calls."""

    def __init__(self, worker: WorkerProcess) -> None:
        self.worker = worker
        self.audience = "internal"
        make = partial(memfd.create, seal_future_write=True)
        self.arena = Arena(next(others), make, limit_bytes=1 << 26, announce=self._announce)
        self.lent: list[Handle] = []
        self.requests = 0

    def _announce(self, segment: Segment) -> None:
        found = segment.map()
        self.worker.send(Map(found.segment, found.size, None, self.audience), descriptors=[segment.fd])

    def output(self, array: Array) -> Tensor:
        """An output in shared memory, which the worker must return."""
        block = self.arena.allocate(array.nbytes)
        block.memory()[: array.nbytes] = array.tobytes()
        handle = Handle(block.segment, block.offset, array.nbytes)
        self.lent.append(handle)
        return Tensor("b", "FP32", array.shape, (handle,))

    def send(self, wish: str, array: Array = ZERO, audience: str = "internal", **more: object) -> int:
        self.requests += 1
        options = Options(parameters={"wish": wish, **more})  # type: ignore[dict-item]
        tensor = self.worker.tensor("x", array)
        self.worker.execute(work(self.requests, tensor, audience=audience, options=options))
        return self.requests

    def call(self, wish: str = "", array: Array = ZERO, **more: Any) -> Call:
        """The model's next call; with `wish`, the call that this request triggers."""
        if wish:
            self.send(wish, array, **more)
        return self.worker.expect(Call)

    def inputs(self, call: Call) -> list[Array]:
        return [self.worker.array(tensor, np.float32) for tensor in call.inputs]

    def reply(self, call: Call, output: Tensor | None = None, **parameters: Any) -> None:
        self.worker.send(Reply(call.call, 1, (output or small(),), parameters or None))

    def row(self) -> Row:
        rows, _ = self.worker.done()
        (row,) = rows
        assert row.error is None, row.error
        return row

    def failure(self) -> Failure:
        rows, _ = self.worker.done()
        (row,) = rows
        assert row.error is not None
        return row.error

    def take(self, message: Return) -> None:
        for handle in message.handles:
            self.lent.remove(handle)

    def returned(self) -> None:
        """Waits until the worker has returned all memory of the calls."""
        while self.lent:
            self.worker.send(Ping(1))
            while not isinstance(message := self.worker.next()[0], Pong):
                assert isinstance(message, Return), message
                self.take(message)


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    folder = tmp_path_factory.mktemp("models")
    python_model(folder, CALLER)
    with running(CONFIG, folder, instance="caller_0_0") as process:
        for audience in ("internal", "uid:1"):  # creates all segments that the tests need
            broker = Broker(process)
            call = broker.call("computed", large(), audience=audience)
            broker.reply(call, broker.output(large()))
            broker.row()
            broker.returned()
            broker.arena.close()
        yield process


@pytest.fixture
def broker(module: WorkerProcess) -> Iterator[Broker]:
    found = Broker(module)
    try:
        yield found
        found.returned()
    finally:
        found.arena.close()


def is_owned(tensor: Tensor) -> bool:
    """Whether it is in shared memory of the worker under test."""
    assert isinstance(tensor.data, tuple)
    return tensor.data[0].segment >> 32 == WORKER


def test_inputs_and_outputs_are_passed_on_without_a_copy(broker: Broker) -> None:
    call = broker.call("pass_on", large())
    assert (call.parent, call.model, call.version, call.held) == (broker.requests, "other", 0, True)
    assert call.outputs == (Wanted("b"),)
    assert not is_owned(call.inputs[0])
    assert (broker.inputs(call)[0] == large()).all()
    output = broker.output(large(7))
    broker.reply(call, output)
    assert broker.row().outputs[0].data == output.data


def test_a_slice_of_an_input_is_passed_on_without_a_copy(broker: Broker) -> None:
    call = broker.call("part", large())
    assert not is_owned(call.inputs[0])
    assert (broker.inputs(call)[0] == large()[:, 100:3000]).all()
    broker.worker.send(Fail(call.call, "NOT_FOUND", "no such model"))
    assert "2: no such model" in broker.failure().text


def test_a_computed_input_is_in_memory_of_the_worker_until_the_call_is_answered(broker: Broker) -> None:
    blocks = set()
    for answer in ("fail", "held", "reply"):
        call = broker.call("computed", large())
        assert is_owned(call.inputs[0])
        blocks.add(call.inputs[0].data)
        assert (broker.inputs(call)[0] == large() + 1).all()
        if answer == "reply":
            broker.reply(call)
            broker.row()
            continue
        if answer == "fail":
            broker.worker.send(Fail(call.call, "UNAVAILABLE", "not now"))
        else:
            broker.worker.send(FailHeld(call.call, "CANCELLED", "not now"), Released(call.call))
        broker.failure()
    assert len(blocks) == 1


def test_a_response_for_another_audience_is_copied(broker: Broker) -> None:
    call = broker.call("pass_on", large(), audience="uid:1")
    broker.reply(call, broker.output(large(7)))
    row = broker.row()
    assert is_owned(row.outputs[0])
    assert (broker.worker.value(row) == large(7)).all()


def test_options_and_parameters_of_a_call(broker: Broker) -> None:
    call = broker.call("said", traceparent="00-1-2-01")
    assert call.version == 3
    assert call.options == Options(
        id="r",
        sequence="c",
        sequence_start=True,
        priority=2,
        queue_timeout_us=70,
        parameters={"traceparent": "00-1-2-01", "k": 1},
    )
    broker.reply(call, said=True)
    broker.row()


def test_a_dropped_response_is_returned_after_the_batch(broker: Broker) -> None:
    call = broker.call("drop")
    broker.reply(call, broker.output(large()))
    assert floats(broker.row()) == [large().sum()]


def test_strings(broker: Broker) -> None:
    call = broker.call("strings")
    assert call.inputs[0].data == b"\1\0\0\0x\1\0\0\0y"
    broker.reply(call, Tensor("b", "BYTES", (2,), b"\3\0\0\0one\3\0\0\0two"))
    broker.row()


def part(call: Call, number: float, last: bool = False) -> Part:
    return Part(call.call, 1, (small(number),), None, last)


def test_responses_of_a_called_decoupled_model_have_a_window(broker: Broker) -> None:
    call = broker.call("parts")
    assert call.options == Options(window=64)
    for number in range(64):
        broker.worker.send(part(call, number))
    room = 0
    for number in range(64, 100):
        while room < 1:
            more = broker.worker.expect(More)
            assert more.request == call.call
            room += more.count
        broker.worker.send(part(call, number))
        room -= 1
    broker.worker.send(Part(call.call, 1, (), None, True))
    while not isinstance(message := broker.worker.next()[0], Done):
        assert isinstance(message, More)
    assert floats(message.rows[0]) == [101, sum(range(100))], "the last response has no outputs, and counts"


def test_responses_too_large_to_iterate_twice(broker: Broker) -> None:
    call = broker.call("large_parts")
    size = large(0).nbytes
    count = REPLAYED_BYTES // size + 1
    for number in range(count):
        broker.worker.send(Part(call.call, 1, (broker.output(large(number)),), None, number == count - 1))
    while not isinstance(message := broker.worker.next()[0], Done):
        if isinstance(message, Return):
            broker.take(message)
    assert_failed(message.rows[0], "MODEL_FAILED", f"the {count * size} bytes of these responses are more than")


@pytest.mark.parametrize("cancel", [True, False])
def test_unread_responses_are_cancelled_and_returned(broker: Broker, cancel: bool) -> None:
    call = broker.call("few_parts", cancel=cancel)
    outputs = [broker.output(large(number)) for number in range(3)]
    for tensor in outputs:
        broker.worker.send(Part(call.call, 1, (tensor,)))
    rows: list[Row] = []
    cancelled = False
    while not (rows and cancelled):
        message, _ = broker.worker.next()
        if isinstance(message, Done):
            rows += message.rows
        elif isinstance(message, Return):
            broker.take(message)
        else:
            assert message == Cancel(call.call)
            cancelled = True
    assert rows[0].outputs[0].data == outputs[0].data
    broker.worker.send(Part(call.call, 1, (broker.output(large(9)),)), Fail(call.call, "CANCELLED", "it was cancelled"))


@pytest.mark.parametrize("wish", ["threads", "own_loop", "async"])
def test_concurrent_calls_are_answered_in_any_order(broker: Broker, wish: str) -> None:
    if wish == "async":
        broker.send("", batch="async")
    else:
        broker.send(wish)
    calls = [broker.call() for _ in range(4)]
    assert {call.parent for call in calls} == {broker.requests}
    assert all(call.held for call in calls)
    broker.worker.send(Withdraw((99,)))
    assert broker.worker.expect(Withdrawn).requests == ()
    for call in reversed(calls):
        broker.reply(call, small(broker.inputs(call)[0].item() * 10))
    assert floats(broker.row()) == [0, 10, 20, 30]


def test_a_thread_can_call_models_between_requests(broker: Broker) -> None:
    broker.send("background")
    broker.row()
    broker.send("released_now")
    messages = [broker.worker.next()[0] for _ in range(2)]
    (call,) = [message for message in messages if isinstance(message, Call)]
    assert any(isinstance(message, Done) for message in messages)
    assert call.parent in (0, broker.requests)  # its request may not have been answered yet
    output = broker.output(large())
    broker.reply(call, output)
    broker.send("heard_later")
    assert broker.row().outputs[0].data == output.data


def test_a_forked_child_cannot_use_the_link(broker: Broker) -> None:
    """The broker would treat a child's messages as the worker's."""
    call = broker.call("forked")
    broker.reply(call, small(5))
    assert floats(broker.row()) == [5]


def test_a_model_queries_loads_and_unloads_other_models(broker: Broker) -> None:
    broker.send("control")
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
    broker.row()


def test_a_failed_query_raises_in_the_model(broker: Broker) -> None:
    broker.send("refused")
    ask = broker.worker.expect(Ask)
    broker.worker.send(Fail(ask.request, "NOT_FOUND", "there is none"))
    assert "there is none" in broker.failure().text


@pytest.mark.parametrize(("wish", "text"), [("unsayable", "model"), ("came", "this request was sent to the model")])
def test_invalid_calls_raise_in_the_model(broker: Broker, wish: str, text: str) -> None:
    broker.send(wish)
    error = broker.failure()
    assert "TritonModelException" in error.text
    assert text in error.text


def test_a_model_can_query_the_server_while_it_loads(tmp_path: Path) -> None:
    """Orders that arrive in the meantime wait."""
    python_model(tmp_path, LOADING)
    with WorkerProcess(replace(CONFIG, name="early"), tmp_path) as process:
        ask = process.expect(Ask)
        process.send(Ping(5), Answer(ask.request, b'{"ready": false}'))
        ask = process.expect(Ask)
        assert (ask.what, ask.model) == ("load", "other")
        process.send(Answer(ask.request, b"{}"))
        process.loaded()
        assert process.expect(Pong).number == 5


@pytest.fixture
def ending(tmp_path: Path) -> Iterator[Broker]:
    """A broker with a worker that the test ends."""
    python_model(tmp_path, CALLER)
    with running(CONFIG, tmp_path) as process:
        yield Broker(process)


@pytest.mark.parametrize("wish", ["computed", "threads", "own_loop"])
def test_the_worker_exits_if_the_link_is_lost_during_a_call(ending: Broker, wish: str) -> None:
    ending.call(wish)
    ending.worker.sock.close()
    assert ending.worker.process.wait(PATIENCE_S) == Exit.LINK_LOST


def test_the_worker_can_be_stopped_during_a_call_of_a_thread(ending: Broker) -> None:
    for wish in ("background", "released_now"):
        ending.send(wish)
    while not isinstance(ending.worker.next()[0], Call):
        pass
    ending.worker.send(Stop())
    assert ending.worker.ended() == Exit.STOPPED
