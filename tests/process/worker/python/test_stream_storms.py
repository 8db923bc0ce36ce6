"""Many streams at one worker, with random windows and withdrawals: each gets its responses in order and ends once."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest

from shmserve.protocol.messages import More, Ping, Pong
from shmserve.protocol.worker_messages import Done, Row, Started, Streamed, Withdraw, Withdrawn
from tests.support.workers.models.stream_models import asks, senders
from tests.support.workers.worker_harness import WorkerProcess

pytestmark = pytest.mark.process

STREAMS = 150


class Storm:
    """A model of the broker: at most one batch runs at the worker and one waits."""

    def __init__(self, worker: WorkerProcess, seed: int) -> None:
        self.worker = worker
        self.random = random.Random(seed)
        self.room: dict[int, int] = {}
        self.seen: dict[int, int] = {}
        self.counts: dict[int, int] = {}
        self.open: set[int] = set()
        self.withdrawn: set[int] = set()
        self.to_start = deque(range(1, STREAMS + 1))
        self.batches: dict[int, set[int]] = {}
        self.pings = 0

    def start(self) -> None:
        works = []
        for _ in range(min(len(self.to_start), self.random.randint(1, 8))):
            request = self.to_start.popleft()
            self.counts[request] = self.random.choice([0, 1, 5, 20])
            self.room[request] = self.random.choice([1, 2, 7])
            self.seen[request] = 0
            self.open.add(request)
            works.append(asks(request, self.counts[request], self.room[request]))
        number = self.worker.execute(*works, open=bool(self.batches))
        self.batches[number] = {work.request for work in works}

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
                assert request in self.withdrawn
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
