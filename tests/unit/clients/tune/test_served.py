"""What a measurement says: percentiles of windows, and what it says of the load generator."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from random import Random
from typing import Any

from msgspec.structs import replace

from shmserve.clients.tune.bench import Observation
from shmserve.clients.tune.confirm import Confirmed, Point
from shmserve.clients.tune.goal import Goal
from shmserve.clients.tune.predict import Prediction
from shmserve.clients.tune.reasons import reasons
from shmserve.clients.tune.served import MOST_IN_FLIGHT, SECOND, WINDOW_COUNT, WINDOWS, _Load, _p99, _quantile
from shmserve.clients.tune.space import Candidate
from shmserve.clients.tune.tuner import Outcome, choose
from tests.unit.clients.tune.simulated import MS, tuned


def test_one_pause_does_not_decide() -> None:
    count = WINDOWS * WINDOW_COUNT
    calm = [(at, 1000 + at % 100) for at in range(count)]
    paused = [(at, 50_000 if at < count // 20 else latency) for at, latency in calm]
    for answers, expected in ((calm, 1099), (paused, 1099)):
        assert abs(_p99(answers, sorted(latency for _, latency in answers)) - expected) <= 1
    few = paused[: count // 2]
    assert _p99(few, sorted(latency for _, latency in few)) == 50_000
    assert _quantile([], 0.99) == math.inf


def test_a_load_ends_before_the_server_refuses_requests() -> None:
    """Too many requests in flight mean that the server is overloaded, not that requests fail."""
    sent = 0

    class Silent:
        def submit(self, model: str, inputs: Mapping[str, Any]) -> asyncio.Future[Any]:
            nonlocal sent
            sent += 1
            return asyncio.get_running_loop().create_future()

    async def run() -> Observation:
        client: Any = Silent()
        load = _Load(client, "net", [{}], lambda: (0, 0))
        await asyncio.wait_for(load.open(1e6, 1.0, 1000.0 * SECOND, Random(1)), 60)
        return load.observation()

    found = asyncio.run(run())
    assert found.overloaded
    assert (found.failed, found.p99_ns) == (0, math.inf)
    assert sent == MOST_IN_FLIGHT


def point(rate: float, p99_ms: float, holds: bool, late_ms: float = 0.0) -> Point:
    return Point(rate, rate, p99_ms * MS / 2, p99_ms * MS, 1.0, holds, late_ms * MS)


def confirmed(candidate: Candidate, *points: Point) -> Confirmed:
    return Confirmed(candidate, Prediction(candidate, 1000.0, 1.0, 1.0, 1.0, 0.5), list(points))


def test_the_search_for_the_highest_rate() -> None:
    one = confirmed(Candidate(1, 1, 8))
    assert one.next_rate() == 1000
    one.points.append(point(1000, 10, True))
    assert one.next_rate() > 1000
    one.points.append(point(1150, 30, False))
    assert 1000 < one.next_rate() < 1150
    one.points.append(point(1110, 30, False))
    one.points.append(point(1080, 10, True))
    assert one.next_rate() == 0
    assert (one.rate, one.failed_rate) == (1080, 1110)
    none = confirmed(Candidate(1, 1, 8), point(1000, 30, False))
    assert none.next_rate() < 1000
    assert none.rate == 0
    # From a prediction that is wrong by a factor of 2, the limit is bracketed after five measurements.
    while not none.rate:
        rate = none.next_rate()
        none.points.append(point(rate, 10, rate < 500))
    assert len(none.points) == 5
    # The majority of the measurements of a rate counts.
    shaky = confirmed(Candidate(1, 1, 8), point(500, 10, True), point(500, 30, False), point(500, 12, True))
    assert shaky.holds_at(500)
    assert shaky.p99_ns(500) == 12 * MS


def test_the_choice_among_measured_settings() -> None:
    outcome = Outcome(tuned(), Goal(20 * MS, memory=300))
    small = confirmed(Candidate(1, 1, 8), point(900, 10, True))
    large = confirmed(Candidate(4, 1, 8), point(1500, 10, True))
    large.memory = 400
    broken = confirmed(Candidate(2, 1, 8), point(2000, 10, True))
    broken.error = "3 requests failed"
    outcome.confirmed = [broken, large, small]
    assert choose(outcome) == small.candidate
    outcome.goal = replace(outcome.goal, memory=0)
    assert choose(outcome) == large.candidate


def test_a_late_load_generator_is_reported() -> None:
    outcome = Outcome(tuned(), Goal(20 * MS))
    outcome.chosen = outcome.model.current
    outcome.confirmed = [confirmed(outcome.chosen, point(1000, 10, True), point(1100, 30, False, late_ms=15))]
    assert any("load generator itself was late by up to 15.0 ms" in text for text in reasons(outcome))
    outcome.confirmed = [confirmed(outcome.chosen, point(1000, 10, True), point(1100, 30, False, late_ms=1))]
    assert not any("load generator" in text for text in reasons(outcome))
