"""Decoupled models in a worker: responses from execute, threads and coroutines, backpressure, cancellation, the end."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from shmserve.protocol.messages import More, Ping, Pong
from shmserve.protocol.worker_messages import Done, Execute, Row, Started, Stop, Streamed, Withdraw, Withdrawn
from shmserve.repo.config.schema import ModelParameter
from tests.support.cases import cases
from tests.support.patience import PATIENCE_S
from tests.support.workers.models.stream_models import (
    SOURCES,
    asks,
    decoupled,
    done,
    gate_in,
    last,
    open_gate,
    quiet,
    row,
    rows_and_done,
    senders,
    serving,
    values,
    withdraw,
)
from tests.support.workers.worker_harness import WorkerProcess, assert_failed, running

pytestmark = pytest.mark.process

LARGE = 1000
"""Elements of responses of which a thousand do not fit into the queue of their request."""


@pytest.fixture(scope="module")
def sending(sender: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    with serving(tmp_path_factory.mktemp("model"), SOURCES[sender]) as worker:
        yield worker


@pytest.fixture
def worker(sending: WorkerProcess) -> Iterator[WorkerProcess]:
    """A worker with the decoupled model that the mark `senders` names. A test must end its requests and read all
    reports."""
    yield sending
    quiet(sending)


FAULTY = """\
AGAIN = pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE


def failed(text):
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(text, 3))


def numbers(dtype):
    return pb_utils.InferenceResponse([pb_utils.Tensor("y", np.zeros((1, 1), dtype))])


class TritonPythonModel:
    def execute(self, requests):
        def wrong(what):
            sender = requests[0].get_response_sender()
            sender.send(what)
            sender.send(response(1))  # ignored: the stream has ended
            sender.send(flags=FINAL)

        given = {"self": self, "requests": requests, "sender": requests[0].get_response_sender, "wrong": wrong}
        scope = globals() | given
        exec(wishes(requests[0])["do"], scope)
        return scope.get("returned")
"""
"""The first request has the statements that are run. They may set what `execute` returns."""


@pytest.fixture(scope="module")
def faulty_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    with serving(tmp_path_factory.mktemp("faulty"), FAULTY) as running:
        yield running


@pytest.fixture
def faulty(faulty_worker: WorkerProcess) -> Iterator[WorkerProcess]:
    yield faulty_worker
    quiet(faulty_worker)


@cases(
    ("requests[0].set_release_flags(AGAIN)", "INVALID_ARG", "while the model is not configured to handle such a flag"),
    ("wrong(failed('said no'))", "INVALID_ARG", "said no"),
    (r"wrong(failed('said \udcff'))", "INVALID_ARG", "said ?"),
    ("wrong(numbers(complex))", "MODEL_FAILED", "wrong data type: expected FP32, found complex128"),
    ("wrong('y')", "MODEL_FAILED", "Expected an 'InferenceResponse' object in the execute function return list"),
)
def test_an_invalid_response_ends_its_stream(do: str, code: str, text: str, faulty: WorkerProcess) -> None:
    faulty.execute(asks(1, 0, do=f"sender().send(response(0)); {do}"))
    values(faulty, 1, 1)
    last(faulty, 1, code, text)
    done(faulty)


MISUSE = """\
def attempt(*given, call=sender().send):
    try:
        call(*given)
    except pb_utils.TritonModelException as error:
        print(error, flush=True)

attempt()
attempt(response(0), 5)
attempt(call=pb_utils.InferenceResponseSender)
sender().send(response(0), FINAL)
attempt(response(1))
del attempt
"""


def test_misuse_of_a_sender_raises_in_the_model(faulty: WorkerProcess) -> None:
    faulty.execute(asks(1, 0, do=MISUSE))
    found = row(faulty)
    assert (found.more, found.outputs[0].data) == (False, np.float32(0).tobytes())
    done(faulty)
    for text in (
        "Inference Response object must be provided when the response flags is set to zero.",
        "Unable to send response. Unsupported flag value. It is 5, and neither 0 nor ",
        "a response sender comes from InferenceRequest.get_response_sender()",
        "Unable to send response. Response sender has been closed.",
    ):
        assert text in faulty.said()


@cases(
    ("raise ValueError('told to')", "ValueError: told to"),
    ("returned = [response(1)]", "is using the decoupled mode and the execute function must return None."),
)
def test_a_failed_batch_fails_the_streams_that_are_open(end: str, text: str, faulty: WorkerProcess) -> None:
    do = "self.kept, second = requests[2].get_response_sender(), requests[1].get_response_sender()\n"
    do += f"sender().send(response(7), FINAL); second.send(response(0)); {end}"
    faulty.execute(asks(1, 0, do=do), asks(2, 0), asks(3, 0))
    assert (row(faulty).request, row(faulty).request) == (1, 2)
    rows = faulty.expect(Done).rows
    assert [one.request for one in rows] == [2, 3]
    for one in rows:
        assert_failed(one, "MODEL_FAILED", text)


def test_a_sender_dropped_without_a_last_response_fails_its_request(faulty: WorkerProcess, tmp_path: Path) -> None:
    gate = gate_in(tmp_path)
    text = "the model dropped the request without a last response"
    faulty.execute(asks(1, 0, do="pass"))
    last(faulty, 1, "MODEL_FAILED", text)
    done(faulty)
    later = "threading.Thread(target=lambda sent, request: (gate(request), sent.send(response(0))),"
    faulty.execute(asks(2, 0, do=f"{later} args=(sender(), requests[0])).start()", gate=gate))
    done(faulty)
    open_gate(gate)
    values(faulty, 2, 1)
    last(faulty, 2, "MODEL_FAILED", text)


WAITING = """\
gate(requests[0])
while not requests[0].is_cancelled():
    pass
assert sender().is_cancelled()
sender().send(response(1))
sender().send(response(2), FINAL)
"""


def test_a_model_in_execute_sees_that_its_request_is_cancelled(faulty: WorkerProcess, tmp_path: Path) -> None:
    gate = gate_in(tmp_path)
    faulty.execute(asks(1, 1, do=WAITING, gate=gate))
    faulty.send(Ping(1))
    open_gate(gate)
    assert faulty.expect(Pong).number == 1  # is_cancelled() reads the orders
    withdraw(faulty, 1)
    done(faulty)


@senders("execute", "threads")
def test_responses_without_room_are_queued_and_the_batch_ends(worker: WorkerProcess) -> None:
    worker.execute(asks(1, 6, window=2))
    rows_and_done(worker, 2)
    quiet(worker)
    worker.send(More(1, 1))
    values(worker, 1, 1, first=2)
    quiet(worker)
    worker.send(More(1, 2), More(1, 1))
    values(worker, 1, 3, first=3)
    last(worker, 1)  # without outputs it needs no window
    worker.send(More(1, 5), More(99, 1))  # for a stream that has ended and for an unknown one: ignored
    quiet(worker)


def test_a_thread_can_send_for_many_requests_without_blocking(tmp_path: Path) -> None:
    source = """\
class TritonPythonModel:
    def execute(self, requests):
        for index in range(3):
            for request in requests:
                request.get_response_sender().send(response(index))
        for request in requests:
            request.get_response_sender().send(pb_utils.InferenceResponse([]), FINAL)
"""
    given = replace(decoupled(tmp_path, source), parameters={"send_waits": ModelParameter(string_value="false")})
    with running(given, tmp_path) as worker:
        worker.execute(asks(1, 0, window=1), asks(2, 0, window=9))
        assert [row(worker).request for _ in range(2)] == [1, 2]
        values(worker, 2, 2, first=1)
        last(worker, 2)
        done(worker)
        worker.send(More(1, 1))
        values(worker, 1, 1, first=1)
        worker.send(More(1, 1))
        values(worker, 1, 1, first=2)
        last(worker, 1)
        worker.execute(asks(3, 0, window=1))
        values(worker, 3, 1)
        done(worker)
        withdraw(worker, 3)


@pytest.mark.parametrize("sender", ["threads", "coroutine", "generator"])
def test_a_stop_ends_open_streams(tmp_path: Path, sender: str) -> None:
    with serving(tmp_path, SOURCES[sender]) as worker:
        worker.execute(asks(1, 1000, window=1), asks(2, 1000, window=2))
        rows_and_done(worker, 3)
        worker.send(Stop())
        for number in (1, 2):
            last(worker, number, "UNAVAILABLE", "the model is being unloaded")
        assert worker.ended() == 0
        if sender == "threads":
            assert "finalized" in worker.said()


@pytest.mark.parametrize("sender", ["execute", "threads", "generator"])
def test_the_worker_ends_when_the_link_is_lost_with_responses_waiting(tmp_path: Path, sender: str) -> None:
    with serving(tmp_path, SOURCES[sender]) as worker:
        worker.execute(asks(1, 1000, window=1))
        while not isinstance(worker.next()[0], Streamed):
            pass
        worker.sock.close()
        assert worker.process.wait(PATIENCE_S) != 0


@senders("coroutine", "generator")
def test_an_exception_of_a_coroutine_ends_its_stream(worker: WorkerProcess) -> None:
    worker.execute(asks(1, 1, **{"raise": 1}))
    rows = rows_and_done(worker, 2)
    assert [one.more for one in rows] == [True, False]
    assert assert_failed(rows[1], "MODEL_FAILED").text.endswith("message: ValueError: told to")
    assert "ValueError: told to" in worker.said()


def test_responses_of_a_coroutine_that_does_not_await_are_queued_up_to_a_limit(tmp_path: Path) -> None:
    """They keep the values that they had when they were sent."""
    source = """\
class TritonPythonModel:
    async def execute(self, requests):
        (request,) = requests
        sender = request.get_response_sender()
        value = np.zeros((1, 1), np.float32)
        for index in range(count_of(request)):
            value[:] = index
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", value)]))
        sender.send(flags=FINAL)
        print("sent", flush=True)
"""
    with serving(tmp_path, source) as worker:
        worker.execute(asks(1, 5, window=1))
        rows_and_done(worker, 1)
        worker.send(More(1, 2))
        values(worker, 1, 2, first=1)
        worker.send(More(1, 2))
        values(worker, 1, 2, first=3)
        last(worker, 1)
        worker.execute(asks(2, 2000, window=1))
        (failed,) = [found for found in rows_and_done(worker, 2) if not found.more]
        text = "1024 answers wait for a caller that does not read; the model should await what send() returns"
        assert assert_failed(failed, "UNAVAILABLE").text == text
        quiet(worker)


@senders("execute", "threads")
def test_a_sender_waiting_for_its_window_is_cancelled(worker: WorkerProcess, sender: str) -> None:
    worker.execute(asks(1, 1000, window=1, size=LARGE))
    if sender == "threads":
        rows_and_done(worker, 1)
        withdraw(worker, 1)
        return
    assert row(worker).more
    worker.execute(asks(2, 1), open=True)
    worker.send(Withdraw((1, 2)))
    assert worker.expect(Withdrawn).requests == (2,)
    last(worker, 1, "CANCELLED", "cancelled while the model answered it")
    done(worker)
    assert worker.unread.count(1) == 1


@senders()
@pytest.mark.parametrize("recalled", [False, True])
def test_a_request_withdrawn_just_before_it_runs_is_cancelled_unless_it_is_recalled(
    worker: WorkerProcess, recalled: bool
) -> None:
    """The broker considers the request running; it runs, and its responses are dropped."""
    worker.number += 1
    request = asks(1, 0) if recalled else asks(1, 1000, window=1, size=LARGE)
    worker.send(Execute(worker.number, 0, (request,)), Withdraw((1,), recalled))
    messages = [worker.next()[0] for _ in range(3)]
    assert sum(isinstance(message, Done) for message in messages) == 1
    assert [message.requests for message in messages if isinstance(message, Withdrawn)] == [()]
    (row,) = [row for message in messages if not isinstance(message, Withdrawn) for row in message.rows]
    assert not row.more
    if recalled:
        assert row.error is None
    else:
        assert_failed(row, "CANCELLED")
        worker.execute(asks(2, 0))
        rows_and_done(worker, 1)


def test_a_model_with_one_response_sees_that_a_request_is_cancelled(tmp_path: Path) -> None:
    source = """\
class TritonPythonModel:
    def execute(self, requests):
        gate(requests[0])
        if wishes(requests[0]).get("thread"):
            thread = threading.Thread(target=self.wait, args=(requests,))
            thread.start()
            thread.join()
        else:
            self.wait(requests)
        return [response(request.is_cancelled()) for request in requests]

    def wait(self, requests):
        while not requests[1].is_cancelled():
            pass
"""
    gate = gate_in(tmp_path)
    ordinary = replace(decoupled(tmp_path, source), model_transaction_policy=None)
    with running(ordinary, tmp_path) as worker:
        for first, thread in ((1, False), (4, True)):
            worker.execute(*[asks(first + index, 0, gate=gate, thread=thread) for index in range(3)])
            open_gate(gate)
            worker.send(Withdraw((first + 1,)))
            assert worker.expect(Withdrawn).requests == ()
            rows, _ = worker.done()
            assert [np.frombuffer(found.outputs[0].data, np.float32)[0] for found in rows] == [0, 1, 0]  # type: ignore[arg-type]


STREAMS = 150


class Storm:
    """Streams with random windows and withdrawals, and a model of the broker: at most one batch runs at the worker and
    one waits."""

    def __init__(self, worker: WorkerProcess, seed: int) -> None:
        self.worker = worker
        self.random = random.Random(seed)
        self.room: dict[int, int] = {}
        self.seen: dict[int, int] = {}
        self.counts: dict[int, int] = {}
        self.open: set[int] = set()
        self.withdrawn: set[int] = set()
        first = 1000 * (seed + 1)  # numbers are not used again: the worker may remember one that was withdrawn too late
        self.to_start = deque(range(first, first + STREAMS))
        self.batches: dict[int, set[int]] = {}
        self.pings = 0

    def start(self) -> None:
        work_items = []
        for _ in range(min(len(self.to_start), self.random.randint(1, 8))):
            request = self.to_start.popleft()
            self.counts[request] = self.random.choice([0, 1, 5, 20])
            self.room[request] = self.random.choice([1, 2, 7])
            self.seen[request] = 0
            self.open.add(request)
            work_items.append(asks(request, self.counts[request], self.room[request]))
        number = self.worker.execute(*work_items, open=bool(self.batches))
        self.batches[number] = {work.request for work in work_items}

    def change(self) -> None:
        """Enlarges the window of a random stream, or withdraws its request."""
        request = self.random.choice(sorted(self.open))
        if self.random.random() < 0.1:
            self.withdrawn.add(request)
            self.worker.send(Withdraw((request,)))
        else:
            count = self.random.randint(1, 3)
            self.room[request] += count
            self.worker.send(More(request, count))

    def read_reports(self) -> None:
        """Processes all reports that the worker has sent by now."""
        self.pings += 1
        self.worker.send(Ping(self.pings))
        while not isinstance(message := self.worker.next()[0], Pong):
            self.take(message)

    def take(self, message: object) -> None:
        if isinstance(message, Withdrawn):
            self.open -= set(message.requests)
            for requests in self.batches.values():
                requests -= set(message.requests)
            self.batches = {number: requests for number, requests in self.batches.items() if requests}
        elif isinstance(message, Done):
            assert message.rows == ()
            del self.batches[message.batch]
        elif not isinstance(message, Started):
            assert isinstance(message, Streamed), message
            for row in message.rows:
                self.check(row.request, row)

    def check(self, request: int, row: Row) -> None:
        assert request in self.open, "a row after the end of its stream"
        if row.outputs:
            self.room[request] -= 1
            assert self.room[request] >= 0
            value = value_of(row)
            assert value == self.seen[request]
            self.seen[request] += 1
        if not row.more:
            self.open.discard(request)
            if row.error is not None:
                assert request in self.withdrawn, row.error
                assert row.error.code == "CANCELLED"
            else:
                assert self.seen[request] == self.counts[request]


def value_of(row: Row) -> float:
    data = row.outputs[0].data
    assert isinstance(data, bytes)
    return float(np.frombuffer(data, np.float32)[0])


@pytest.mark.parametrize("seed", range(2))
@senders()
def test_random_streams_get_their_responses_in_order_and_end_once(worker: WorkerProcess, seed: int) -> None:
    storm = Storm(worker, seed)
    for _ in range(5000):
        if not (storm.to_start or storm.open or storm.batches):
            break
        if storm.to_start and len(storm.batches) < 2:
            storm.start()
        for _ in range(storm.random.randint(1, 8)):
            if storm.open:
                storm.change()
        storm.read_reports()
    left = (storm.to_start, storm.open, storm.batches)
    assert not any(left), (*left, storm.room, worker.said())
