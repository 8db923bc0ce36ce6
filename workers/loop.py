"""The main loop of a worker after loading: receives orders from the broker, runs one batch at a time and sends reports.
With a backend that overlaps batches, `overlap` begins the next batch before the running one has ended.

Invariants: each request is answered exactly once, whatever the model does. The outbox is flushed before a model runs,
because the run time of a model is not bounded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shmserve.protocol.batch_queue import BatchQueue, QueuedBatch
from shmserve.protocol.messages import Columns, More, Ping, Pong, Return
from shmserve.protocol.worker_messages import (
    Done,
    EndSequences,
    Execute,
    Expect,
    Probe,
    Probed,
    Revoke,
    Row,
    Started,
    Stop,
    Streamed,
    Withdraw,
    rows_of,
)
from shmserve.protocol.worker_messages import Withdrawn as WithdrawnReport
from shmserve.workers.batch.comparison import Comparisons
from shmserve.workers.leases import LeaseHolder
from shmserve.workers.overlap import Overlap
from shmserve.workers.runner import OverlappingRunner

if TYPE_CHECKING:
    from shmserve.workers.link import BrokerLink
    from shmserve.workers.loading import LoadedModel
    from shmserve.workers.outbox import Outbox


class Loop:
    """Runs until Stop. Raises ConnectionLost if the link is lost, ProtocolError if the broker violates the protocol."""

    def __init__(self, link: BrokerLink, outbox: Outbox, loaded: LoadedModel) -> None:
        inbox, runner, mapped = loaded.inbox, loaded.runner, loaded.mapped
        assert inbox is not None
        self._receive = link.receive
        self._inbox = inbox
        self._handle = inbox.handle
        self._drain = inbox.drain
        self._outbox = outbox
        self._waiting = BatchQueue()
        self._start = self._waiting.start
        self._run_batch = runner.run_batch
        self._overlap: Overlap | None = None
        if isinstance(runner, OverlappingRunner):
            self._overlap = Overlap(link.fileno(), runner, self._waiting, inbox.read, loaded.config.max_batch_size)
            self._start, self._run_batch = self._overlap.start, self._overlap.run_batch
        self._stopping = False
        self._streams = loaded.model.streams
        if self._streams is not None:
            self._streams.connect(self._send_response, outbox.add, runner.row, runner.discard, outbox.flush)
        self._calls = loaded.backend.context.calls
        self._prober = loaded.model.probe
        self._comparisons = Comparisons(mapped, runner.discard)
        self._leases = LeaseHolder(link, outbox, runner, mapped, self._streams)
        inbox.add_lend(self._leases.lend)
        inbox.add(
            {
                Execute: self._waiting.add,
                Expect: self._comparisons.expect,
                Return: lambda order: loaded.arenas.free(order.handles),
                Withdraw: self._withdraw,
                Ping: lambda order: outbox.add(Pong(order.number)),
                More: self._widen_window,
                EndSequences: lambda order: runner.forget(order.sequences),
                Stop: self._stop,
                Probe: self._probe,
                Revoke: self._leases.revoke,
            }
        )

    def run(self, orders: list[Any], descriptors: list[int]) -> None:
        """Runs until Stop. First handles `orders`, which arrived with Load, and those that arrived during loading."""
        self._handle([*orders, *self._inbox.take_kept()], descriptors)
        self._drain()
        while True:
            batch = self._start(last=self._stopping)
            if batch is None:
                if self._stopping:
                    if self._streams is not None:
                        self._streams.stop(True)
                    if self._overlap is not None:
                        self._overlap.close()
                    self._outbox.flush()
                    return
                self._wait()
                continue
            if batch.open:
                self._outbox.add(Started(batch.number, batch.through))
            while batch is not None:
                batch = self._run(batch)

    def _wait(self) -> None:
        """Waits for orders. Releases `turn`, the lock on the worker's state, while waiting if threads of the model may
        need it to send responses or call models."""
        self._outbox.flush()
        if self._leases.active:
            packet = self._leases.receive()
            if packet is None:
                return
        elif self._streams is not None and self._streams.shared:
            self._streams.wait()
            return
        else:
            packet = self._receive()
        self._handle(*packet)
        if not self._waiting.complete:
            self._drain()

    def _run(self, batch: QueuedBatch) -> QueuedBatch | None:
        """Runs a batch and reports its results. Returns the next batch, whose start is announced in the same report."""
        self._outbox.flush()
        results, times, again = self._run_batch(batch.work_items)
        if self._streams is not None:
            self._streams.withdrawn.clear()
        if self._comparisons.expected:
            results = self._comparisons.compared(rows_of(results))
        # Orders that arrived during the run may extend the next batch or withdraw requests from it.
        self._drain()
        if self._streams is not None:
            self._streams.read()
        following = self._start(last=self._stopping)
        if isinstance(results, Columns):
            done = Done(batch.number, (), times, columns=results)
        else:
            done = Done(batch.number, tuple(results), times, again=again)
        if following is not None:
            done.next, done.through = following.number, following.through
        self._outbox.add(done)
        if self._calls is not None:
            self._calls.sent(rows_of(results))
        return following

    # ------------------------------------------------------------------------------------ orders

    def _withdraw(self, order: Withdraw) -> None:
        withdrawn = self._waiting.withdraw(order.requests)
        self._comparisons.forget(withdrawn)
        self._outbox.add(WithdrawnReport(withdrawn))
        if self._streams is not None and not order.recalled and len(withdrawn) < len(order.requests):
            self._streams.cancel(request for request in order.requests if request not in withdrawn)

    def _stop(self, order: Stop) -> None:
        self._stopping = True
        self._leases.end()

    def _probe(self, order: Probe) -> None:
        streams = self._streams
        if streams is None:
            return

        def report(ready: bool) -> None:
            with streams.turn:
                self._outbox.add(Probed(order.number, ready))
                self._outbox.flush()

        self._prober(report)

    def _widen_window(self, order: More) -> None:
        if self._streams is not None and not self._streams.widen_window(order.request, order.count):
            self._waiting.widen_window(order.request, order.count)

    # ------------------------------------------------------------------------------------ responses from a sender

    def _send_response(self, row: Row) -> None:
        """Queues a response. The streams flush it soon, because the time until the next one is not bounded."""
        self._outbox.add(Streamed((row,)))
        if self._calls is not None:
            self._calls.sent((row,))
