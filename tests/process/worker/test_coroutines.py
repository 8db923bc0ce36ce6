"""Decoupled models at a real worker: answers from coroutines, and requests that are cancelled while they run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from shmserve.protocol.messages import Done, Execute, More, Ping, Pong, Row, Streamed, Withdraw, Withdrawn
from tests.support.workers.stream_models import (
    COROUTINE,
    GENERATOR,
    IN_EXECUTE,
    IN_THREADS,
    asks,
    decoupled,
    done,
    gate_in,
    last,
    open_gate,
    quiet,
    serving,
    values,
)
from tests.support.workers.worker_harness import WorkerProcess

pytestmark = pytest.mark.process


# ---------------------------------------------------------------------------------------------- coroutines


@pytest.mark.parametrize("source", [COROUTINE, GENERATOR], ids=["execute", "generator"])
def test_coroutines_wait_for_room_beside_each_other(tmp_path: Path, source: str) -> None:
    with serving(tmp_path, source) as worker:
        worker.execute(asks(1, 4, window=1), asks(2, 2, window=5), asks(3, 0))
        seen: dict[int, list[Row]] = {1: [], 2: [], 3: []}
        ended = False
        while not (ended and [len(rows) for rows in seen.values()] == [1, 3, 1]):
            message, _ = worker.next()
            if isinstance(message, Done):
                ended = True
            else:
                seen[message.rows[0].request].append(message.rows[0])
        assert [found.more for found in seen[2]] == [True, True, False]
        quiet(worker)
        worker.send(More(1, 2))
        values(worker, 1, 2, first=1)
        worker.send(More(1, 1))
        values(worker, 1, 1, first=3)
        last(worker, 1)


@pytest.mark.parametrize("source", [COROUTINE, GENERATOR], ids=["execute", "generator"])
def test_coroutines_that_fail(tmp_path: Path, source: str) -> None:
    with serving(tmp_path, source) as worker:
        worker.execute(asks(1, 1, **{"raise": 1}))
        found = [worker.next()[0] for _ in range(3)]
        rows = [message.rows[0] for message in found if isinstance(message, Streamed)]
        assert [one.more for one in rows] == [True, False]
        assert rows[1].error is not None
        assert rows[1].error.text.endswith("message: ValueError: told to")
        quiet(worker)
        assert "ValueError: told to" in worker.said()


def test_a_coroutine_that_does_not_wait(tmp_path: Path) -> None:
    """Its answers are kept as they were when they were sent, up to a limit."""
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
        found = [worker.next()[0] for _ in range(2)]
        assert {type(message) for message in found} == {Done, Streamed}
        worker.send(More(1, 2))
        values(worker, 1, 2, first=1)
        worker.send(More(1, 2))
        values(worker, 1, 2, first=3)
        last(worker, 1)
        worker.execute(asks(2, 2000, window=1))
        found = [worker.next()[0] for _ in range(3)]
        (failed,) = [message.rows[0] for message in found if isinstance(message, Streamed) and not message.rows[0].more]
        assert failed.error is not None
        assert (failed.error.code, failed.error.text) == (
            "UNAVAILABLE",
            "1024 answers wait for a caller that does not read; the model should await what send() returns",
        )
        quiet(worker)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("class TritonPythonModel:\n    pass\n", "has no execute method"),
        (GENERATOR, "has a stream method and no execute: such a model needs model_transaction_policy"),
    ],
)
def test_what_is_not_loaded(tmp_path: Path, source: str, text: str) -> None:
    given = replace(decoupled(tmp_path, source), model_transaction_policy=None)
    with WorkerProcess(given, tmp_path) as worker:
        assert text in worker.failed().text
        assert worker.ended() != 0


# ---------------------------------------------------------------------------------------------- cancellation


@pytest.mark.parametrize("source", [IN_EXECUTE, IN_THREADS], ids=["execute", "threads"])
def test_who_waits_for_room_is_cancelled(tmp_path: Path, source: str) -> None:
    with serving(tmp_path, source) as worker:
        worker.execute(asks(1, 1000, window=1))
        found = [worker.next()[0] for _ in range(1 + (source is IN_THREADS))]
        assert any(isinstance(message, Streamed) for message in found)
        waiting = worker.execute(asks(2, 1), open=True) if source is IN_EXECUTE else 0
        worker.send(Withdraw((1, 2)))
        assert worker.expect(Withdrawn).requests == ((2,) if waiting else ())
        last(worker, 1, "CANCELLED", "cancelled while the model answered it")
        if waiting:
            done(worker)
        quiet(worker)


@pytest.mark.parametrize(
    "source", [IN_EXECUTE, IN_THREADS, COROUTINE, GENERATOR], ids=["execute", "threads", "coroutine", "generator"]
)
def test_what_is_withdrawn_just_before_it_runs(tmp_path: Path, source: str) -> None:
    """The broker takes it for running; it runs, and nobody waits for what it sends."""
    with serving(tmp_path, source) as worker:
        worker.send(Execute(1, 0, (asks(1, 1000, window=1),)), Withdraw((1,)))
        found = [worker.next()[0] for _ in range(3)]
        assert {type(message) for message in found} == {Withdrawn, Done, Streamed}
        (row,) = [message.rows[0] for message in found if isinstance(message, Streamed)]
        assert row.error is not None
        assert (row.more, row.outputs, row.error.code) == (False, (), "CANCELLED")
        worker.number = 1
        worker.execute(asks(2, 0))
        found = [worker.next()[0] for _ in range(2)]
        assert {type(message) for message in found} == {Done, Streamed}


def test_a_model_in_execute_is_told_that_it_is_cancelled(tmp_path: Path) -> None:
    source = """\
class TritonPythonModel:
    def execute(self, requests):
        (request,) = requests
        gate(request)
        while not request.is_cancelled():
            pass
        sender = request.get_response_sender()
        assert sender.is_cancelled()
        sender.send(response(1))
        sender.send(response(2), FINAL)
"""
    gate = gate_in(tmp_path)
    with serving(tmp_path, source) as worker:
        worker.execute(asks(1, 1, gate=gate))
        worker.send(Ping(1))
        open_gate(gate)
        assert worker.expect(Pong).number == 1  # it reads what comes while it asks
        worker.send(Withdraw((1,)))
        assert worker.expect(Withdrawn).requests == ()
        last(worker, 1, "CANCELLED")
        done(worker)


@pytest.mark.parametrize("source", [COROUTINE, GENERATOR], ids=["execute", "generator"])
def test_coroutines_are_cancelled(tmp_path: Path, source: str) -> None:
    with serving(tmp_path, source) as worker:
        worker.execute(asks(1, 1000, window=1, name="one"))
        worker.execute(asks(2, 1000, window=1, name="two"))
        found = [worker.next()[0] for _ in range(4)]
        assert sum(isinstance(message, Streamed) for message in found) == 2
        worker.send(Withdraw((1,)))
        assert worker.expect(Withdrawn).requests == ()
        last(worker, 1, "CANCELLED")
        worker.send(More(2, 1))
        values(worker, 2, 1, first=1)
        worker.send(Withdraw((2,)))
        assert worker.expect(Withdrawn).requests == ()
        last(worker, 2, "CANCELLED")
        if source is GENERATOR:
            assert "closed one True" in worker.said()


def test_part_of_a_batch_of_a_coroutine_is_cancelled(tmp_path: Path) -> None:
    with serving(tmp_path, COROUTINE) as worker:
        worker.execute(asks(1, 3, window=1), asks(2, 3, window=1))
        found = [worker.next()[0] for _ in range(3)]
        assert sum(isinstance(message, Streamed) for message in found) == 2
        worker.send(Withdraw((1,)))
        assert worker.expect(Withdrawn).requests == ()
        last(worker, 1, "CANCELLED")
        worker.send(More(2, 2))
        values(worker, 2, 2, first=1)
        last(worker, 2)


def test_ordinary_models_are_told_too(tmp_path: Path) -> None:
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
    with WorkerProcess(ordinary, tmp_path) as worker:
        worker.loaded()
        for first, thread in ((1, False), (4, True)):
            worker.execute(*[asks(first + index, 0, gate=gate, thread=thread) for index in range(3)])
            open_gate(gate)
            worker.send(Withdraw((first + 1,)))
            assert worker.expect(Withdrawn).requests == ()
            rows, _ = worker.done()
            assert [np.frombuffer(found.outputs[0].data, np.float32)[0] for found in rows] == [0, 1, 0]  # type: ignore[arg-type]
