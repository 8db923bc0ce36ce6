"""A worker of one instance that asserts the broker's obligations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import prod
from typing import Any

from shmserve.core.policy import ModelPolicy
from shmserve.protocol import messages, worker_messages
from shmserve.protocol.batch_queue import BatchQueue, QueuedBatch
from shmserve.protocol.work_items import work_items_of
from tests.support.core.fakes.client import FakeClient
from tests.support.core.fakes.lease import RECORDS, FakeLease
from tests.support.core.fakes.tensors import in_columns, references

SEGMENT_BYTES = 1 << 40
"""Arenas of fake workers never run out: each block gets a new address, so that no address is used twice."""


class FakeWorker:
    """A worker of one instance. `inbox` has the messages from the broker, `outbox` those that the broker has not read
    yet."""

    def __init__(self, peer: int, name: str, policy: ModelPolicy, large: frozenset[str] = frozenset()) -> None:
        self.peer, self.name, self.policy, self.large = peer, name, policy, large
        self.inbox: list[Any] = []
        self.outbox: list[Any] = []
        self.mapped: set[int] = set()
        self.waiting = BatchQueue()
        self.running: QueuedBatch | None = None
        self.started: list[list[int]] = []
        self.arenas: dict[str, int] = {}
        self.next_offset = 0
        self.out: Counter[messages.Handle] = Counter()
        self.stopping = self.dead = False
        self.again: list[int] = []
        """Requests of the running batch that must be run again."""
        self.ended: list[int | str] = []
        """Sequences whose end the broker has sent."""
        self.streams: dict[int, worker_messages.Work] = {}
        """Requests of a decoupled model whose last response has not been sent."""
        self.room: dict[int, int] = {}
        """Stream -> number of further responses that its caller has allowed."""
        self.cancelled: set[int] = set()
        """Streams whose client has cancelled."""
        self.says: dict[str, str] = {}
        """Output -> its value in the next batch: a shape such as [2,3], true, false, or none."""
        self.compute: Callable[[FakeWorker, worker_messages.Work], worker_messages.Row] | None = None
        """Computes the answer to a request, in tests that need one."""
        self.aliasing = False
        """The worker passes inputs on as outputs where permitted, without copying."""
        self.passes: dict[str, messages.Handle] = {}
        """Outputs of the next answer that were made by another model."""
        self.caller: FakeClient | None = None
        """The worker as a client, for calls of its model."""
        self.waits_for: set[int] = set()
        """Calls whose end its model waits for."""
        self.watch: Callable[[FakeWorker, QueuedBatch], None] | None = None
        """Called with each batch that starts."""
        self.offered: dict[int, FakeLease] = {}
        """Sockets and logs of leases whose Lend the worker has not read."""
        self.lease: FakeLease | None = None
        self.leased = 0
        """Number of requests recorded in logs of leases."""
        self.expected: dict[int, worker_messages.Expect] = {}
        """Request -> the outputs to compare with."""
        self.differs: set[str] = set()
        """Outputs that are reported as different."""
        self.on_gpu = False
        """Its memory is on a GPU."""
        self.in_columns = False
        """The worker answers in columns where permitted, except for every third batch."""

    # ------------------------------------------------------------------------------------ messages of the broker

    def read(self, count: int | None = None) -> None:
        """Reads messages: all, or the first `count`; none while it runs a leased request."""
        if self.lease is not None and self.lease.running is not None:
            return
        received = self.inbox[:count]
        del self.inbox[: len(received)]
        for message in received:
            self.take(message)

    def take(self, message: Any) -> None:
        if isinstance(message, worker_messages.Execute):
            self._execute(message)
        elif isinstance(message, worker_messages.Expect):
            for handle in references(message.outputs):
                own = handle.segment in self.arenas.values()
                assert own or handle.segment in self.mapped, f"{self.name} was never told of segment {handle.segment}"
            self.expected[message.request] = message
        elif isinstance(message, worker_messages.Withdraw):
            self._withdraw(message)
        elif isinstance(message, messages.Map):
            assert message.segment not in self.mapped, f"segment {message.segment} was announced twice to {self.name}"
            assert message.segment not in self.arenas.values(), f"{self.name} was told of a segment of its own"
            self.mapped.add(message.segment)
        elif isinstance(message, messages.Unmap):
            assert message.segment in self.mapped
            assert message.segment not in self.needed(), f"{self.name} still needs segment {message.segment}"
            holds = self.caller.holds if self.caller is not None else ()
            assert not [handle for handle in holds if handle.segment == message.segment]
            self.mapped.discard(message.segment)
        elif isinstance(
            message,
            (messages.Reply, messages.Part, messages.Fail, messages.FailHeld, messages.Released, messages.Answer),
        ):
            assert self.caller is not None, f"{self.name} was answered, and has not asked: {message}"
            self.caller.receive(message)
        elif isinstance(message, messages.Return):
            for handle in message.handles:
                assert self.out[handle] == 1, f"{self.name} got back {handle}, which is not out"
                del self.out[handle]
        elif isinstance(message, worker_messages.EndSequences):
            assert self.policy.sequence is not None
            self.ended += message.sequences
        elif isinstance(message, messages.More):
            assert self.policy.decoupled, f"{self.name} was told that more may come of a request with one answer"
            self.room[message.request] = self.room.get(message.request, 0) + message.count
        elif isinstance(message, worker_messages.Stop):
            self.stopping = True
            self.end_lease(0)
        elif isinstance(message, worker_messages.Lend):
            assert self.lease is None, f"{self.name} is lent twice"
            assert self.running is None
            assert not len(self.waiting), f"{self.name} is lent and has work"
            self.lease = self.offered.pop(message.lease)
        elif isinstance(message, worker_messages.Revoke):
            if self.lease is None or self.lease.number != message.lease:
                self.outbox.append(worker_messages.LeaseOver(message.lease))
            self.end_lease(message.lease)
        else:
            assert isinstance(message, (messages.Ping, worker_messages.Load)), message

    def needed(self) -> set[int]:
        running = (
            self.running.work_items if self.running and not self.policy.decoupled else []
        )  # else the last answer counts
        work_items = [*self.waiting.work_items, *running, *self.streams.values()]
        found = {handle.segment for work in work_items for handle in references(work.inputs)}
        numbers = {work.request for work in work_items}
        for number, order in self.expected.items():
            found |= {handle.segment for handle in references(order.outputs) if number in numbers}
        return found | {w.place.segment for work in work_items for w in work.outputs or () if w.place is not None}

    def _execute(self, order: worker_messages.Execute) -> None:
        assert self.lease is None, f"{self.name} is lent and gets a batch"
        for work in work_items_of(order):
            for handle in references(work.inputs):
                own = handle.segment in self.arenas.values()
                assert own or handle.segment in self.mapped, f"{self.name} was never told of segment {handle.segment}"
            for wanted in work.outputs or ():
                assert wanted.place is None or wanted.place.segment in self.mapped
        self.waiting.add(order)

    def _withdraw(self, order: worker_messages.Withdraw) -> None:
        if not order.recalled:
            self.cancelled |= self.streams.keys() & set(order.requests)
        self.outbox.append(worker_messages.Withdrawn(self.waiting.withdraw(order.requests)))

    # ------------------------------------------------------------------------------------ batches

    def take_up(self) -> QueuedBatch | None:
        """The next batch starts, if there is one."""
        assert self.running is None
        batch = self.waiting.start()
        if batch is None:
            return None
        self._verify(batch)
        self.running = batch
        self.started.append([work.request for work in batch.work_items])
        if self.policy.decoupled:
            self._open(batch)
        if self.watch is not None:
            self.watch(self, batch)
        return batch

    def start(self) -> QueuedBatch | None:
        """If nothing runs, starts the waiting batch, and reports that if required."""
        batch = self.take_up() if self.running is None else None
        if batch is not None and batch.open:
            self.outbox.append(worker_messages.Started(batch.number, batch.through))
        return batch

    def _open(self, batch: QueuedBatch) -> None:
        for work in batch.work_items:
            assert work.options is not None
            assert work.options.window > 0, "there is no room for any answer"
            self.streams[work.request] = work
            self.room[work.request] = self.room.get(work.request, 0) + work.options.window

    # ------------------------------------------------------------------------------------ its lease

    def run_leased(self, now: int, took: int = 0, error: tuple[str, str] | None = None, answer: bool = True) -> None:
        """Runs and answers the running request of its lease, or else the next one. Without `answer`, the request is
        only recorded."""
        lease = self.lease
        assert lease is not None
        if lease.running is None:
            if any(handle.segment not in self.mapped for handle in references(lease.requests[0].inputs)):
                assert not lease.client_open, f"{self.name} was never told of memory of its client"
                self._close_lease()
                return
            lease.begin(now - took)
        request = lease.running
        assert request is not None
        rows = request.inputs[0].shape[0] if self.policy.max_batch else 0
        row = self.answer_row(worker_messages.Work(0, rows, request.inputs, None, ""), error)
        lease.record(row, rows, lease.since, now)
        self.leased += 1
        unread = len(lease.records)
        if unread == RECORDS // 2:
            self.outbox.append(worker_messages.LeaseLogged(lease.number))
        if answer:
            lease.answer(row)
            if unread >= RECORDS:
                self._close_lease()

    def notice(self) -> None:
        """Ends a lease whose client has left."""
        lease = self.lease
        if lease is not None and not lease.client_open and not lease.requests and lease.running is None:
            self._close_lease()

    def end_lease(self, number: int, now: int = 0) -> None:
        """Ends its lease, if it has this number (0: any), with the answer to a request that has arrived."""
        lease = self.lease
        if lease is not None and number in (0, lease.number):
            if lease.requests:
                self.run_leased(max(now, lease.opened, lease.since))
            if self.lease is not None:
                self._close_lease()

    def _close_lease(self) -> None:
        lease, self.lease = self.lease, None
        assert lease is not None
        lease.worker_open = False
        lease.requests.clear()
        self.outbox.append(worker_messages.LeaseOver(lease.number))

    def _verify(self, batch: QueuedBatch) -> None:
        """Asserts what a model may rely on."""
        policy = self.policy
        work_items = batch.work_items
        if policy.sequence is not None:
            slots = [work.slot for work in work_items if work.slot >= 0]
            assert len(slots) == len(set(slots)), f"two in one slot of {self.name}"
            assert len(slots) == (len(work_items) if policy.sequence.direct and policy.max_batch else 0)
            ids = [work.options.sequence for work in work_items if work.options is not None]
            assert len(set(ids)) == len(work_items), f"two of one sequence in a batch of {self.name}"
        if policy.streams:
            assert len(work_items) <= policy.streams, f"{len(work_items)} requests for {policy.streams} streams"
        elif policy.max_batch == 0 or (policy.batching is None and policy.sequence is None):
            assert len(work_items) == 1, f"{self.name} takes one request at a time, got {len(work_items)}"
        if policy.max_batch == 0:
            return
        rows = sum(max(1, work.rows) for work in work_items)
        assert rows <= policy.max_batch, f"{rows} rows in a batch of {self.name}, over {policy.max_batch}"
        specs = {spec.name: spec for spec in policy.inputs}
        padded = dict(policy.padding.inputs) if policy.padding is not None else {}
        kinds = set()
        for work in work_items:
            names = frozenset(tensor.name for tensor in work.inputs)
            shapes = frozenset(
                (t.name, tuple(-1 if axis in padded.get(t.name, ()) else dim for axis, dim in enumerate(t.shape[1:])))
                for t in work.inputs
                if not specs[t.name].ragged
            )
            kinds.add((names, shapes))
        assert len(kinds) == 1, f"a batch of {self.name} mixes {kinds}"

    def finish(self, now: int, took: int = 0, rows_first: int = 0, error: tuple[str, str] | None = None) -> None:
        """The running batch is done: its results are sent, and the next batch starts, unless the model still waits for
        a call."""
        assert self.running is not None, f"{self.name} runs nothing"
        if self.caller is not None and self.waits_for & self.caller.open:
            return
        done, self.running = self.running, None
        again, self.again = tuple(self.again), []
        answered = [work for work in done.work_items if work.request not in again]
        if self.policy.decoupled:  # each separately, unless all have failed
            answered = [work for work in answered if error is not None and work.request in self.streams]
        for request in {work.request for work in answered} | set(again):
            self._close(request)
        rows = tuple(self.answer_row(work, error) for work in answered)
        if rows_first:
            self.outbox.append(worker_messages.Rows(done.number, rows[:rows_first]))
        following = self.take_up()
        times = (now - took, now - took, now, now)
        message = worker_messages.Done(done.number, rows[rows_first:], times, again=again)
        if self.in_columns and done.number % 3:
            message.columns = in_columns(message.rows)
            if message.columns is not None:
                message.rows = ()
        if following is not None:
            message.next, message.through = following.number, following.through
        self.outbox.append(message)

    def part(
        self, request: int, last: bool = False, empty: bool = False, error: tuple[str, str] | None = None
    ) -> worker_messages.Streamed:
        """Sends one response to an open request, while its batch runs or later."""
        work = self.streams[request]
        last = last or error is not None
        row = worker_messages.Row(request, ()) if empty and error is None else self.answer_row(work, error)
        row.more = not last
        if row.more or row.outputs:
            assert self.room[request] > 0, f"{self.name} has no room for an answer to {request}"
            self.room[request] -= 1
        if last:
            self._close(request)
        said = worker_messages.Streamed((row,))
        self.outbox.append(said)
        return said

    def _close(self, request: int) -> None:
        if self.streams.pop(request, None) is not None:
            self.cancelled.discard(request)
            del self.room[request]

    def end_streams(self) -> None:
        """The worker stops: all open streams end."""
        for request in list(self.streams):
            self.part(request, error=("UNAVAILABLE", "the model is being unloaded"))

    def answer_row(self, work: worker_messages.Work, error: tuple[str, str] | None) -> worker_messages.Row:
        expected = self.expected.pop(work.request, None)
        if error is not None:
            return worker_messages.Row(work.request, (), messages.Failure(*error))
        if expected is not None:
            different = [tensor.name for tensor in expected.outputs if tensor.name in self.differs]
            report = {"output": different[0], "difference": "by 7 %"} if different else {}
            return worker_messages.Row(work.request, (), None, {"equal": not different, **report})
        if self.compute is not None:
            return self.compute(self, work)
        places = {wanted.name: wanted.place for wanted in work.outputs or ()}
        dtypes = {spec.name: spec.dtype for spec in self.policy.outputs}
        names = list(places) if work.outputs is not None else list(dtypes)
        tensors = []
        for name in names:
            said = self.says.get(name, "")
            if said == "none":
                continue
            shape: tuple[int, ...] = (work.rows, 1) if self.policy.max_batch else (1,)
            if said.startswith("["):
                shape = tuple(int(dim) for dim in said.strip("[]").split(","))
            size = prod(shape) * (1 if dtypes[name] == "BOOL" else 4) or 4 * (not said)
            place = places.get(name)
            if name in self.passes:
                data: Any = (self.passes.pop(name),)
                shape = (data[0].size // 4,)
            elif place is not None:
                data = (messages.Handle(place.segment, place.offset, size),)
            elif self.aliasing and work.aliases and (same := self._same(work, dtypes[name])) is not None:
                shape, data = same.shape, same.data
            elif (name in self.large and size) or (size > 1 and not work.inline):
                data = (self.allocate(work.audience, size),)
            else:
                data = bytes([said == "true"]) * size
            tensors.append(messages.Tensor(name, dtypes[name], shape, data))
        return worker_messages.Row(work.request, tuple(tensors))

    def _same(self, work: worker_messages.Work, dtype: str) -> messages.Tensor | None:
        """An input of this type that may be passed on as an output: in shared memory of another process, not of the
        broker."""
        for tensor in work.inputs:
            if tensor.dtype == dtype and isinstance(tensor.data, tuple):
                if all(part.segment >> messages.OWNER_SHIFT not in (0, self.peer) for part in tensor.data):
                    return tensor
        return None

    def allocate(self, audience: str, size: int) -> messages.Handle:
        segment = self.arenas.get(audience)
        if segment is None:
            segment = self.arenas[audience] = (self.peer << messages.OWNER_SHIFT) + 1 + len(self.arenas)
            name = f"{messages.DEVICE}of {self.name}" if self.on_gpu and audience == "internal" else None
            self.outbox.append(messages.Map(segment, SEGMENT_BYTES, name, audience))
        handle = messages.Handle(segment, self.next_offset, size)
        self.next_offset += size
        self.out[handle] += 1
        return handle
