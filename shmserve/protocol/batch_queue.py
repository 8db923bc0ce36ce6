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
from shmserve.protocol.work_items import joined, shares_of, work_items_of
from shmserve.protocol.worker_messages import Execute, Work


class QueuedBatch(Struct):
    """Requests that will run together. `number` is the first Execute's number, `through` that of the last to join."""

    number: int
    through: int
    work_items: Sequence[Work]
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
        return sum(len(batch.work_items) for batch in self._batches)

    def add(self, order: Execute) -> None:
        """Adds an Execute as a new batch or as part of the newest one."""
        if order.batch <= self._last:
            raise ProtocolError(f"batch numbers must rise: {order.batch} came after {self._last}")
        work_items = work_items_of(order)
        if not work_items:
            raise ProtocolError(f"Execute {order.batch} has no requests")
        self._last = order.batch
        batches = self._batches
        if not batches:
            batches.append(QueuedBatch(order.batch, order.batch, work_items, order.more, order.open))
            return
        newest = batches[-1]
        if order.join or newest.more:  # after `more`, this Execute is the continuation even without `join`
            newest.work_items = joined(newest.work_items, work_items)
            newest.through = order.batch
            newest.more = order.more
            newest.open = newest.open or order.open
            return
        batches[:] = [batch for batch in batches if batch.work_items]
        batches.append(QueuedBatch(order.batch, order.batch, work_items, order.more, order.open))

    @property
    def work_items(self) -> list[Work]:
        """All waiting requests."""
        return [work for batch in self._batches for work in batch.work_items]

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
            here = {work.request for work in batch.work_items} & wanted if batch.open else None
            if here:
                batch.work_items = [work for work in batch.work_items if work.request not in here]
                withdrawn |= here
        return tuple(dict.fromkeys(request for request in requests if request in withdrawn))

    def widen_window(self, request: int, count: int) -> None:
        """Raises the response window of a waiting request by `count`."""
        for batch in self._batches:
            for index, work in enumerate(batch.work_items):
                options = work.options
                if work.request == request and options is not None:
                    work_items = list(batch.work_items)
                    work_items[index] = replace(work, options=replace(options, window=options.window + count))
                    batch.work_items = work_items
                    return

    def next_rows(self) -> int:
        """The rows of the batch that `start` would return; without a batch dimension, its requests. 0: there is
        none."""
        for batch in self._batches:
            if batch.work_items and not batch.more:
                return sum(shares_of(batch.work_items)) or len(batch.work_items)
        return 0

    def start(self, *, last: bool = False) -> QueuedBatch | None:
        """Returns the batch to run now, or None. `last`: no more orders will come, so run an unfinished batch."""
        for index, batch in enumerate(self._batches):
            if batch.work_items and (last or not batch.more):
                del self._batches[: index + 1]
                return batch
        return None
