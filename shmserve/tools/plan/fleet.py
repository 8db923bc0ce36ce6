"""What to simulate: servers, load balancers, load and failures, as immutable values; and the requests of a plan."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, repeat
from random import Random

from msgspec import Struct

from shmserve.errors import InvalidRequest
from shmserve.sim.plan import SimModel
from shmserve.sim.results import SECOND

MS = 1_000_000

POLICIES = ("random", "round-robin", "two-choices", "least", "hash", "bounded-hash")
"""How balancers choose a server; see docs/sizing.md."""
KEYED = ("hash", "bounded-hash")


class Outage(Struct, frozen=True):
    """Servers fail at `at_ns`: all servers of `zone` or, if that is -1, `servers` random ones. They return after
    `for_ns`; 0: never."""

    at_ns: int
    for_ns: int = 0
    zone: int = -1
    servers: int = 1


class Surge(Struct, frozen=True):
    """The rate is multiplied by `factor` from `at_ns` on, for `for_ns` (0: to the end)."""

    factor: float
    at_ns: int
    for_ns: int = 0


class Autoscale(Struct, frozen=True):
    """The number of servers follows the load. Every `every_ns`, computes the number that brings the requests in flight
    per instance to `target`. A new server is ready after `start_ns`. The number of servers falls to the largest number
    wanted within the last `down_ns`."""

    minimum: int
    maximum: int
    target: float = 1.0
    every_ns: int = 15 * SECOND
    start_ns: int = 60 * SECOND
    down_ns: int = 300 * SECOND


class FleetPlan(Struct, frozen=True, kw_only=True):
    """`model` has the instances of one server. Arrivals end after `seconds` or `requests`, whichever is first (0: no
    limit). The simulation ends when all requests have been answered.

    `balancers`: each gets its share of the requests, and knows its own requests in flight. With `report_ns`, servers
    report their requests in flight at this interval, and a balancer adds those that it has sent since.
    """

    model: SimModel
    servers: int
    rate: float
    seconds: float = 0.0
    requests: int = 0
    policy: str = "two-choices"
    balancers: int = 1
    report_ns: int = 0
    bound: float = 1.25
    """For bounded-hash: maximum number of requests in flight, relative to the mean."""
    keys: int = 0
    """Number of different requests; 0: all differ."""
    skew: float = 1.0
    """Exponent of Zipf's law: how much more frequent the first keys are."""
    cached: int = 0
    """Responses that the cache of a server holds; 0: no cache."""
    network_ns: int = 250_000
    """One-way delay between a balancer and a server."""
    timeout_ns: int = 0
    zones: int = 3
    outages: tuple[Outage, ...] = ()
    mtbf_s: float = 0.0
    """Mean time between failures of one server; 0: none."""
    repair_ns: int = 60 * SECOND
    """Time until a failed server is back."""
    detect_ns: int = 2 * SECOND
    """Time until balancers stop sending to a server that failed."""
    connect_ns: int = 200 * MS
    """Time until a balancer gives up a connection to a server that failed."""
    retries: int = 2
    """How often a request that did not reach a server is retried at another one."""
    retry_lost: bool = False
    """Also retry requests that were at a server that failed. They may run twice."""
    surges: tuple[Surge, ...] = ()
    autoscale: Autoscale | None = None
    fast: bool = False
    """Servers are queues instead of the core."""
    seed: int = 0
    windows: int = 40
    """Number of windows into which the duration of the load is divided for the timeline."""

    def check(self) -> None:
        if self.policy not in POLICIES:
            raise InvalidRequest(f"'{self.policy}' is not a policy; the policies are {', '.join(POLICIES)}")
        if self.policy in KEYED and not self.keys:
            raise InvalidRequest(f"policy {self.policy} needs keys: the number of different requests")
        if not self.seconds and not self.requests:
            raise InvalidRequest("a plan needs an end: seconds, or a number of requests")
        worst = max((outage.zone for outage in self.outages), default=-1)
        if worst >= self.zones:
            raise InvalidRequest(f"zone {worst} fails, and there are {self.zones}, from 0 on")
        begins = max([0, *(outage.at_ns for outage in self.outages), *(surge.at_ns for surge in self.surges)])
        if begins >= self.duration_ns:
            times = f"{begins / SECOND:g} s, and requests are sent for {self.duration_ns / SECOND:.3g} s"
            raise InvalidRequest(f"something begins after {times}: simulate more seconds or requests")
        scale = self.autoscale
        if scale is not None and not scale.minimum <= self.servers <= scale.maximum:
            raise InvalidRequest(f"{self.servers} servers are not within {scale.minimum} to {scale.maximum}")

    @property
    def instances(self) -> int:
        """Instances of one server."""
        return len(self.model.instances)

    @property
    def duration_ns(self) -> int:
        """How long requests are sent; an estimate if the plan gives a number of requests."""
        by_count = self.requests / self.rate if self.requests else self.seconds
        return max(1, round(min(self.seconds or by_count, by_count) * SECOND))


_CHUNK = 4096


def rate_at(plan: FleetPlan, at: int) -> tuple[float, int]:
    """Requests per second at this time, and when the rate changes next (0: never)."""
    rate, changes = plan.rate, []
    for surge in plan.surges:
        end = surge.at_ns + surge.for_ns if surge.for_ns else 0
        if surge.at_ns <= at and (not end or at < end):
            rate *= surge.factor
        changes += [change for change in (surge.at_ns, end) if change > at]
    return rate, min(changes, default=0)


def arrivals(plan: FleetPlan) -> Iterator[int]:
    """Times in ns: a Poisson process whose rate changes with the surges."""
    draw = Random(f"{plan.seed} arrivals").expovariate
    limit = round(plan.seconds * SECOND) if plan.seconds else 1 << 62
    count = 0
    now = 0.0
    rate, change = rate_at(plan, 0)
    while True:
        following = now + draw(rate) * SECOND
        if change and following >= change:  # the process is memoryless: restart it at the change
            now = float(change)
            rate, change = rate_at(plan, change)
            continue
        now = following
        count += 1
        if now > limit or (plan.requests and count > plan.requests):
            return
        yield round(now)


def keys(plan: FleetPlan) -> Iterator[int]:
    """The key of each request: numbers from 0, distributed by Zipf's law; -1 if the plan has no keys."""
    if not plan.keys:
        yield from repeat(-1)
    draws = Random(f"{plan.seed} keys")
    weights = list(accumulate(1.0 / (number**plan.skew) for number in range(1, plan.keys + 1)))
    numbers = range(plan.keys)
    while True:
        yield from draws.choices(numbers, cum_weights=weights, k=_CHUNK)
