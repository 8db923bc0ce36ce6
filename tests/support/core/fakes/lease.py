"""A lease from the view of both ends and of the broker: a socket pair, and the log that the worker writes."""

from __future__ import annotations

from shmserve.core.events import LeaseRead
from shmserve.protocol.messages import Fail, Infer, Reply
from shmserve.protocol.worker_messages import LeasedBatch, Row

RECORDS = 8
"""Capacity of the log of a fake worker: small, so that it is full now and then."""


class FakeLease:
    def __init__(self, number: int, model: str, now: int) -> None:
        self.number, self.model, self.opened = number, model, now
        self.requests: list[Infer] = []
        """Sent by the client, not yet read by the worker."""
        self.answers: list[Reply | Fail] = []
        """Sent by the worker, not yet read by the client."""
        self.client_open = self.worker_open = True
        # The log
        self.records: list[LeasedBatch] = []
        """Written, not yet read by the broker."""
        self.running: Infer | None = None
        self.since = self.last = 0

    # ------------------------------------------------------------------------------------ the client

    def send(self, request: Infer) -> None:
        if self.worker_open:
            self.requests.append(request)

    def take_answers(self) -> list[Reply | Fail]:
        answers, self.answers = self.answers, []
        return answers

    # ------------------------------------------------------------------------------------ the worker

    def begin(self, now: int) -> None:
        assert self.running is None
        self.running, self.since = self.requests.pop(0), now

    def record(self, row: Row, rows: int, taken: int, now: int) -> None:
        """The running request is done; its answer follows."""
        assert self.running is not None
        self.records.append((self.since, taken, taken, now, now, rows, int(row.error is not None), 1))

    def answer(self, row: Row) -> None:
        request, self.running = self.running, None
        assert request is not None
        if not self.client_open:
            return
        if row.error is not None:
            self.answers.append(Fail(request.request, row.error.code, row.error.text))
        else:
            self.answers.append(Reply(request.request, 1, row.outputs))

    # ------------------------------------------------------------------------------------ the broker

    def read(self, final: bool) -> LeaseRead:
        records, self.records = self.records, []
        running = self.running.request if self.running is not None else 0
        return LeaseRead(self.number, records, running, max(self.last, running), self.since if running else 0, final)
