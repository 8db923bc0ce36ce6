"""A simulated lease: the socket pair between a client and a worker, and its log. Requests over it take two messages and
no turn of the broker."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from shmserve.core.events import LeaseRead
from shmserve.protocol.messages import Fail, Infer, Lease, Reply
from shmserve.protocol.worker_messages import LeasedBatch
from shmserve.sim.world import World

RECORDS = 255
"""Number of records in a log, as in `shmserve.shm.lease_log`."""


class SimLease:
    def __init__(
        self,
        world: World,
        message: Lease,
        opened: int,
        wake_worker: Callable[[], object],
        notify_client: Callable[[Any, int], object],
    ) -> None:
        self._world = world
        self._wake_worker = wake_worker
        self._notify_client = notify_client
        self._records: list[LeasedBatch] = []
        self.number = message.lease
        self.message = message
        self.opened = opened
        """When the client gets its end of the socket pair."""
        self.sent: Infer | None = None
        """The client's last request."""
        self.requests: deque[Infer] = deque()
        """Requests that have arrived at the worker."""
        self.running = 0
        """The number of the request that the worker has been running since `since`, 0 for none."""
        self.since = 0
        self.ending = False
        """The worker closes the socket after the running request."""
        self.closed = False

    # ------------------------------------------------------------------------------------ the client

    def fits(self, request: Infer, now: int) -> bool:
        """True if the request, the only one in flight, may be sent over the lease."""
        return now >= self.opened and not request.timeout_us and self.message.allows(request)

    def send(self, request: Infer) -> None:
        self.sent = request
        self._world.at(self._world.now + self._world.plan.link_ns, self._arrive, request)

    def _arrive(self, request: Infer) -> None:
        if not self.closed:
            self.requests.append(request)
            self._wake_worker()

    # ------------------------------------------------------------------------------------ the worker

    def begin(self) -> Infer:
        request = self.requests.popleft()
        self.running, self.since = request.request, self._world.now
        return request

    def answer(self, answer: Reply | Fail, rows: int, began: int) -> int:
        """Records the running request and answers it. Returns the number of unread records."""
        now = self._world.now
        self._records.append((self.since, began, began, now, now, rows, int(type(answer) is Fail), 1))
        self.running = 0
        self._world.at(now + self._world.plan.link_ns, self._answered, answer)
        return len(self._records)

    def _answered(self, answer: Reply | Fail) -> None:
        self._notify_client(answer, self._world.now)

    @property
    def full(self) -> bool:
        return len(self._records) >= RECORDS

    # ------------------------------------------------------------------------------------ the broker

    def read(self, final: bool) -> LeaseRead:
        records, self._records = self._records, []
        return LeaseRead(self.number, records, self.running, self.running, self.since, final)
