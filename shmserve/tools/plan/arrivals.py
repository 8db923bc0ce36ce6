"""The requests of a fleet: when they arrive, and their keys."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, repeat
from random import Random

from shmserve.tools.plan.plan import SECOND, FleetPlan

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
