"""Runs a fleet: balancers, servers, outages and the autoscaler, in steps of the network delay.

A message between a balancer and a server takes `network_ns`, so no event within a step of this length affects another
process within the same step. In each step, first the balancers run, then each server by itself. No time is rounded.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from math import ceil
from random import Random
from typing import Any

from msgspec import Struct

from shmserve.sim.results import SECOND
from shmserve.tools.plan.balancing import Balancer, Ring
from shmserve.tools.plan.fleet import Autoscale, FleetPlan, Outage, arrivals, keys
from shmserve.tools.plan.results import FleetResult, FleetWindow
from shmserve.tools.plan.servers import FOREVER, CoreServer, FleetServer, Flight, QueueServer

TOLERANCE = 0.1
"""Relative difference from the target up to which nothing changes."""


class FleetScaler:
    def __init__(self, rules: Autoscale, instances: int) -> None:
        self.rules = rules
        self._instances = instances
        self._wanted: deque[tuple[int, int]] = deque()
        self._in_flight = 0.0
        self._since = self._seen = 0
        self._level = 0

    def count(self, in_flight: int, now: int) -> None:
        """The number of requests in flight has changed."""
        self._in_flight += self._level * (now - self._seen)
        self._level, self._seen = in_flight, now

    def wanted(self, ready: int, coming: int, now: int) -> int:
        """The number of servers wanted from now on. `ready`: servers that share the load; `coming`: servers that are
        starting."""
        rules = self.rules
        self.count(self._level, now)
        mean = self._in_flight / max(now - self._since, 1)
        self._in_flight, self._since = 0.0, now
        share = mean / (max(ready, 1) * self._instances * rules.target)
        number = ready if abs(share - 1) <= TOLERANCE else ceil(max(ready, 1) * share)
        number = min(max(number, rules.minimum), rules.maximum)
        self._wanted.append((now, number))
        while self._wanted[0][0] < now - rules.down_ns:
            self._wanted.popleft()
        present = ready + coming
        return number if number >= present else min(present, max(number for _, number in self._wanted))


PROGRESS_EVERY = 4096
"""Arrivals between two calls of `progress`."""
LOST = "LOST"
"""Error code: the request was at a server that failed."""
UNREACHED = "UNREACHABLE"
"""Error code: no server could be reached within the permitted retries."""

Progress = Callable[[int, float], object]
"""Called with the number of requests sent and the simulated time in seconds."""


class FleetNode(Struct, eq=False):
    """A server and its state in the fleet. A server that comes back after an outage is a new node with the old name."""

    number: int
    name: int
    zone: int
    server: FleetServer
    began: int
    paid_from: int
    due: int = FOREVER
    """The time for which it is scheduled."""
    ended: int = -1
    alive: bool = True
    listed: bool = True
    """Balancers send to it."""
    leaving: bool = False
    """It finishes its requests and stops."""
    flights: set[Flight] = set()
    """Its requests, until it has answered them."""


def simulate_fleet(plan: FleetPlan, progress: Progress | None = None) -> FleetResult:
    """Runs the plan. `progress` is called every PROGRESS_EVERY arrivals."""
    plan.check()
    with _no_collector():
        return SimulatedFleet(plan, progress).run()


@contextmanager
def _no_collector() -> Iterator[None]:
    """Disables cyclic garbage collection: the core creates no cycles per request, and a large fleet is slow to scan."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class SimulatedFleet:
    def __init__(self, plan: FleetPlan, progress: Progress | None) -> None:
        self._plan = plan
        self._progress = progress
        self._random = Random(f"{plan.seed} fleet")
        self._ring = Ring()
        self._balancers = [Balancer(plan, number, self._ring) for number in range(plan.balancers)]
        self._nodes: list[FleetNode] = []
        self._listed = 0
        self._coming = 0
        """Servers that the autoscaler has started and that are not ready yet."""
        self._names = 0
        self._events: list[tuple[int, int, Callable[[Any, int], object], Any]] = []
        self._servers: list[tuple[int, int]] = []
        """Heap of (time, node) events; outdated entries are skipped."""
        self._number = 0
        self._now = 0
        self._in_flight = 0
        self._sending = True
        self._scaler = FleetScaler(plan.autoscale, plan.instances) if plan.autoscale is not None else None
        self._window_ns = -(-plan.duration_ns // plan.windows)
        windows = [FleetWindow(number * self._window_ns) for number in range(plan.windows)]
        self._result = FleetResult(plan.servers, plan.instances, plan.rate, plan.policy, 0.0, windows)

    # ------------------------------------------------------------------------------------ the loop

    def run(self) -> FleetResult:
        plan, events = self._plan, self._events
        for _ in range(plan.servers):
            self._names += 1
            self._start(self._names - 1, 0, 0)
        self._plan_events()
        times, which = arrivals(plan), keys(plan)
        arrival = next(times, FOREVER)
        last = sent = turn = 0
        balancers = plan.balancers
        while arrival < FOREVER or self._in_flight:
            begin = min(arrival, events[0][0] if events else FOREVER, self._servers[0][0] if self._servers else FOREVER)
            assert begin < FOREVER, f"{self._in_flight} requests in flight, and nothing to do"
            end = begin + plan.network_ns
            while True:
                if events and events[0][0] <= arrival:
                    if events[0][0] >= end:
                        break
                    self._now, _, what, argument = heappop(events)
                    what(argument, self._now)
                elif arrival < end:
                    self._now = last = arrival
                    turn += 1
                    self._arrive(Flight(arrival, next(which), turn % balancers, self._until(arrival)))
                    arrival = next(times, FOREVER)
                    sent += 1
                    if self._progress is not None and not sent % PROGRESS_EVERY:
                        self._progress(sent, last / SECOND)
                else:
                    break
            self._sending = arrival < FOREVER
            self._run_servers(end)
        return self._close(max(last, round(plan.seconds * SECOND) if not plan.requests else 0))

    def _run_servers(self, end: int) -> None:
        servers, nodes = self._servers, self._nodes
        while servers and servers[0][0] < end:
            due, number = heappop(servers)
            node = nodes[number]
            if due == node.due:
                self._advance(node, end)

    def _advance(self, node: FleetNode, end: int) -> None:
        if node.alive:
            node.due = node.server.advance(end)
            if node.due < FOREVER:
                heappush(self._servers, (node.due, node.number))

    def _at(self, time: int, what: Callable[[Any, int], object], argument: Any) -> None:
        self._number += 1
        heappush(self._events, (time, self._number, what, argument))

    # ------------------------------------------------------------------------------------ requests

    def _until(self, now: int) -> int:
        return now + self._plan.timeout_ns if self._plan.timeout_ns else 0

    def _arrive(self, flight: Flight) -> None:
        self._in_flight += 1
        if self._scaler is not None:
            self._scaler.count(self._in_flight, self._now)
        self._window(flight.sent).sent += 1
        self._send(flight, self._now)

    def _send(self, flight: Flight, now: int) -> None:
        """Sends a request to the server that its balancer chooses."""
        balancer = self._balancers[flight.balancer]
        number = balancer.choose(flight.key, flight.node)
        if number < 0:
            self._end_flight(flight, now, UNREACHED)
            return
        flight.tries += 1
        flight.node = number
        balancer.count(number, 1)
        node = self._nodes[number]
        if not node.alive:
            self._at(now + self._plan.connect_ns, self._unreached, flight)
            return
        node.flights.add(flight)
        at = now + self._plan.network_ns
        node.server.submit(flight, at)
        if at < node.due:
            node.due = at
            heappush(self._servers, (at, number))

    def _answered(self, flight: Flight, at: int, code: str) -> None:
        """Called when a server has answered."""
        self._nodes[flight.node].flights.discard(flight)
        self._at(at + self._plan.network_ns, self._answer, (flight, code))

    def _answer(self, answer: tuple[Flight, str], now: int) -> None:
        """The response reaches the balancer."""
        flight, code = answer
        self._balancers[flight.balancer].count(flight.node, -1)
        self._end_flight(flight, now, code)

    def _unreached(self, flight: Flight, now: int) -> None:
        """The balancer has given up connecting to a failed server. Nothing was sent, so the request can go to another
        server."""
        self._balancers[flight.balancer].count(flight.node, -1)
        self._retry(flight, now, UNREACHED)

    def _retry(self, flight: Flight, now: int, code: str) -> None:
        if flight.tries > self._plan.retries:
            self._end_flight(flight, now, code)
            return
        self._result.retried += 1
        self._send(flight, now)

    def _end_flight(self, flight: Flight, now: int, code: str) -> None:
        self._in_flight -= 1
        if self._scaler is not None:
            self._scaler.count(self._in_flight, now)
        window = self._window(flight.sent)
        if code:
            window.failed += 1
            failed = self._result.failed
            failed[code] = failed.get(code, 0) + 1
        else:
            window.latency.add(now - flight.sent)
            window.good += not flight.until or now <= flight.until
        node = self._nodes[flight.node] if flight.node >= 0 else None
        if node is not None and node.leaving and not node.flights:
            self._end(node, now)

    def _window(self, sent: int) -> FleetWindow:
        windows = self._result.windows
        return windows[min(sent // self._window_ns, len(windows) - 1)]

    # ------------------------------------------------------------------------------------ servers

    def _start(self, name: int, now: int, paid_from: int) -> None:
        """A server is ready, and balancers send to it."""
        plan, number = self._plan, len(self._nodes)
        kind: type[FleetServer] = QueueServer if plan.fast else CoreServer
        server = kind(plan, f"{name} {number}", now, self._answered)
        node = FleetNode(number, name, name % plan.zones, server, now, paid_from)
        self._nodes.append(node)
        self._listed += 1
        self._result.most_servers = max(self._result.most_servers, self._listed)
        self._ring.add(number, name)
        for balancer in self._balancers:
            balancer.add(number)
        if plan.mtbf_s:
            self._at(now + round(self._random.expovariate(1 / plan.mtbf_s) * SECOND), self._random_failure, node)

    def _unlist(self, node: FleetNode) -> None:
        if node.listed:
            node.listed = False
            self._listed -= 1
            self._ring.remove(node.number)
            for balancer in self._balancers:
                balancer.remove(node.number)

    def _end(self, node: FleetNode, now: int) -> None:
        if node.ended < 0:
            node.ended = now
            node.alive = False

    def _random_failure(self, node: FleetNode, now: int) -> None:
        if node.alive and self._sending:
            self._fail(node, now, self._plan.repair_ns)

    def _outage(self, outage: Outage, now: int) -> None:
        alive = [node for node in self._nodes if node.alive]
        if outage.zone >= 0:
            hit = [node for node in alive if node.zone == outage.zone]
        else:
            hit = self._random.sample(alive, min(outage.servers, len(alive)))
        for node in hit:
            self._fail(node, now, outage.for_ns)

    def _fail(self, node: FleetNode, now: int, for_ns: int) -> None:
        """The server fails, with all its requests. Balancers notice it later."""
        self._advance(node, now)
        self._end(node, now)
        noticed = min(self._plan.detect_ns, for_ns or FOREVER)
        self._at(now + noticed, self._failure_detected, node)
        if for_ns and not node.leaving:
            self._at(now + for_ns, self._repaired, node.name)

    def _failure_detected(self, node: FleetNode, now: int) -> None:
        self._unlist(node)
        flights, node.flights = sorted(node.flights, key=lambda flight: flight.sent), set()
        for flight in flights:
            self._balancers[flight.balancer].count(node.number, -1)
            if self._plan.retry_lost:
                self._retry(flight, now, LOST)
            else:
                self._end_flight(flight, now, LOST)

    def _repaired(self, name: int, now: int) -> None:
        self._start(name, now, now)

    # ------------------------------------------------------------------------------------ what happens at given times

    def _plan_events(self) -> None:
        plan = self._plan
        begins = [outage.at_ns for outage in plan.outages] + [surge.at_ns for surge in plan.surges]
        self._result.disturbed_ns = min(begins, default=-1)
        for outage in plan.outages:
            self._at(outage.at_ns, self._outage, outage)
        if plan.report_ns:
            self._at(plan.report_ns, self._report, None)
        if self._scaler is not None:
            self._at(self._scaler.rules.every_ns, self._scale, self._scaler)
        for window in self._result.windows:
            self._at(window.start_ns + self._window_ns - 1, self._count_servers, window)

    def _count_servers(self, window: FleetWindow, now: int) -> None:
        window.servers = self._listed

    def _report(self, _: None, now: int) -> None:
        in_flight = [len(node.flights) for node in self._nodes]
        for balancer in self._balancers:
            balancer.report(in_flight)
        if self._sending:
            self._at(now + self._plan.report_ns, self._report, None)

    def _scale(self, scaler: FleetScaler, now: int) -> None:
        rules = scaler.rules
        wanted = scaler.wanted(self._listed, self._coming, now)
        for _number in range(wanted - self._listed - self._coming):
            self._coming += 1
            self._names += 1
            self._at(now + rules.start_ns, self._scaled_up, (self._names - 1, now))
        surplus = self._listed + self._coming - wanted
        usable = [node for node in reversed(self._nodes) if node.listed and node.alive]
        for node in usable[: max(surplus, 0)]:
            self._unlist(node)
            node.leaving = True
            if not node.flights:
                self._end(node, now)
        if self._sending:
            self._at(now + rules.every_ns, self._scale, scaler)

    def _scaled_up(self, started: tuple[int, int], now: int) -> None:
        name, paid_from = started
        self._coming -= 1
        self._start(name, now, paid_from)

    # ------------------------------------------------------------------------------------ the end

    def _close(self, last: int) -> FleetResult:
        result, plan = self._result, self._plan
        result.seconds = last / SECOND
        result.elapsed_s = max(self._now, last) / SECOND
        stop = max(self._now, last, 1)
        for node in self._nodes:
            end = node.ended if node.ended >= 0 else stop
            result.hits += node.server.hits
            result.instance_ns += (min(end, last) - min(node.paid_from, last)) * plan.instances
            if node.ended < 0 and stop > node.began:
                result.busy.append(node.server.busy_ns / plan.instances / (stop - node.began))
        result.busy.sort()
        result.close()
        return result
