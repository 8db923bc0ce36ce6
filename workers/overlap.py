"""Two batches on the device: while one computes, the inputs of the next are copied to it and the outputs of the one
before leave.

For the broker, a batch that has begun on the device is a waiting one until the batch before is reported: its start is
announced in that report, as usual. In between, it is like a batch whose report is on its way: an Execute that should
have joined it forms a new batch, and none of its requests is given back.

Invariant: at most two batches are on the device, and they are finished in the order in which they began.
"""

from __future__ import annotations

import fcntl
import os
import select
from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shmserve.protocol.batch_queue import BatchQueue, QueuedBatch
    from shmserve.protocol.worker_messages import Work
    from shmserve.workers.runner import BegunBatch, OverlappingRunner, Ran

SHORT_NS = 500_000
"""After a batch that took less than this, the worker does not look for orders during the next one."""
PAUSE_PART = 32
"""The worker waits for orders for this part of the time since the batch began, then asks the device whether the batch
is computed. So a longer batch is asked for more rarely, and noticed late by at most this part of its time."""
MIN_PAUSE_S, MAX_PAUSE_S = 50e-6, 1e-3
SELECTABLE = 1024
"""`select` waits only for descriptors below this number. Other calls of Python do not wait for less than 1 ms."""


class Overlap:
    """Begins and finishes the batches of a queue.

    A batch that cannot grow begins as soon as there is room on the device. Any other begins when the one before is
    computed: until then, more requests can join it, and a larger batch is worth more than an earlier copy.
    """

    def __init__(
        self,
        link: int,
        runner: OverlappingRunner,
        queue: BatchQueue,
        read_orders: Callable[[], None],
        max_batch: int,
    ) -> None:
        """`link`: the descriptor that is readable when there are orders. `read_orders` handles them. `max_batch`: the
        most rows of a batch; 0: a batch has one request."""
        self._link = [link if link < SELECTABLE else fcntl.fcntl(link, fcntl.F_DUPFD_CLOEXEC, 0)]
        self._own_link = self._link[0] != link
        self._runner = runner
        self._queue = queue
        self._read_orders = read_orders
        self._max = max(max_batch, 1)
        self._current: BegunBatch | None = None
        """The batch to finish next, if it has begun."""
        self._next: tuple[QueuedBatch, BegunBatch] | None = None
        """The batch after that, if it has begun. The broker does not know yet."""
        self._ran_ns = 0
        """How long the last batch took."""
        self._ended = False
        """A batch has ended, and `start` has not been called since."""
        self._busy = False
        """A batch was waiting when the last one ended."""

    def close(self) -> None:
        if self._own_link:
            os.close(self._link[0])

    def start(self, *, last: bool = False) -> QueuedBatch | None:
        """Returns the batch to run now, like `BatchQueue.start`. It may have begun."""
        if self._next is not None:
            (batch, self._current), self._next = self._next, None
        else:
            started = self._queue.start(last=last)
            if started is None:
                self._busy = self._ended = False
                return None
            batch, self._current = started, None
        self._busy, self._ended = self._busy or self._ended, False
        return batch

    def run_batch(self, work_items: Sequence[Work]) -> Ran:
        """Finishes the batch that `start` returned. Meanwhile the next one may begin."""
        since = monotonic_ns()
        current, self._current = self._current, None
        if current is None:
            current = self._runner.begin(work_items)
        if current.computation is not None:
            self._begin_next(current, since)
        ran = self._runner.finish(current)
        self._ran_ns = monotonic_ns() - since
        self._ended = True
        return ran

    def _begin_next(self, current: BegunBatch, since: int) -> None:
        """Begins the next batch while `current` is on the device.

        Until there is one, the worker waits for orders and for the device. It waits for both by asking the device
        after each wait for the link, because CUDA's callbacks do not run after an error, and a thread that waits would
        pass each batch through two more wake-ups. It waits for the device alone, which is exact, if no batch was
        waiting at the end of the last one, and if batches are short.
        """
        assert current.computation is not None
        if self._begin(self._max) or not self._busy or self._ran_ns < SHORT_NS:
            return
        while not current.computation.computed():
            pause = (monotonic_ns() - since) / (PAUSE_PART * 1e9)
            if select.select(self._link, (), (), min(max(pause, MIN_PAUSE_S), MAX_PAUSE_S))[0]:
                self._read_orders()
                if self._begin(self._max):
                    return
        self._read_orders()
        self._begin(1)

    def _begin(self, min_rows: int) -> bool:
        """Begins the next batch if it has this many rows."""
        if self._queue.next_rows() < min_rows:
            return False
        batch = self._queue.start()
        assert batch is not None
        self._next = batch, self._runner.begin(batch.work_items)
        return True
