"""Decoupled models in a worker: responses from coroutines, and requests that are cancelled while they run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from shmserve.protocol.messages import More
from shmserve.protocol.worker_messages import Done, Execute, Row, Withdraw, Withdrawn
from tests.support.workers.models.stream_models import (
    asks,
    decoupled,
    done,
    gate_in,
    last,
    open_gate,
    quiet,
    rows_and_done,
    senders,
    serving,
    values,
    withdraw,
)
from tests.support.workers.worker_harness import WorkerProcess, assert_failed, running

pytestmark = pytest.mark.process


# ---------------------------------------------------------------------------------------------- coroutines


@senders("coroutine", "generator")
def test_coroutines_of_a_batch_wait_for_their_windows_independently(worker: WorkerProcess) -> None:
    worker.execute(asks(1, 4, window=1), asks(2, 2, window=5), asks(3, 0))
    seen: dict[int, list[Row]] = {1: [], 2: [], 3: []}
    for found in rows_and_done(worker, 5):
        seen[found.request].append(found)
    assert [len(rows) for rows in seen.values()] == [1, 3, 1]
    assert [found.more for found in seen[2]] == [True, True, False]
    quiet(worker)
    worker.send(More(1, 2))
    values(worker, 1, 2, first=1)
    worker.send(More(1, 1))
    values(worker, 1, 1, first=3)
    last(worker, 1)


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


# ---------------------------------------------------------------------------------------------- cancellation


@senders("execute", "threads")
def test_a_sender_waiting_for_its_window_is_cancelled(worker: WorkerProcess, sender: str) -> None:
    worker.execute(asks(1, 1000, window=1))
    if sender == "threads":
        rows_and_done(worker, 1)
        withdraw(worker, 1)
        return
    values(worker, 1, 1)
    worker.execute(asks(2, 1), open=True)
    worker.send(Withdraw((1, 2)))
    assert worker.expect(Withdrawn).requests == (2,)
    last(worker, 1, "CANCELLED", "cancelled while the model answered it")
    done(worker)


@senders()
def test_a_request_withdrawn_just_before_it_runs_is_cancelled(worker: WorkerProcess) -> None:
    """The broker considers the request running; it runs, and its responses are dropped."""
    worker.number += 1
    worker.send(Execute(worker.number, 0, (asks(1, 1000, window=1),)), Withdraw((1,)))
    messages = [worker.next()[0] for _ in range(3)]
    assert sum(isinstance(message, Done) for message in messages) == 1
    assert sum(isinstance(message, Withdrawn) for message in messages) == 1
    (row,) = [row for message in messages if not isinstance(message, Withdrawn) for row in message.rows]
    assert_failed(row, "CANCELLED")
    assert not row.more
    worker.execute(asks(2, 0))
    rows_and_done(worker, 1)


@senders("generator")
def test_generators_of_several_batches_are_closed_one_by_one(worker: WorkerProcess) -> None:
    for number, name in ((1, "one"), (2, "two")):
        worker.execute(asks(number, 1000, window=1, name=name))
        rows_and_done(worker, 1)
    withdraw(worker, 1)
    worker.send(More(2, 1))
    values(worker, 2, 1, first=1)
    withdraw(worker, 2)
    assert "closed one True" in worker.said()


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
