"""Measures the best candidates on the real server, in turn, so that a change of the machine's speed meets all of them.

With a target rate, each candidate is measured at that rate. Otherwise the highest rate that holds the p99 is searched:
up or down from the prediction, then between the last two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from msgspec import Struct, field

from shmserve.clients.tune.bench import Bench, Observation
from shmserve.clients.tune.goal import Goal
from shmserve.clients.tune.predict import Prediction
from shmserve.clients.tune.space import Candidate, TunedModel

FACTOR = 1.08
"""Step up or down while only one side is known. Each step is larger than the last by this factor."""
PRECISION = 1.04
ROUNDS = 7
RATE_ROUNDS = 3
HOPELESS = 0.97
"""A candidate is given up when it fails at this share of the best rate that another one holds."""
GIVE_UP = 10
"""A measurement ends early when requests wait for this many times the latency target."""

Progress = Callable[[str], None]


class Point(Struct, frozen=True):
    """A measurement at a rate."""

    rate: float
    per_s: float
    p50_ns: float
    p99_ns: float
    mean_batch: float
    holds: bool
    late_ns: float = 0.0
    """How late the load generator was."""


class Confirmed(Struct):
    """A candidate on the real server. `rate`: the highest that holds the p99, 0 if none does."""

    candidate: Candidate
    predicted: Prediction | None
    points: list[Point] = field(default_factory=list)
    memory: int = 0
    error: str = ""

    @property
    def rate(self) -> float:
        """With several measurements of a rate, their majority counts."""
        held = [rate for rate in {point.rate for point in self.points} if self.holds_at(rate)]
        return max(held, default=0.0)

    def holds_at(self, rate: float) -> bool:
        found = [point.holds for point in self.points if point.rate == rate]
        return 2 * sum(found) > len(found)

    def p99_ns(self, rate: float) -> float:
        return median(point.p99_ns for point in self.points if point.rate == rate)

    @property
    def failed_rate(self) -> float:
        """The lowest rate that does not hold the p99; 0: none is known."""
        rates = {point.rate for point in self.points}
        return min((rate for rate in rates if not self.holds_at(rate)), default=0.0)

    def next_rate(self) -> float:
        """The next rate to measure, 0 if the highest one is known."""
        low, high = self.rate, self.failed_rate
        if not self.points:
            return self.predicted.rate if self.predicted is not None else 0.0
        if not high or high < low:
            return max(point.rate for point in self.points) * FACTOR ** len(self.points)
        if not low:
            return high / FACTOR ** len(self.points)
        return 0.0 if high <= low * PRECISION else (low * high) ** 0.5


class Confirmation:
    def __init__(self, bench: Bench, model: TunedModel, goal: Goal, progress: Progress) -> None:
        self._bench = bench
        self._model = model
        self._goal = goal
        self._progress = progress
        self.found: list[Confirmed] = []

    def run(self, chosen: Sequence[tuple[Candidate, Prediction | None]]) -> list[Confirmed]:
        """`chosen`: the candidates, and what was predicted of them. Those of earlier calls stay among the results."""
        known = {each.candidate for each in self.found}
        self.found += [Confirmed(candidate, told) for candidate, told in chosen if candidate not in known]
        rounds = RATE_ROUNDS if self._goal.rate else ROUNDS
        for number in range(rounds):
            for each in self.found if number % 2 == 0 else reversed(self.found):
                rate = self._next(each, number)
                if rate and not each.error:
                    self._measure(each, rate)
        return self.found

    def _next(self, each: Confirmed, number: int) -> float:
        """The rate to measure in this round; 0: none."""
        if self._goal.rate:
            return self._goal.rate if len(each.points) <= number else 0.0
        return 0.0 if len(each.points) > number + 1 or self._hopeless(each) else each.next_rate()

    def _hopeless(self, each: Confirmed) -> bool:
        best = max(other.rate for other in self.found)
        return 0 < each.failed_rate < HOPELESS * best

    def _measure(self, each: Confirmed, rate: float) -> None:
        self._progress(f"{each.candidate.describe()} at {rate:,.0f} requests/s")
        self._bench.apply(self._model.config_of(each.candidate))
        goal = self._goal
        # A short load first, because the first batches of a process are slow.
        self._bench.closed(each.candidate.batch, goal.seconds / 20)
        found = self._bench.open(rate, goal.seconds, GIVE_UP * goal.p99_ns)
        each.memory = max(each.memory, self._bench.memory())
        if found.failed:
            each.error = f"{found.failed} requests failed: {found.error}"
        each.points.append(point(found, rate, goal))


def point(found: Observation, rate: float, goal: Goal) -> Point:
    holds = not found.overloaded and not found.failed and found.p99_ns <= goal.p99_ns
    return Point(rate, found.per_s, found.p50_ns, found.p99_ns, found.mean_batch, holds, found.late_ns)
