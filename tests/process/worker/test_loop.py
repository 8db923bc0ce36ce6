"""Batches at a real worker: which requests join, wait or are withdrawn, and the order of the reports.

A model waits at a gate, a named pipe that the test opens, so the test controls what happens during a batch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shmserve.protocol.messages import Options, Ping, Pong, Tensor
from shmserve.protocol.worker_messages import Done, Execute, Started, Stop, Withdraw, Withdrawn, Work
from tests.support.workers.models.worker_models import python_model
from tests.support.workers.worker_harness import WorkerProcess, config, work

pytestmark = pytest.mark.process

GATED = """\
import json

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            gate = json.loads(request.parameters()).get("gate")
            if gate:
                open(gate).read()
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", request.inputs()[0].as_numpy())])
                for request in requests]
"""


class Gated:
    """A worker whose batches with a gated request wait at the gate."""

    def __init__(self, worker: WorkerProcess, gate: Path) -> None:
        self.worker = worker
        self.gate = gate

    def request(self, number: int, *, gated: bool = False) -> Work:
        x = Tensor("x", "FP32", (1, 1), np.float32(number).tobytes())
        return work(number, x, options=Options(parameters={"gate": str(self.gate)}) if gated else None)

    def wait(self) -> int:
        """Returns, once the worker waits at the gate, a descriptor; closing the descriptor opens the gate."""
        return os.open(self.gate, os.O_WRONLY)


@pytest.fixture
def gated(tmp_path: Path) -> Iterator[Gated]:
    python_model(tmp_path, GATED)
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    x, y = {"x": ("FP32", (1,))}, {"y": ("FP32", (1,))}
    with WorkerProcess(config("python", x, y, max_batch=64), tmp_path) as worker:
        worker.loaded()
        yield Gated(worker, gate)


def requests(done: Done) -> list[int]:
    for row in done.rows:
        assert row.error is None
        assert row.outputs[0].data == np.float32(row.request).tobytes()
    return [row.request for row in done.rows]


def test_requests_join_and_leave_a_waiting_batch_until_it_starts(gated: Gated) -> None:
    worker = gated.worker
    first = worker.execute(gated.request(1, gated=True))
    gate = gated.wait()
    second = worker.execute(gated.request(2), gated.request(3), open=True)
    third = worker.execute(gated.request(4), join=second, open=True)
    worker.send(Withdraw((3, 1, 99)), Ping(5))
    os.close(gate)
    # Reported before the next batch runs, in one packet, in this order.
    assert worker.expect(Withdrawn).requests == (3,)
    assert worker.expect(Pong).number == 5
    done = worker.expect(Done)
    assert (done.batch, done.next, done.through) == (first, second, third)
    assert requests(done) == [1]
    done = worker.expect(Done)
    assert (done.batch, done.next, done.through) == (second, 0, 0)
    assert requests(done) == [2, 4]


def test_the_end_of_one_batch_and_the_start_of_the_next_are_one_packet(gated: Gated) -> None:
    worker = gated.worker
    worker.execute(gated.request(1, gated=True))
    gate = gated.wait()
    second = worker.execute(gated.request(2, gated=True), open=True)
    worker.send(Withdraw((7,)))
    os.close(gate)
    packet = worker.codec.decode(worker.sock.recv(1 << 18))
    assert [type(message) for message in packet] == [Withdrawn, Done]
    assert packet[1].next == second
    os.close(gated.wait())
    done = worker.expect(Done)
    assert requests(done) == [2]


def test_a_join_after_the_start_begins_a_new_batch(gated: Gated) -> None:
    worker = gated.worker
    first = worker.execute(gated.request(1, gated=True))
    gate = gated.wait()
    late = worker.execute(gated.request(2), join=first, open=True)
    later = worker.execute(gated.request(3), join=first, open=True)
    os.close(gate)
    done = worker.expect(Done)
    assert (done.batch, done.next, done.through) == (first, late, later)
    done = worker.expect(Done)
    assert (done.batch, requests(done)) == (late, [2, 3])


def test_an_open_batch_is_reported_when_it_starts(gated: Gated) -> None:
    worker = gated.worker
    number = worker.execute(gated.request(1, gated=True), open=True)
    gate = gated.wait()
    # It was reported before it ran.
    started = worker.expect(Started)
    assert (started.batch, started.through) == (number, number)
    os.close(gate)
    assert requests(worker.expect(Done)) == [1]
    number = worker.execute(gated.request(2))
    done = worker.expect(Done)
    assert (done.batch, done.next) == (number, 0)


def test_a_batch_waits_for_its_announced_requests(gated: Gated) -> None:
    worker = gated.worker
    first = worker.execute(gated.request(1), more=True)
    worker.send(Ping(1))
    assert worker.expect(Pong).number == 1
    worker.execute(gated.request(2), join=first, more=True)
    worker.send(Ping(2))
    assert worker.expect(Pong).number == 2
    worker.execute(gated.request(3), join=first)
    done = worker.expect(Done)
    assert (done.batch, requests(done)) == (first, [1, 2, 3])


def test_execute_withdraw_and_stop_in_one_packet(gated: Gated) -> None:
    worker = gated.worker
    executes = [Execute(number, 0, (gated.request(number),), False, number == 3) for number in range(1, 6)]
    worker.send(*executes, Withdraw((3,)), Stop())
    assert worker.expect(Withdrawn).requests == (3,)
    found = [worker.expect(Done) for _ in range(4)]
    assert [requests(done) for done in found] == [[1], [2], [4], [5]]
    assert [done.next for done in found] == [2, 4, 5, 0]
    assert worker.ended() == 0


def test_a_batch_whose_requests_are_all_withdrawn_can_be_joined(gated: Gated) -> None:
    worker = gated.worker
    worker.execute(gated.request(1, gated=True))
    gate = gated.wait()
    second = worker.execute(gated.request(2), open=True)
    worker.send(Withdraw((2,)))
    os.close(gate)
    assert worker.expect(Withdrawn).requests == (2,)
    assert worker.expect(Done).next == 0
    third = worker.execute(gated.request(3), join=second, open=True)
    started = worker.expect(Started)
    assert (started.batch, started.through) == (second, third)
    assert requests(worker.expect(Done)) == [3]


def test_stop_finishes_all_queued_batches(gated: Gated) -> None:
    worker = gated.worker
    worker.execute(gated.request(1, gated=True))
    gate = gated.wait()
    worker.execute(gated.request(2))
    worker.execute(gated.request(3), more=True)
    worker.send(Stop())
    os.close(gate)
    assert [requests(worker.expect(Done)) for _ in range(3)] == [[1], [2], [3]]
    assert worker.ended() == 0


def test_many_small_outputs_of_one_request_fit_into_a_packet(tmp_path: Path) -> None:
    """Each output may be in the message, but not all of them together: the rest is placed in shared memory."""
    count = 100
    x = {f"x{number}": ("FP32", (-1,)) for number in range(count)}
    y = {f"y{number}": ("FP32", (-1,)) for number in range(count)}
    values = np.arange(1000, dtype=np.float32)[None]
    with WorkerProcess(config("identity", x, y, max_batch=4), tmp_path) as worker:
        worker.loaded()
        tensors = [worker.tensor(f"x{number}", values, shared=True) for number in range(count)]
        for together in (1, 2):
            rows = worker.run(*[work(number, *tensors) for number in range(together)])
            for row in rows:
                assert row.error is None
                inline = sum(len(tensor.data) for tensor in row.outputs if isinstance(tensor.data, bytes))
                assert 0 < inline <= 64 * 1024
                assert len(row.outputs) == count
                for tensor in row.outputs:
                    assert (worker.array(tensor, np.float32) == values).all()
        worker.mapped.close()
