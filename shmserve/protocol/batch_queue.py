"""The batches that wait at a worker: extended, withdrawn from, started. The same code serves workers, the simulator and
the fake workers of tests.

Invariants: a started batch leaves the queue and cannot change; an Execute that should have joined it joins the newest
waiting batch or forms a new one. So batches start in the order of their numbers, and each is an unbroken run of Execute
numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from shmserve.errors import ProtocolError
from shmserve.protocol.worker_messages import Execute, Work
from shmserve.protocol.works import joined, shares_of, works_of


class QueuedBatch(Struct):
    """Requests that will run together. `number` is the first Execute's number, `through` that of the last to join."""

    number: int
    through: int
    works: Sequence[Work]
    more: bool
    open: bool


class BatchQueue:
    """The waiting batches, oldest first; nearly always one or none."""

    __slots__ = ("_batches", "_last")

    def __init__(self) -> None:
        self._batches: list[QueuedBatch] = []
        self._last = 0

    def __len__(self) -> int:
        """The number of waiting requests."""
        return sum(len(batch.works) for batch in self._batches)

    def add(self, order: Execute) -> None:
        """Adds an Execute as a new batch or as part of the newest one."""
        if order.batch <= self._last:
            raise ProtocolError(f"batch numbers must rise: {order.batch} came after {self._last}")
        works = works_of(order)
        if not works:
            raise ProtocolError(f"Execute {order.batch} has no requests")
        self._last = order.batch
        batches = self._batches
        if not batches:
            batches.append(QueuedBatch(order.batch, order.batch, works, order.more, order.open))
            return
        newest = batches[-1]
        if order.join or newest.more:  # after `more`, this Execute is the continuation even without `join`
            newest.works = joined(newest.works, works)
            newest.through = order.batch
            newest.more = order.more
            newest.open = newest.open or order.open
            return
        batches[:] = [batch for batch in batches if batch.works]
        batches.append(QueuedBatch(order.batch, order.batch, works, order.more, order.open))

    @property
    def works(self) -> list[Work]:
        """All waiting requests."""
        return [work for batch in self._batches for work in batch.works]

    @property
    def complete(self) -> bool:
        """Whether the next batch is complete and cannot change: the broker closed it, because it would start at
        once."""
        batches = self._batches
        return len(batches) == 1 and not (batches[0].open or batches[0].more)

    def withdraw(self, requests: tuple[int, ...]) -> tuple[int, ...]:
        """Removes requests and returns those that were still waiting, in the order given.

        A batch that becomes empty can still be joined, because the broker may not know yet that it is empty; it is
        never started empty. Nothing is withdrawn from a batch that is not open: the broker counts it as running.
        """
        wanted = set(requests)
        withdrawn: set[int] = set()
        for batch in self._batches:
            here = {work.request for work in batch.works} & wanted if batch.open else None
            if here:
                batch.works = [work for work in batch.works if work.request not in here]
                withdrawn |= here
        return tuple(dict.fromkeys(request for request in requests if request in withdrawn))

    def widen_window(self, request: int, count: int) -> None:
        """Raises the response window of a waiting request by `count`."""
        for batch in self._batches:
            for index, work in enumerate(batch.works):
                options = work.options
                if work.request == request and options is not None:
                    works = list(batch.works)
                    works[index] = replace(work, options=replace(options, window=options.window + count))
                    batch.works = works
                    return

    def next_rows(self) -> int:
        """The rows of the batch that `start` would return; without a batch dimension, its requests. 0: there is
        none."""
        for batch in self._batches:
            if batch.works and not batch.more:
                return sum(shares_of(batch.works)) or len(batch.works)
        return 0

    def start(self, *, last: bool = False) -> QueuedBatch | None:
        """Returns the batch to run now, or None. `last`: no more orders will come, so run an unfinished batch."""
        for index, batch in enumerate(self._batches):
            if batch.works and (last or not batch.more):
                del self._batches[: index + 1]
                return batch
        return None
