"""A simulated worker process: it follows the protocol and takes the model's service time, but computes nothing.

Invariant: it behaves as documented in shmserve.protocol.worker_messages, and asserts that the broker does as well.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from msgspec import Struct

from shmserve.core.service.padding import rounded
from shmserve.core.service.prompts import TOKENS_PER_BYTE, size_of
from shmserve.protocol.batch_queue import BatchQueue, QueuedBatch
from shmserve.protocol.messages import (
    OWNER_SHIFT,
    Fail,
    FailHeld,
    Failure,
    Map,
    More,
    Options,
    Part,
    Ping,
    Pong,
    Released,
    Reply,
    Return,
    Unmap,
)
from shmserve.protocol.worker_messages import (
    Call,
    Done,
    EndSequences,
    Execute,
    LeaseLogged,
    LeaseOver,
    Load,
    Prefilled,
    Revoke,
    Row,
    Started,
    Stop,
    Streamed,
    Withdraw,
    Withdrawn,
    Work,
)
from shmserve.sim.faults import POISON, FaultDraws
from shmserve.sim.plan import SimModel, may_stream
from shmserve.sim.processes.sim_lease import RECORDS, SimLease
from shmserve.sim.processes.tensors import SEGMENT_BYTES, SimInputs, SimOutputs, length_of
from shmserve.sim.results import ModelResult
from shmserve.sim.service import BY_LENGTH
from shmserve.sim.world import World

EXITED = "exit code 0"
"""The reason for the end of a process that was stopped."""
ANSWERS = frozenset((Reply, Part, Fail, FailHeld, Released))
_OWN = 1 << 20
"""Lower half of the segment number for its inputs to calls, far above those of its outputs."""
_ENOUGH = 1 << 20
"""Response window for decoupled models, large enough never to matter."""


class SimCalls:
    """`models`: the models that it calls, one after another."""

    def __init__(self, world: World, peer: int, models: list[SimModel], draws: Random) -> None:
        self._world = world
        self._peer = peer
        self._models = models
        self._draws = draws
        self._inputs = [SimInputs(model.policy, 1) for model in models]
        self._segment = (peer << OWNER_SHIFT) + _OWN
        self._announced = False
        self._last = 0
        self._step = 0
        self._work_items: list[Work] = []
        self._open: dict[int, int] = {}
        """Call -> the request for which it is made."""
        self._done: Callable[[], None] = lambda: None
        self.failed: dict[int, Failure] = {}
        """Requests with a failed call."""

    def begin(self, work_items: list[Work], done: Callable[[], None]) -> None:
        """Starts the calls for these requests. `done` is called after the last response."""
        self._work_items, self._done, self._step = work_items, done, 0
        self.failed.clear()
        self._make_calls()

    def _make_calls(self) -> None:
        model, inputs = self._models[self._step], self._inputs[self._step]
        policy = model.policy
        window = _ENOUGH if may_stream(model, self._world.plan.models) else 0
        for work in self._work_items:
            if work.request in self.failed:
                continue
            self._last = number = self._last + 1
            tensors = inputs.make(1, self._segment, self._draws)
            if not self._announced and any(isinstance(tensor.data, tuple) for tensor in tensors):
                self._announced = True
                self._world.send_from_worker(self._peer, Map(self._segment, SEGMENT_BYTES, None, "internal"))
            options = Options(window=window) if window else None
            if policy.sequence is not None:
                options = Options(window=window, sequence=(self._peer << 32) + number)
                options.sequence_start = options.sequence_end = True
            self._open[number] = work.request
            self._world.send_from_worker(
                self._peer, Call(number, work.request, policy.name, 0, tensors, None, 0, options)
            )
        if not self._open:
            self._done()

    def receive(self, message: Any) -> None:
        kind = type(message)
        if kind is Released:
            return
        if kind is Reply or kind is Part:
            handles = [part for tensor in message.outputs if isinstance(tensor.data, tuple) for part in tensor.data]
            if handles:
                self._world.send_from_worker(self._peer, Return(tuple(handles)))
            if kind is Part and not message.last:
                return
        request = self._open.pop(message.request)
        if kind is Fail or kind is FailHeld:
            self.failed[request] = Failure(message.code, message.text)
        if self._open:
            return
        self._step += 1
        if self._step < len(self._models):
            self._make_calls()
        else:
            self._done()


class SimBatch(Struct, gc=False):
    """A running batch. `number` 0: a leased request."""

    number: int
    work_items: list[Work]
    began: int
    rows: int


class SimStream(Struct):
    """A request to a decoupled model: the number of responses left, and the caller's window."""

    work: Work
    remaining: int
    window: int


class SimWorker:
    """`end` is called with the reason when the process ends."""

    def __init__(
        self,
        world: World,
        peer: int,
        model: SimModel,
        draws: Random,
        result: ModelResult,
        end: Callable[[SimWorker, str], None],
    ) -> None:
        self._world = world
        self._end = end
        self._draws = draws
        self._faults: FaultDraws = world.faults
        self._result = result
        self._waiting = BatchQueue()
        self._lease: SimLease | None = None
        self._outputs = SimOutputs(model.policy, (peer << OWNER_SHIFT) + 1, model.free_dims, model.true_share)
        self._streams: dict[int, SimStream] = {}
        self._runs: dict[int, int] = {}
        self._places: dict[int | str, tuple[int, int]] = {}
        """Sequence -> its slot and its newest request."""
        called = [next(m for m in world.plan.models if m.policy.name == name) for name in model.calls]
        self._calling = SimCalls(world, peer, called, draws) if called else None
        self._several = model.policy.decoupled or model.iterations > 1
        self._stopping = False
        self.peer = peer
        self.model = model
        self.running: SimBatch | None = None
        self.dead = self.loaded = False

    # ------------------------------------------------------------------------------------ messages

    def receive(self, messages: list[Any]) -> None:
        """Processes a packet from the broker."""
        if self.dead:
            return
        for message in messages:
            kind = type(message)
            if kind is Execute:
                self._execute(message)
            elif kind is Withdraw:
                self._withdraw(message)
            elif kind is Return:
                for handle in message.handles:
                    self._outputs.out.remove((handle.segment, handle.offset))
            elif kind is More:
                self._more(message)
            elif kind is Revoke:
                if self._lease is None or self._lease.number != message.lease:
                    self._send(LeaseOver(message.lease))
                else:
                    self._end_lease()
            elif kind is Stop:
                self._stopping = True
                self._end_lease()
            elif kind is Ping:
                self._send(Pong(message.number))
            elif self._calling is not None and kind in ANSWERS:
                self._calling.receive(message)
            else:
                assert kind in (Map, Unmap, EndSequences, Load), message
        if self.running is None and self._lease is None:
            batch = self._start_next()
            if batch is not None and batch.open:
                self._send(Started(batch.number, batch.through))
            if self._stopping and batch is None:
                self._end(self, EXITED)

    def _send(self, message: Any) -> None:
        self._world.send_from_worker(self.peer, message)

    def _execute(self, order: Execute) -> None:
        assert self._lease is None, "a batch for an instance that is lent"
        self._waiting.add(order)

    def _withdraw(self, order: Withdraw) -> None:
        self._send(Withdrawn(self._waiting.withdraw(order.requests)))
        for number in order.requests:
            stream = self._streams.get(number)
            if stream is not None and not order.recalled:  # the request was cancelled
                stream.remaining = 0
                if not self._is_running(number):
                    self._stream(stream)

    def _is_running(self, number: int) -> bool:
        return self.running is not None and any(work.request == number for work in self.running.work_items)

    # ------------------------------------------------------------------------------------ execution

    def _start_next(self) -> QueuedBatch | None:
        batch = self._waiting.start()
        if batch is not None:
            self._start(batch.number, list(batch.work_items))
        return batch

    def _start(self, number: int, work_items: list[Work]) -> None:
        world, model = self._world, self.model
        rows = sum([work.rows or 1 for work in work_items])
        limit = max(model.policy.max_batch, model.policy.streams, 1)
        assert rows <= limit, f"{rows} rows in a batch of '{model.policy.name}'"
        if model.policy.sequence is not None:
            self._verify_sequences(work_items)
        self.running = batch = SimBatch(number, work_items, world.now, rows)
        batches = self._result.batches
        batches[rows] = batches.get(rows, 0) + 1
        if model.policy.decoupled:
            for work in work_items:
                window = work.options.window if work.options is not None else 0
                self._streams[work.request] = SimStream(work, self._draws.randint(*model.responses), window)
        time = model.service.ns(rows, self._draws, self._length(work_items, rows))
        if self._faults.of_requests:
            for work in work_items:
                if work.options is not None and POISON in work.options.parameters:
                    world.at(world.now + time // 2, self._crash, batch)
                    return
        if self._faults.of_batches:
            what, where = self._faults.batch()
            if what:
                if what == "crash":
                    world.at(world.now + round(time * where), self._crash, batch)
                return
        if self._calling is not None:
            self._calling.begin(work_items, lambda: world.at(world.now + time, self._finish, batch))
        else:
            world.at(world.now + time, self._finish, batch)

    def _length(self, work_items: list[Work], rows: int) -> int:
        """The padded length of the batch."""
        policy = self.model.policy
        padding = policy.padding
        if padding is None:
            return length_of(policy, work_items[0]) if isinstance(self.model.service, BY_LENGTH) else 1
        lengths = [length_of(policy, work) for work in work_items]
        longest = rounded(max(lengths), padding)
        self._result.elements += rows * longest
        useful = sum([(work.rows or 1) * length for work, length in zip(work_items, lengths, strict=True)])
        self._result.padded_elements += rows * longest - useful
        return longest

    def _verify_sequences(self, work_items: list[Work]) -> None:
        """Asserts that a batch has at most one request per sequence, that a sequence runs in order and at one worker
        from START on, and (direct) that it keeps its slot."""
        here = set()
        for work in work_items:
            options = work.options
            assert options is not None
            place = self._places.get(options.sequence)
            if place is None:
                assert options.sequence_start or work.request in self._runs, f"{options} begins without START"
            else:
                assert place[0] == work.slot, f"{options} moved from slot {place[0]} to {work.slot}"
                assert place[1] <= work.request, f"{options} comes after what was sent later"
                assert not options.sequence_start or work.request == place[1], f"{options} has begun already"
            self._places[options.sequence] = work.slot, work.request
            here.add(options.sequence)
            self._world.check_home(options.sequence, self.peer)
        assert len(here) == len(work_items), "two requests of one sequence in one batch"
        slots = {work.slot for work in work_items}
        assert slots == {-1} or len(slots) == len(work_items), "two sequences in one slot"

    def _crash(self, batch: SimBatch) -> None:
        if not self.dead:
            self._end(self, "signal SIGSEGV")

    def _finish(self, batch: SimBatch) -> None:
        """Completes the batch: sends its results and starts the next one."""
        if self.dead:
            return
        now = self._world.now
        self._result.busy_ns += now - batch.began
        if not batch.number:
            assert self._lease is not None
            self._finish_leased(self._lease, batch)
            return
        make, draws = self._outputs.make, self._draws
        again: tuple[int, ...] = ()
        work_items = batch.work_items
        if self._several:
            work_items, again = self._finish_several(batch)
        rows = tuple([Row(work.request, make(work, draws)) for work in work_items])
        if self._faults.of_answers:
            rows = tuple([self._perhaps_failed(row) for row in rows])
        if self._calling is not None:
            failed = self._calling.failed
            rows = tuple([self._without(row, failed[row.request]) if row.request in failed else row for row in rows])
        if self._outputs.new:
            self._announce()
        done = Done(batch.number, rows, (batch.began, batch.began, now, now), again=again)
        self.running = None
        following = self._start_next()
        if following is not None:
            done.next, done.through = following.number, following.through
        self._send(done)
        if following is None and self._stopping:
            self._end(self, EXITED)

    def _perhaps_failed(self, row: Row) -> Row:
        if any(isinstance(tensor.data, tuple) for tensor in row.outputs) or not self._faults.answer_fails():
            return row
        return Row(row.request, (), Failure("MODEL_FAILED", "the model has failed, as it was told to"))

    def _without(self, row: Row, failure: Failure) -> Row:
        """Replaces a response with the error of a call."""
        for tensor in row.outputs:
            for handle in tensor.data if isinstance(tensor.data, tuple) else ():
                self._outputs.out.discard((handle.segment, handle.offset))
        return Row(row.request, (), failure)

    def _announce(self) -> None:
        for segment, audience in self._outputs.new:
            self._send(Map(segment, SEGMENT_BYTES, None, audience))
        self._outputs.new.clear()

    # ------------------------------------------------------------------------------------ leases

    def lend(self, lease: SimLease) -> None:
        if self.dead:
            return
        assert self._lease is None, "an instance is lent twice"
        assert self.running is None, "a busy instance is lent"
        assert not len(self._waiting), "an instance with work is lent"
        if self._calling is not None:  # its calls refer to requests by the broker's numbers
            lease.closed = True
            self._send(LeaseOver(lease.number, True))
            return
        self._lease = lease
        self.serve()

    def serve(self) -> None:
        """Runs the next request that has arrived over the lease."""
        lease = self._lease
        if self.dead or lease is None or self.running is not None or not lease.requests:
            return
        request = lease.begin()
        rows = request.inputs[0].shape[0] if self.model.policy.max_batch else 0
        self._start(0, [Work(request.request, rows, request.inputs, None, "")])

    def _end_lease(self) -> None:
        """Ends the lease after the running request."""
        lease = self._lease
        if lease is None:
            return
        lease.ending = True
        if self.running is None:
            self._lease = None
            lease.closed = True
            self._send(LeaseOver(lease.number))

    def _finish_leased(self, lease: SimLease, batch: SimBatch) -> None:
        (work,) = batch.work_items
        row = Row(work.request, self._outputs.make(work, self._draws))
        if self._faults.of_answers:
            row = self._perhaps_failed(row)
        self.running = None
        if row.error is not None:
            unread = lease.answer(Fail(work.request, row.error.code, row.error.text), work.rows, batch.began)
        else:
            unread = lease.answer(Reply(work.request, 0, row.outputs), work.rows, batch.began)
        if unread == RECORDS // 2:
            self._send(LeaseLogged(lease.number))
        if lease.full or (lease.ending and not lease.requests):
            self._end_lease()
        self.serve()
        if self._stopping and self._lease is None:
            self._end(self, EXITED)

    # ------------------------------------------------------------------------------------ several responses or runs

    def _finish_several(self, batch: SimBatch) -> tuple[list[Work], tuple[int, ...]]:
        """Returns the requests answered by this Done, and those to run again."""
        if self.model.policy.decoupled:
            for work in batch.work_items:
                if names := self.model.policy.prompt_inputs:
                    tokens = round(size_of(work.inputs, names) * TOKENS_PER_BYTE)
                    self._send(Prefilled(work.request, tokens))
                self._stream(self._streams[work.request])
            return [], ()
        over, again = [], []
        for work in batch.work_items:
            runs = self._runs.pop(work.request, 0) + 1
            if runs < self.model.iterations:
                self._runs[work.request] = runs
                again.append(work.request)
            else:
                over.append(work)
        return over, tuple(again)

    def _more(self, message: More) -> None:
        stream = self._streams.get(message.request)
        if stream is not None:
            stream.window += message.count
            if not self._is_running(message.request):
                self._stream(stream)

    def _stream(self, stream: SimStream) -> None:
        """Sends as many responses as the window allows; the last one ends the stream."""
        number = stream.work.request
        if not stream.remaining:  # no responses are left, or the request was cancelled
            del self._streams[number]
            self._part(Row(number, ()))
        while stream.remaining and stream.window:
            stream.remaining -= 1
            stream.window -= 1
            if not stream.remaining:
                del self._streams[number]
            self._part(Row(number, self._outputs.make(stream.work, self._draws), more=stream.remaining > 0))

    def _part(self, row: Row) -> None:
        if self._outputs.new:
            self._announce()
        self._send(Streamed((row,)))
