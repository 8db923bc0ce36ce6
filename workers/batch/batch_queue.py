"""The batches that wait at a worker: joined, withdrawn from, started. Pure: no I/O, no clock.

The rule: a batch that has started is out of here for good; what wanted to join it joins the batch that waits now, or
is one. So batches start in the order of their numbers, and each is an unbroken run of Execute numbers.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from shmserve.errors import ProtocolError
from shmserve.protocol.messages import Execute, Work


class Batch(Struct):
    """Requests that will run together. `number` is its first Execute's, `through` the last one's that joined."""

    number: int
    through: int
    works: list[Work]
    more: bool
    open: bool


class Waiting:
    """What waits, oldest first; nearly always one batch or none."""

    __slots__ = ("_batches", "_last")

    def __init__(self) -> None:
        self._batches: list[Batch] = []
        self._last = 0

    def __len__(self) -> int:
        """Requests that wait."""
        return sum(len(batch.works) for batch in self._batches)

    def add(self, order: Execute) -> None:
        """Takes an Execute, as a new batch or as part of the one that waits."""
        if order.batch <= self._last:
            raise ProtocolError(f"batch numbers must rise: {order.batch} came after {self._last}")
        if not order.works:
            raise ProtocolError(f"Execute {order.batch} has no requests")
        self._last = order.batch
        batches = self._batches
        if not batches:
            batches.append(Batch(order.batch, order.batch, list(order.works), order.more, order.open))
            return
        newest = batches[-1]
        if order.join or newest.more:  # where more was promised, this is it, whatever it says
            newest.works.extend(order.works)
            newest.through = order.batch
            newest.more = order.more
            newest.open = newest.open or order.open
            return
        batches[:] = [batch for batch in batches if batch.works]
        batches.append(Batch(order.batch, order.batch, list(order.works), order.more, order.open))

    @property
    def complete(self) -> bool:
        """The batch to run next is here and nothing can change it: the broker knew that it would start at once."""
        batches = self._batches
        return len(batches) == 1 and not (batches[0].open or batches[0].more)

    def withdraw(self, requests: tuple[int, ...]) -> tuple[int, ...]:
        """Takes requests out, and returns those that were still here, in the order asked.

        A batch that becomes empty can still be joined, as its owner may not know yet; it is never started as it is.
        Of one that is not open the broker knows that it runs: nothing can be taken out, however early it is.
        """
        wanted = set(requests)
        found: set[int] = set()
        for batch in self._batches:
            here = {work.request for work in batch.works} & wanted if batch.open else None
            if here:
                batch.works = [work for work in batch.works if work.request not in here]
                found |= here
        return tuple(dict.fromkeys(request for request in requests if request in found))

    def more(self, request: int, count: int) -> None:
        """The caller of this request, if it waits here, has room for so many more answers."""
        for batch in self._batches:
            for index, work in enumerate(batch.works):
                options = work.options
                if work.request == request and options is not None:
                    batch.works[index] = replace(work, options=replace(options, window=options.window + count))

    def start(self, *, last: bool = False) -> Batch | None:
        """The batch to run now, or None. `last`: nothing more will come, so an unfinished batch runs as it is."""
        for index, batch in enumerate(self._batches):
            if batch.works and (last or not batch.more):
                del self._batches[: index + 1]
                return batch
        return None
