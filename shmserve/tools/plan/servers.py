"""The servers of a fleet: as a queue, or as the core with simulated workers in a simulation of its own.

The queue is much faster than the core, with the same times for stateless requests of one model. It follows the core's
rules for such requests: a batch takes what fits, up to the maximum and after the delay; a batch is sent ahead to each
busy instance; requests that cannot be answered within their deadline are refused; identical requests are answered from
the cache. It also models the turns and links of the broker. tests/sim/test_fleet.py compares it with the core;
docs/sizing.md lists the differences.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from heapq import heappop, heappush
from random import Random
from typing import Any, Protocol
from zlib import crc32

from msgspec import Struct
from msgspec.structs import replace

from shmserve.core.owners.cache import OVERHEAD
from shmserve.protocol.messages import Infer
from shmserve.sim.load import AUDIENCE
from shmserve.sim.plan import Plan
from shmserve.sim.processes.clients import SimClient, SimRequest
from shmserve.sim.processes.tensors import SimInputs, size_of
from shmserve.sim.results import SECOND, ModelResult
from shmserve.sim.run import Simulation
from shmserve.tools.plan.fleet import FleetPlan

FOREVER = 1 << 62


class Flight(Struct, eq=False):
    """A request. `node`: the number of the server that has it; `tries`: how often it was sent."""

    sent: int
    key: int
    balancer: int
    until: int
    """Its deadline; 0: none."""
    node: int = -1
    tries: int = 0


Answered = Callable[[Flight, int, str], None]
"""Called with the time at which a server has answered, and the error code, if there is one."""


class FleetServer(Protocol):
    """A server, which starts at `began`. Times are those of the fleet."""

    def __init__(self, plan: FleetPlan, name: str, began: int, answered: Answered) -> None: ...

    @property
    def busy_ns(self) -> int:
        """Total time that its instances have run."""

    @property
    def hits(self) -> int:
        """Number of responses from its cache."""

    def submit(self, flight: Flight, at: int) -> None:
        """Delivers a request at time `at`, which the server has not reached yet."""

    def advance(self, end: int) -> int:
        """Runs everything before `end`. Returns the time of the next event, or FOREVER."""


ARRIVES, FINISHES, REPORTS, WAKES = range(4)
LATE = "DEADLINE_EXCEEDED"
FULL = "UNAVAILABLE"


class _Waiting(Struct, gc=False):
    flight: Flight
    arrived: int
    until: int
    """Deadline; 0: none."""


class _Instance(Struct, gc=False):
    began: int = 0
    took: int = 0
    running: list[_Waiting] | None = None
    ahead: list[_Waiting] | None = None
    """The batch that was sent ahead."""
    ahead_at: int = 0
    """When it arrives."""


class QueueServer:
    def __init__(self, plan: FleetPlan, name: str, began: int, answered: Answered) -> None:
        policy, costs = plan.model.policy, Plan((plan.model,))
        self._answered = answered
        self._service = plan.model.service
        self._random = Random(f"{plan.seed} {name}")
        batching = policy.batching
        self._max_batch = policy.max_batch if batching is not None else 1
        self._delay = batching.delay_ns if batching is not None else 0
        self._limits = costs.limits
        self._link, self._turn, self._message = costs.link_ns, costs.turn_ns, costs.message_ns
        self._timeout = plan.timeout_ns
        self._queue: deque[_Waiting] = deque()
        self._instances = [_Instance() for _ in range(plan.instances)]
        self._idle = list(reversed(self._instances))
        self._events: list[tuple[int, int, int, Any]] = []
        self._number = 0
        self._turn_at = -1
        self._free = began
        """When the broker finishes its last turn."""
        self._wake = 0
        self._service_ns = self._spread_ns = 0
        """The core's estimates of the batch time and of its deviation."""
        self._cached = plan.cached
        self._responses: OrderedDict[int, None] = OrderedDict()
        self.busy_ns = 0
        self.hits = 0

    def submit(self, flight: Flight, at: int) -> None:
        self._at(at + self._link, ARRIVES, flight)

    def advance(self, end: int) -> int:
        events = self._events
        while events and events[0][0] < end:
            now, _, kind, what = heappop(events)
            if kind == FINISHES:
                self._finish(what, now)
                continue
            if now < self._free and now != self._turn_at:  # it waits for the next turn
                self._at(self._free, kind, what)
                continue
            if now == self._turn_at:
                self._free += self._message
            else:
                self._turn_at = now
                self._free = now + self._turn + self._message
            if kind == ARRIVES:
                self._arrive(what, now)
            elif kind == REPORTS:
                self._report(what, now)
            self._dispatch(now)
        return events[0][0] if events else FOREVER

    def _at(self, time: int, kind: int, what: Any) -> None:
        self._number += 1
        heappush(self._events, (time, self._number, kind, what))

    def _arrive(self, flight: Flight, now: int) -> None:
        if self._cached and flight.key in self._responses:
            self._responses.move_to_end(flight.key)
            self.hits += 1
            self._answer(flight, "")
        elif len(self._queue) >= self._limits.model_queue:
            self._answer(flight, FULL)
        else:
            self._queue.append(_Waiting(flight, now, now + self._timeout if self._timeout else 0))

    def _answer(self, flight: Flight, code: str) -> None:
        self._answered(flight, self._free + self._link, code)

    # ------------------------------------------------------------------------------------ batches

    def _dispatch(self, now: int) -> None:
        queue = self._queue
        while queue:
            if queue[0].until and queue[0].until <= now:
                self._answer(queue.popleft().flight, LATE)
            elif self._idle:
                batch = self._batch(now, 0)
                if batch is None:
                    return
                if batch:
                    self._start(self._idle.pop(), batch, self._free + self._link)
            elif not self._send_ahead(now):
                return

    def _batch(self, now: int, began: int) -> list[_Waiting] | None:
        """Takes the next batch. `began`: when the batch before it began; 0: none runs. Returns None if requests wait
        for more, and an empty list if all were refused."""
        queue = self._queue
        count = min(len(queue), self._max_batch)
        if self._delay and count < self._max_batch and now - queue[0].arrived < self._delay:
            wake = queue[0].arrived + self._delay
            if self._wake != wake:
                self._wake = wake
                self._at(wake, WAKES, None)
            return None
        return self._in_time([queue.popleft() for _ in range(count)], now, began)

    def _in_time(self, batch: list[_Waiting], now: int, began: int) -> list[_Waiting]:
        """Refuses requests that cannot be answered in time according to the core's estimate."""
        if not self._timeout:
            return batch
        done = now + self._service_ns + (4 * self._spread_ns if self._queue else 0)
        if began:
            done += max(0, began + self._service_ns - now)
        late = [each for each in batch if each.until < done]
        if not late:
            return batch
        for each in late:
            self._answer(each.flight, LATE)
        remaining = [each for each in batch if each.until >= done]
        if not remaining and not began:  # otherwise the estimate would never change
            self._service_ns -= self._service_ns >> 3
            self._spread_ns -= self._spread_ns >> 3
        # The core also fills the batch up again.
        while remaining and self._queue and len(remaining) < self._max_batch and self._queue[0].until >= done:
            remaining.append(self._queue.popleft())
        return remaining

    def _send_ahead(self, now: int) -> bool:
        """Sends a batch ahead to a busy instance, or extends one. False: no instance can take more."""
        if len(self._instances) > 1 and self._service_ns > self._limits.prefetch_ns:
            return False
        best = None
        for instance in self._instances:
            ahead = instance.ahead
            if (
                instance.running is not None
                and (ahead is None or len(ahead) < self._max_batch)
                and (best is None or instance.began < best.began)
            ):
                best = instance
        if best is None:
            return False
        if best.ahead is None:
            batch = self._batch(now, best.began)
            if batch:
                best.ahead, best.ahead_at = batch, self._free + self._link
            return batch is not None
        room = self._max_batch - len(best.ahead)
        queue = self._queue
        best.ahead += self._in_time([queue.popleft() for _ in range(min(room, len(queue)))], now, best.began)
        return True

    def _start(self, instance: _Instance, batch: list[_Waiting], at: int) -> None:
        instance.running, instance.began = batch, at
        instance.took = took = self._service.ns(len(batch), self._random)
        self._at(at + took, FINISHES, instance)

    def _finish(self, instance: _Instance, now: int) -> None:
        self.busy_ns += instance.took
        done, ahead = instance.running, instance.ahead
        assert done is not None
        self._at(now + self._link, REPORTS, (instance, done, instance.took, ahead is None))
        instance.running = instance.ahead = None
        if ahead is not None:
            self._start(instance, ahead, max(now, instance.ahead_at))

    def _report(self, report: tuple[_Instance, list[_Waiting], int, bool], now: int) -> None:
        """The broker receives the report of a batch. It says whether the instance had nothing more to run at its end;
        the batch that followed may have ended, too, before the broker takes this report."""
        instance, batch, took, idle = report
        known = self._service_ns
        self._spread_ns += (abs(took - (known or took)) - self._spread_ns) // 16
        self._service_ns = took if not known else (7 * known + took) // 8
        for each in batch:
            if self._cached and each.flight.key >= 0:
                self._responses[each.flight.key] = None
                if len(self._responses) > self._cached:
                    self._responses.popitem(last=False)
            self._answer(each.flight, LATE if 0 < each.until <= now else "")
        if idle:
            self._idle.append(instance)


CLIENTS = 4
"""Connections over which a server receives its requests."""
SETTLED = 2 * SECOND
"""Time in the server's simulation at which it enters the fleet: its model is deployed, and its clients are connected.
"""


class CoreServer:
    """`began`: fleet time at which the server starts. All servers of a fleet share the model of `plan`."""

    closed = False
    audience = AUDIENCE

    def __init__(self, plan: FleetPlan, name: str, began: int, answered: Answered) -> None:
        policy = plan.model.policy
        self._simulation = simulation = Simulation(server_plan(plan, name))
        simulation.deploy()
        self._world = simulation.world
        self._offset = SETTLED - began
        self._answered = answered
        self._model = policy.name
        self._timeout_us = plan.timeout_ns // 1000
        self._inputs = SimInputs(policy, 1)
        self._draws = Random(0)  # never used: requests have fixed rows and lengths
        self._rows = 1 if policy.max_batch else 0
        self.result = ModelResult(policy.name)
        self._clients = [simulation.connect(self) for _ in range(CLIENTS)]
        self._turn = 0
        self._world.advance(SETTLED)

    @property
    def busy_ns(self) -> int:
        return self._simulation.model_result(self._model).busy_ns

    @property
    def hits(self) -> int:
        return self._simulation.core.state.cache.hits

    def submit(self, flight: Flight, at: int) -> None:
        self._turn += 1
        client = self._clients[self._turn % CLIENTS]
        number = client.next_number()
        client.open[number] = SimRequest(self, at, 0, attached=flight)
        make = self._inputs
        rows = self._rows
        inputs = make.make(rows, client.segment, self._draws) if flight.key < 0 else make.of_key(rows, flight.key)
        message = Infer(number, self._model, 0, inputs, None, self._timeout_us, None)
        self._world.send_from_client(at + self._offset, client.peer, message)

    def advance(self, end: int) -> int:
        following = self._world.advance(end + self._offset)
        return following - self._offset if following < FOREVER else FOREVER

    def answered(self, request: SimRequest, at: int, code: str) -> None:
        flight = request.attached
        assert isinstance(flight, Flight)
        self._answered(flight, at - self._offset, code)

    def replace(self, dead: SimClient) -> None:
        raise AssertionError("clients of a fleet's server do not die")


def server_plan(plan: FleetPlan, name: str) -> Plan:
    model = plan.model
    limits = Plan((model,)).limits
    if plan.cached:
        model = replace(model, policy=replace(model.policy, cached=True))
        tensors = *model.policy.inputs, *model.policy.outputs
        size = OVERHEAD + sum(size_of(spec.dtype, spec.dims) for spec in tensors)
        limits = replace(limits, cache_bytes=plan.cached * size)
    return Plan((model,), seed=crc32(f"{plan.seed} {name}".encode()), limits=limits)
