"""Results of a measurement: percentiles of windows, and the state of the load generator."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from itertools import count
from typing import Any

import pytest
from msgspec.structs import replace

from shmserve.errors import ConnectionLost, ModelFailed, QueueTimeout, ServeError, Unavailable
from shmserve.repo.config.schema import ModelConfig
from shmserve.tools.load.generation.sending import LoadSender
from shmserve.tools.load.plan import SECOND, OpenLoop
from shmserve.tools.load.targets.base import SequencePart
from shmserve.tools.tune import served
from shmserve.tools.tune.bench import Observation
from shmserve.tools.tune.confirm import Confirmation, Confirmed, RatePoint
from shmserve.tools.tune.goal import Goal
from shmserve.tools.tune.predict import Prediction
from shmserve.tools.tune.reasons import reasons
from shmserve.tools.tune.served import MAX_IN_FLIGHT, WINDOW_COUNT, WINDOWS, _p99, _quantile, closed, opened
from shmserve.tools.tune.space import Candidate
from shmserve.tools.tune.tuner import TuningOutcome, choose
from tests.support.cases import cases
from tests.unit.tools.tune.simulated import MS, tuned


def test_one_pause_does_not_affect_the_percentile() -> None:
    count = WINDOWS * WINDOW_COUNT
    calm = [1000.0 + at % 100 for at in range(count)]
    paused = [50_000.0] * (count // 20) + calm[count // 20 :]
    for latencies, expected in ((calm, 1099), (paused, 1099)):
        assert abs(_p99(latencies) - expected) <= 1
    assert _p99(paused[: count // 2]) == 50_000
    assert _quantile([], 0.99) == math.inf


class ScriptedSlot:
    """Answers each request at once with the error of its number, or with nothing if there is none."""

    def __init__(self, error: Callable[[int], ServeError | None], answers: bool = True) -> None:
        self.error, self.answers = error, answers
        self.sent = 0

    async def send(self, body: Any, part: SequencePart | None) -> None:
        self.sent += 1
        if (error := self.error(self.sent)) is not None:
            raise error
        if not self.answers:
            await asyncio.get_running_loop().create_future()

    async def stream(self, body: Any, part: SequencePart | None, on_answer: Callable[[], None]) -> None:
        raise NotImplementedError


class FakeTime:
    """A clock that a pause of this process does not advance."""

    def __init__(self) -> None:
        self.now = SECOND

    def read(self) -> int:
        self.now += 1
        return self.now

    async def until(self, at: int) -> None:
        self.now = max(self.now, at)
        await asyncio.sleep(0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    monkeypatch.setattr(served, "monotonic_ns", fake.read)
    return fake


def observed(
    slot: ScriptedSlot, load: Callable[[LoadSender], Coroutine[Any, Any, Observation]], clock: FakeTime
) -> Observation:
    async def opened_slot() -> ScriptedSlot:
        return slot

    async def run() -> Observation:
        unused: Any = {"stream": False, "sequences": None, "ids": count(1)}
        sender = LoadSender([{}], opened_slot, clock.read, clock.until, **unused)
        return await asyncio.wait_for(load(sender), 60)

    return asyncio.run(run())


def test_loads_end_before_and_when_the_server_refuses_requests(clock: FakeTime) -> None:
    """Too many requests in flight mean that the server is overloaded, not that requests fail."""
    silent = ScriptedSlot(lambda number: None, answers=False)
    found = observed(silent, lambda sender: opened(sender, OpenLoop(1e6), 1.0, 1000.0 * SECOND), clock)
    assert found.overloaded
    assert (found.failed, found.p99_ns) == (0, math.inf)
    assert silent.sent == MAX_IN_FLIGHT - 1
    full = ScriptedSlot(lambda number: Unavailable("Exceeds maximum queue size"))
    found = observed(full, lambda sender: closed(sender, 4, 1000.0), clock)
    assert found.refused >= 4
    assert found.failed == 0


def point(rate: float, p99_ms: float, holds: bool, late_ms: float = 0.0) -> RatePoint:
    return RatePoint(rate, rate, p99_ms * MS / 2, p99_ms * MS, 1.0, holds, late_ms * MS)


def confirmed(candidate: Candidate, *points: RatePoint) -> Confirmed:
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
    assert (one.rate, one.failed_rate) == (1080, 1110)
    # Both are measured again until each has had the same outcome twice.
    assert one.next_rate() == 1110
    one.points.append(point(1110, 30, False))
    assert one.next_rate() == 1080
    one.points.append(point(1080, 10, True))
    assert one.next_rate() == 0
    none = confirmed(Candidate(1, 1, 8), point(1000, 30, False))
    assert none.next_rate() < 1000
    assert none.rate == 0
    # If the prediction is wrong by a factor of 2, the limit is bracketed after five measurements.
    while not none.rate:
        rate = none.next_rate()
        none.points.append(point(rate, 10, rate < 500))
    assert len(none.points) == 5
    # The majority of the measurements of a rate counts.
    shaky = confirmed(Candidate(1, 1, 8), point(500, 10, True), point(500, 30, False), point(500, 12, True))
    assert shaky.holds_at(500)
    assert shaky.p99_ns(500) == 12 * MS
    one = confirmed(Candidate(1, 1, 8), point(1000, 50, False))
    # Half of the rate holds, and all rates up to 1200 hold, except for that one measurement. That measurement must not
    # determine the limit permanently.
    for _ in range(8):
        rate = one.next_rate()
        one.points.append(point(rate, 10, rate < 1200))
    assert 1000 < one.rate < 1200
    # A rate that has held by chance is not the limit either.
    one = confirmed(Candidate(1, 1, 8), point(1000, 10, True))
    for _ in range(8):
        rate = one.next_rate()
        one.points.append(point(rate, 10, rate < 900))
    assert 800 < one.rate < 900


def test_a_candidate_is_given_up_after_two_failures() -> None:
    class Slow:
        def __init__(self) -> None:
            self.rates: dict[int, list[float]] = {}

        def apply(self, config: ModelConfig) -> None:
            self.count = config.instance_group[0].count

        def closed(self, callers: int, seconds: float, length: int = 0) -> Observation:
            return Observation(1.0, 1.0, 1.0, 1.0)

        def open(self, rate: float, seconds: float, give_up_ns: float) -> Observation:
            self.rates.setdefault(self.count, []).append(rate)
            return Observation(rate, 1.0, 1.0, 10 * MS if rate < 500 * (3 - self.count) else 90 * MS)

        def memory(self) -> int:
            return 0

        gpu_memory = memory

    bench = Slow()
    candidates = [Candidate(1, 1, 32), Candidate(2, 1, 32)]
    told = [(each, Prediction(each, 950.0, 1.0, 1.0, 1.0, 0.5)) for each in candidates]
    fast, slow = Confirmation(bench, tuned(), Goal(20 * MS), lambda text: None).run(told)
    assert 900 < fast.rate < 1000
    assert len(slow.points) == len(bench.rates[2]) == 2


@cases(
    (Unavailable("Exceeds maximum queue size: 8 requests are queued"), 20, False, True, False),
    (QueueTimeout("Request timeout expired"), 400, False, True, True),
    (ModelFailed("out of memory"), 20, True, False, None),
    (ConnectionLost("the server has ended"), 20, True, False, None),
)
def test_refused_requests_miss_the_target(
    error: ServeError, every: int, failed: bool, refused: bool, holds: bool | None, clock: FakeTime
) -> None:
    """They do not count as failures of the model, and do not end a measurement."""
    slot = ScriptedSlot(lambda number: None if number % every else error)
    found = observed(slot, lambda sender: opened(sender, OpenLoop(1e5), 0.01, 1000.0 * SECOND), clock)
    assert (found.failed > 0, found.refused > 0) == (failed, refused)
    assert (found.error, found.refusal) == ((str(error), "") if failed else ("", str(error)))
    if holds is not None:
        assert (found.p99_ns < math.inf) is holds
        assert found.p50_ns < math.inf


def test_the_choice_among_measured_settings() -> None:
    outcome = TuningOutcome(tuned(), Goal(20 * MS, memory=300))
    small = confirmed(Candidate(1, 1, 8), point(900, 10, True))
    large = confirmed(Candidate(4, 1, 8), point(1500, 10, True))
    large.memory = 400
    broken = confirmed(Candidate(2, 1, 8), point(2000, 10, True))
    broken.error = "3 requests failed"
    outcome.confirmed = [broken, large, small]
    assert choose(outcome) == small.candidate
    outcome.goal = replace(outcome.goal, memory=0)
    assert choose(outcome) == large.candidate


def test_reasons_name_delays_that_make_no_difference_and_a_late_load_generator() -> None:
    outcome = TuningOutcome(tuned(), Goal(20 * MS))
    outcome.chosen = outcome.model.current
    for late_ms, is_told in ((15, True), (1, False)):
        outcome.confirmed = [confirmed(outcome.chosen, point(1000, 10, True), point(1100, 30, False, late_ms))]
        assert ("load generator itself was late by up to 15.0 ms" in " ".join(reasons(outcome))) is is_told

    def told(*rates: float) -> str:
        settings = [replace(outcome.model.current, delay_us=1000 * number) for number in range(len(rates))]
        outcome.ranked = [Prediction(*each, 1.0, 1.0, 1.0, 0.5) for each in zip(settings, rates, strict=True)]
        return next(text for text in reasons(outcome) if text.startswith("Queue delay"))

    same = "Queue delay: none. Delays of 0 to 2 ms make no difference: predicted 1,000 to 1,010 requests/s."
    assert told(1000, 1010, 1005) == same
    others = "Queue delay: none. Predicted requests/s by delay: 0 ms: 500, 1 to 2 ms: 1,000, 3 ms: 800."
    assert told(500, 1000, 1000, 800) == others
