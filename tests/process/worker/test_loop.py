"""Batches at a real worker: orders that arrive while a model runs, and the order of the reports. The tests of the batch
queue have all cases of joins and withdrawals.

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
from tests.support.workers.worker_harness import WorkerProcess, config, running, work

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


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gated]:
    """A worker that the last test of the file stops."""
    folder = tmp_path_factory.mktemp("model")
    python_model(folder, GATED)
    gate = folder / "gate"
    os.mkfifo(gate)
    x, y = {"x": ("FP32", (1,))}, {"y": ("FP32", (1,))}
    with running(config("python", x, y, max_batch=64), folder) as worker:
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


def test_a_stop_in_one_packet_with_other_orders_finishes_all_batches(gated: Gated) -> None:
    worker = gated.worker
    worker.execute(gated.request(1, gated=True))
    gate = gated.wait()
    first = worker.number + 1
    executes = [Execute(first + index, 0, (gated.request(2 + index),), index == 4, index == 2) for index in range(5)]
    worker.send(*executes, Withdraw((4,)), Stop())
    os.close(gate)
    assert worker.expect(Withdrawn).requests == (4,)
    found = [worker.expect(Done) for _ in range(5)]
    assert [requests(done) for done in found] == [[1], [2], [3], [5], [6]]
    assert [done.next for done in found] == [first, first + 1, first + 3, first + 4, 0]
    assert worker.ended() == 0
