"""Simulated clients: they send requests and track which of them are unanswered.

Invariant: a response to an unknown or already answered request raises an AssertionError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any, Protocol

from msgspec import Struct

from shmserve.core import events
from shmserve.protocol.messages import (
    OWNER_SHIFT,
    Cancel,
    Fail,
    FailHeld,
    Goodbye,
    Handle,
    Hello,
    Infer,
    LeaseEnd,
    Map,
    More,
    Options,
    Part,
    Pong,
    Reclaim,
    Released,
    Reply,
    Return,
    Tensor,
    Unmap,
    Welcome,
)
from shmserve.protocol.roles import ALL_ROLES
from shmserve.sim.faults import POISON
from shmserve.sim.load import Arrival, Closed, Load
from shmserve.sim.plan import SimModel, may_stream
from shmserve.sim.processes.sim_lease import SimLease
from shmserve.sim.processes.tensors import SEGMENT_BYTES, SimInputs
from shmserve.sim.results import ModelResult
from shmserve.sim.world import World


class SimSequence(Struct):
    """A sequence: its id, and the number of requests that are still to be sent."""

    number: int
    remaining: int


class RequestSource(Protocol):
    """Sends requests through its clients."""

    closed: bool
    """Its callers wait for responses."""
    audience: str
    result: ModelResult

    def answered(self, request: SimRequest, at: int, code: str) -> None: ...
    def replace(self, dead: SimClient) -> None: ...


class SimRequest(Struct):
    """A request in flight. `until`: its deadline, 0 for none."""

    source: RequestSource
    sent: int
    until: int
    sequence: SimSequence | None = None
    poison: bool = False
    attached: object = None
    """What its source keeps with it."""


class SimClient:
    """A client with one connection to the broker."""

    def __init__(self, world: World, peer: int, source: RequestSource, hold_ns: int) -> None:
        self._world = world
        self._hold_ns = hold_ns
        self._next = 0
        self._add_to_digest = world.digest.add
        self.peer = peer
        self.source = source
        self.segment = (peer << OWNER_SHIFT) + 1
        self.open: dict[int, SimRequest] = {}
        self.held_inputs: set[int] = set()
        self.holds = 0
        self.leases: dict[tuple[str, int], SimLease] = {}
        """By model and version."""
        self.dead = False
        world.arrive((0, events.Opened(peer, source.audience, "lane", ALL_ROLES)))
        world.arrive((peer, Hello(1, 1, f"simulated {peer}", "memfd", source.closed)))
        world.arrive((peer, Map(self.segment, SEGMENT_BYTES)))

    def next_number(self) -> int:
        self._next += 1
        return self._next

    def receive(self, message: Any, at: int) -> None:
        """Processes a message from the broker that arrives at time `at`."""
        kind = type(message)
        if kind is Reply:
            self._answered(message.request, message.outputs, at, "")
        elif kind is Fail:
            self._failed(message, at)
        elif kind is FailHeld:
            self.held_inputs.add(message.request)
            self._answered(message.request, (), at, message.code)
        elif kind is Part:
            self._part(message, at)
        elif kind is Released:
            self.held_inputs.remove(message.request)
        elif kind is LeaseEnd:
            self._lease_ended(message, at)
        else:
            assert kind in (Welcome, Map, Unmap, Reclaim, Goodbye, Pong), message

    def _failed(self, message: Fail, at: int) -> None:
        assert message.request, f"a simulated client has made a mistake: {message.text}"
        request = self.open.get(message.request)
        if request is not None and message.code == "MODEL_FAILED" and request.poison:
            self._answered(message.request, (), at, "POISONED")
        else:
            self._answered(message.request, (), at, message.code)
        if message.code in ("INVALID_REQUEST", "INTERNAL", "UNSUPPORTED", "NOT_FOUND", "PROTOCOL"):
            self._world.note(message.text)

    def _answered(self, number: int, outputs: tuple[Tensor, ...], at: int, code: str) -> None:
        request = self._unanswered(number)
        del self.open[number]
        self._add_to_digest(self.peer, number, at, code)
        self._keep(outputs, at)
        request.source.answered(request, at, code)

    def _part(self, part: Part, at: int) -> None:
        request = self._unanswered(part.request)
        request.source.result.parts += bool(part.outputs)
        if part.last:
            self._answered(part.request, part.outputs, at, "")
            return
        self._keep(part.outputs, at)
        self._world.send_from_client(at, self.peer, More(part.request, 1))

    def _unanswered(self, number: int) -> SimRequest:
        request = self.open.get(number)
        if request is None:
            raise AssertionError(
                f"client {self.peer} received a response to request {number}, which it has not sent or which has "
                "already been answered"
            )
        return request

    def _keep(self, outputs: tuple[Tensor, ...], at: int) -> None:
        """Holds outputs in shared memory that is not the client's own for `hold_ns`, then returns them."""
        for tensor in outputs:
            if type(tensor.data) is tuple:
                handles = tuple(handle for handle in tensor.data if handle.segment != self.segment)
                if handles:
                    self.holds += len(handles)
                    self._world.at(at + self._hold_ns, self._give_back, handles)

    def _give_back(self, handles: tuple[Handle, ...]) -> None:
        if not self.dead:
            self.holds -= len(handles)
            self._world.send_from_client(self._world.now, self.peer, Return(handles))

    def receive_leased(self, answer: Any, at: int) -> None:
        if not self.dead:
            self.receive(answer, at)

    def lease_for(self, request: Infer) -> SimLease | None:
        """The lease over which to send the request, which is the only one in flight."""
        if len(self.open) == 1:
            for (model, version), lease in self.leases.items():
                if model == request.model and (version == request.version or lease.message.default):
                    return lease if lease.fits(request, self._world.now) else None
        return None

    def _lease_ended(self, end: LeaseEnd, at: int) -> None:
        for key, lease in list(self.leases.items()):
            if lease.number == end.lease:
                del self.leases[key]
                sent = lease.sent
                if sent is None or sent.request not in self.open:
                    return
                if end.error is None:
                    self._world.send_from_client(at, self.peer, sent)
                else:
                    self._failed(Fail(sent.request, end.error.code, end.error.text), at)

    def cancel(self, number: int) -> None:
        if not self.dead and number in self.open:
            self._world.send_from_client(self._world.now, self.peer, Cancel(number))


class LoadSource:
    """Sends the requests of one Load, spread over its clients, which `connect` creates."""

    def __init__(
        self,
        world: World,
        load: Load,
        model: SimModel,
        result: ModelResult,
        number: int,
        connect: Callable[[LoadSource], SimClient],
    ) -> None:
        self.world = world
        self._connect = connect
        world.sources += 1
        self.load = load
        self.result = result
        seed = f"{world.plan.seed} load {number} {load.model}"
        self._arrivals: Iterator[Arrival] | None = None
        if not isinstance(load.arrivals, Closed):
            self._arrivals = load.arrivals.arrivals(Random(f"{seed} arrivals"))
        self._draws = Random(f"{seed} rows")
        self._inputs = SimInputs(model.policy, load.distinct)
        self._batches = model.policy.max_batch > 0
        self._sequences = model.policy.sequence is not None
        self._loads = bool(model.instances)
        self._options = Options(priority=load.priority) if load.priority else None
        self._window = load.window if may_stream(model, world.plan.models) else 0
        self._special = bool(self._sequences or self._window or world.faults.of_requests)
        self._way_ns = 0 if self._special else world.plan.link_ns
        """Link delay to add to the time of an arrival. If nothing depends on the time of sending, requests are
        scheduled for the time at which they reach the broker, which saves an event. Otherwise 0."""
        self.audience = load.audience
        self.closed = isinstance(load.arrivals, Closed)
        """Callers wait for responses. Only clients of closed loads accept leases: clients of other loads seldom have
        exactly one request in flight."""
        self._timeout_us = load.timeout_ns // 1000
        self._sequence_count = 0
        self._first_sequence = (number + 1) << 32
        self._turn = 0
        self.clients: list[SimClient] = []

    # ------------------------------------------------------------------------------------ arrivals

    def begin(self) -> None:
        for _ in range(self.load.clients):
            self.clients.append(self._connect(self))
        arrivals = self.load.arrivals
        if isinstance(arrivals, Closed):
            for _ in range(arrivals.callers):
                self.world.at(self.world.now, self._call, 0)
        else:
            self._next_arrival()

    def _next_arrival(self) -> None:
        assert self._arrivals is not None
        arrival = next(self._arrivals, None)
        if arrival is None:
            self.world.sources -= 1
        else:
            at, rows = arrival
            self.world.at(self.world.began + at + self._way_ns, self._arrive, rows)

    def _arrive(self, rows: int) -> None:
        """Sends a request now or, if nothing depends on the time of sending, delivers it to the broker now."""
        if not self._way_ns:
            if self._call(rows):
                self._next_arrival()
            return
        world = self.world
        sent = world.now - self._way_ns
        if world.may_send(sent):
            client, infer = self._new_request(rows, None, False, sent)
            world.arrive((client.peer, infer))
            self._next_arrival()

    def _call(self, rows: int) -> bool:
        """Sends a request. Returns False if the load is finished."""
        now = self.world.now
        if not self.world.may_send(now):
            return False
        sequence = None
        if self._sequences:
            self._sequence_count += 1
            low, high = self.load.sequence
            length = self._draws.randint(max(low, 1), max(high, low, 1))
            sequence = SimSequence(self._first_sequence + self._sequence_count, length)
        client, infer = self._new_request(rows, sequence, sequence is not None, now)
        lease = client.lease_for(infer) if client.leases else None
        if lease is not None:
            lease.send(infer)
        else:
            self.world.send_from_client(now, client.peer, infer)
        return True

    def _new_request(self, rows: int, sequence: SimSequence | None, first: bool, now: int) -> tuple[SimClient, Infer]:
        world, load = self.world, self.load
        if not rows:
            low, high = load.rows
            rows = low if low == high else self._draws.randint(low, high)
        self._turn += 1
        clients = self.clients
        client = clients[self._turn % len(clients)] if sequence is None else clients[sequence.number % len(clients)]
        number = client.next_number()
        request = SimRequest(self, now, now + load.timeout_ns if load.timeout_ns else 0, sequence)
        options = self._options
        if self._special:
            options = self._special_options(client, number, request, first)
        client.open[number] = request
        self.result.sent += 1
        if self._loads and not self.result.loaded:
            self.result.cold += 1
        world.unanswered += 1
        low, high = load.lengths
        length = low if low == high else self._draws.randint(low, high)
        inputs = self._inputs.make(rows if self._batches else 0, client.segment, self._draws, length)
        return client, Infer(number, load.model, 0, inputs, None, self._timeout_us, options)

    def _special_options(self, client: SimClient, number: int, request: SimRequest, first: bool) -> Options:
        """The options of requests with sequences, windows or faults."""
        options = Options(priority=self.load.priority, window=self._window)
        if request.sequence is not None:
            request.sequence.remaining -= 1
            options.sequence = request.sequence.number
            options.sequence_start, options.sequence_end = first, not request.sequence.remaining
        if self.world.faults.of_requests:
            request.poison, cancel = self.world.faults.request()
            if request.poison:
                options.parameters = {POISON: True}
            if cancel:
                self.world.at(self.world.now + self.world.plan.faults.cancel_ns, client.cancel, number)
        return options

    # ------------------------------------------------------------------------------------ responses

    def answered(self, request: SimRequest, at: int, code: str) -> None:
        result, world = self.result, self.world
        world.unanswered -= 1
        world.last_answer = at
        if request.until and at - request.until > result.overdue_ns:
            result.overdue_ns = at - request.until
        if code:
            result.failed[code] = result.failed.get(code, 0) + 1
        else:
            result.answered += 1
            result.latency.add(at - request.sent)
            if not request.until or at <= request.until:
                result.in_time += 1
                result.good += at <= world.ends
        if self.closed or request.sequence is not None:
            self._send_next(request, at, not code)

    def _send_next(self, request: SimRequest, at: int, well: bool) -> None:
        """Continues the sequence, or sends the closed-loop caller's next request."""
        sequence = request.sequence
        if sequence is not None and sequence.remaining and well:
            self.world.unanswered += 1
            self.world.at(at + self.load.gap_ns, self._continue, sequence)
        elif isinstance(self.load.arrivals, Closed):
            self.world.at(at + self.load.arrivals.think_ns, self._call, 0)

    def _continue(self, sequence: SimSequence) -> None:
        self.world.unanswered -= 1
        if sequence.remaining:
            now = self.world.now
            client, infer = self._new_request(0, sequence, False, now)
            self.world.send_from_client(now, client.peer, infer)

    def replace(self, dead: SimClient) -> None:
        """Replaces a dead client. Its sequences end."""
        at = self.clients.index(dead)
        self.clients[at] = self._connect(self)
        self.result.abandoned += len(dead.open)
        self.world.unanswered -= len(dead.open)
        for request in dead.open.values():
            if request.sequence is not None:
                request.sequence.remaining = 0
            self._send_next(request, self.world.now, False)
        dead.open.clear()
