"""A recording of all requests and batches, for a timeline (`shmserve trace`).

Invariant: while `Observers.recording` is None, nothing is recorded and no request costs more. A recording holds at most
`limit` requests that have not been read; further ones are only counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from shmserve.core.records import Batch, CallingWorker, ClientState, Instance, Lease, Request, Version
from shmserve.core.service.form import Reason
from shmserve.core.states import RequestState
from shmserve.protocol.recorded import RecordedBatch, RecordedEnd, RecordedRequest
from shmserve.protocol.worker_messages import LeasedBatch


class Recording:
    """`models`: those to record; empty: all."""

    def __init__(self, models: Iterable[str], limit: int) -> None:
        self._models = frozenset(models)
        self._limit = limit
        self._records: deque[RecordedBatch | RecordedEnd] = deque()
        self._unread = 0
        """Requests in these records."""
        self._clients: dict[int, str] = {}
        """Names of clients in these records."""
        self.left_out = 0
        """Requests in records that were dropped because of the limit."""

    def batch_done(self, version: Version, instance: Instance, batch: Batch, number: int, now: int) -> None:
        """Records a batch. Call before its responses are processed."""
        requests = [request for _, piece in batch.pieces for request in piece if request.batch is batch]
        if requests and self._wants(version, len(requests)):
            recorded = [self._request(request, request.state is not RequestState.SENT) for request in requests]
            about = (version.model, version.number, instance.spec.name, number, batch.reason.value, batch.rows)
            self._add(RecordedBatch(*about, batch.times, now, 0, recorded), len(recorded))

    def leased(self, lease: Lease, batches: Sequence[LeasedBatch], reason: Reason, numbers: Iterable[int]) -> None:
        """Records leased requests. `numbers`: new request numbers for them."""
        version, client = lease.version, lease.client
        for arrived, taken, ready, computed, placed, rows, failed, count in batches:
            if not self._wants(version, count):
                continue
            requests = [
                RecordedRequest(number, client.number, 0, "", 0, rows, arrived) for number in islice(numbers, count)
            ]
            self._name(client)
            times, name = (taken, ready, computed, placed), lease.instance.spec.name
            about = (version.model, version.number, name, requests[0].number, reason.value, max(rows, 1) * count)
            self._add(RecordedBatch(*about, times, placed, lease.number, requests), count)
            for request in requests[:failed]:
                if self._wants(version, 1):
                    self._add(RecordedEnd(version.model, version.number, "batch", "INTERNAL", placed, request), 1)

    def ended(self, request: Request, code: str, now: int) -> None:
        """Records the end of a request, unless it succeeded in a batch: the record of the batch covers that."""
        version, batch = request.version, request.batch
        if version.service.graph is not None:
            kind = "ensemble"
        elif version.service.decoupled:
            kind = "stream"
        elif batch is not None:
            kind = "batch"
        else:
            kind = "queued" if code else "cached"
        if (kind != "batch" or code) and self._wants(version, 1):
            self._add(RecordedEnd(version.model, version.number, kind, code, now, self._request(request, False)), 1)

    def take(self, limit: int) -> dict[str, Any]:
        """Removes and returns the oldest records, with about `limit` requests at most."""
        taken: list[RecordedBatch | RecordedEnd] = []
        count = 0
        while self._records and count < limit:
            record = self._records.popleft()
            taken.append(record)
            count += len(record.requests) if isinstance(record, RecordedBatch) else 1
        self._unread -= count
        clients = self._clients
        if not self._records:
            self._clients = {}
        return {"records": taken, "clients": clients, "left_out": self.left_out, "more": bool(self._records)}

    def _wants(self, version: Version, count: int) -> bool:
        """True if this many requests are to be recorded. Counts those that are left out because of the limit."""
        if self._models and version.model not in self._models:
            return False
        if self._unread + count > self._limit:
            self.left_out += count
            return False
        return True

    def _add(self, record: RecordedBatch | RecordedEnd, count: int) -> None:
        self._records.append(record)
        self._unread += count

    def _request(self, request: Request, gone: bool) -> RecordedRequest:
        client, options = request.client, request.options
        self._name(client)
        return RecordedRequest(
            request.number,
            client.number,
            request.client_number,
            options.id if options is not None else "",
            request.parent,
            request.rows,
            request.arrived,
            gone,
        )

    def _name(self, client: ClientState) -> None:
        if client.number not in self._clients:
            self._clients[client.number] = "" if isinstance(client, CallingWorker) else client.name
