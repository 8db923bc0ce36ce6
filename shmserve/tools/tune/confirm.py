"""Measures the best candidates on the real server, in turn, so that a change in the machine's speed affects all of
them.

With a target rate, each candidate is measured at that rate. Otherwise the highest rate that holds the p99 is searched:
up or down from the prediction, then between the last two rates, which are measured again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt
from statistics import median

from msgspec import Struct, field

from shmserve.tools.load.report.table import rate_text
from shmserve.tools.tune.bench import Bench, Observation
from shmserve.tools.tune.goal import Goal
from shmserve.tools.tune.predict import Prediction
from shmserve.tools.tune.space import Candidate, TunedModel

FACTOR = 1.08
"""Step up or down while only one side is known. Each step is larger than the last by this factor."""
PRECISION = 1.04
SURE = 2
"""Number of measurements with the same outcome that decide whether a rate holds the p99."""
ROUNDS = 7
RATE_ROUNDS = 3
HOPELESS = 0.97
"""A candidate is dropped when it fails SURE times at rates up to this share of the best rate that another one holds."""
GIVE_UP = 10
"""A measurement ends early when requests wait for this many times the latency target."""

Progress = Callable[[str], None]


class RatePoint(Struct, frozen=True):
    """A measurement at a rate."""

    rate: float
    per_s: float
    p50_ns: float
    p99_ns: float
    mean_batch: float
    holds: bool
    late_ns: float = 0.0
    """How late the load generator was."""
    refused: int = 0
    refusal: str = ""
    """The text of the first refusal."""


def surplus(points: Sequence[RatePoint], rate: float) -> int:
    """How many more measurements have held the p99 at this rate than have not."""
    return sum(1 if point.holds else -1 for point in points if point.rate == rate)


class Confirmed(Struct):
    """A candidate on the real server. `rate`: the highest rate that holds the p99, 0 if none does."""

    candidate: Candidate
    predicted: Prediction | None
    points: list[RatePoint] = field(default_factory=list)
    memory: int = 0
    gpu_memory: int = 0
    error: str = ""

    @property
    def rate(self) -> float:
        """Measurements vary randomly, so this is the rate that contradicts the fewest of them."""
        held = {point.rate for point in self.points if point.holds}
        return min([0.0, *sorted(held)], key=self._contradictions)

    def _contradictions(self, limit: float) -> int:
        return sum(point.holds != (point.rate <= limit) for point in self.points)

    def holds_at(self, rate: float) -> bool:
        return surplus(self.points, rate) > 0

    def p99_ns(self, rate: float) -> float:
        return median(point.p99_ns for point in self.points if point.rate == rate)

    @property
    def failed_rate(self) -> float:
        """The lowest rate above `rate` that does not hold the p99; 0: none is known."""
        limit = self.rate
        return min((point.rate for point in self.points if point.rate > limit and not point.holds), default=0.0)

    def next_rate(self) -> float:
        """The next rate to measure, 0 if the highest one is known. Once it lies between two close rates, these are
        measured again, the upper one after a measurement that held the p99. This corrects measurements spoiled by a
        pause."""
        low, high = self.rate, self.failed_rate
        if not self.points:
            return self.predicted.rate if self.predicted is not None else 0.0
        if not high:
            return max(point.rate for point in self.points) * FACTOR ** len(self.points)
        if not low:
            return min(point.rate for point in self.points) / FACTOR ** len(self.points)
        if high > low * PRECISION:
            return sqrt(low * high)
        if surplus(self.points, low) >= SURE and surplus(self.points, high) <= -SURE:
            return 0.0
        return high if self.points[-1].holds else low


class Confirmation:
    def __init__(self, bench: Bench, model: TunedModel, goal: Goal, progress: Progress) -> None:
        self._bench = bench
        self._model = model
        self._goal = goal
        self._progress = progress
        self.results: list[Confirmed] = []

    def run(self, chosen: Sequence[tuple[Candidate, Prediction | None]], rounds: int = ROUNDS) -> list[Confirmed]:
        """`chosen`: the candidates and their predictions. Candidates of earlier calls stay among the results, and take
        part until all have been measured equally often. With a target rate, `rounds` is not used."""
        known = {each.candidate for each in self.results}
        self.results += [Confirmed(candidate, predicted) for candidate, predicted in chosen if candidate not in known]
        for number in range(RATE_ROUNDS if self._goal.rate else rounds):
            for each in self.results if number % 2 == 0 else reversed(self.results):
                rate = self._next(each, number)
                if rate and not each.error:
                    self.measure(each, rate)
        return self.results

    def _next(self, each: Confirmed, number: int) -> float:
        """The rate to measure in this round; 0: none."""
        if self._goal.rate:
            return self._goal.rate if len(each.points) <= number else 0.0
        return 0.0 if len(each.points) > number + 1 or self._hopeless(each) else each.next_rate()

    def _hopeless(self, each: Confirmed) -> bool:
        if not each.rate and each.candidate == self._model.current:
            return False  # the gain over the current setting is reported
        enough = HOPELESS * max(other.rate for other in self.results)
        failed = sum(not point.holds and point.rate <= enough for point in each.points)
        return each.rate < enough and failed >= SURE

    def measure(self, each: Confirmed, rate: float) -> RatePoint:
        self._progress(f"{each.candidate.describe()} at {rate_text(rate)} requests/s")
        self._bench.apply(self._model.config_of(each.candidate))
        goal = self._goal
        # A short load first, because the first batches of a process are slow.
        self._bench.closed(each.candidate.batch, goal.seconds / 20)
        result = self._bench.open(rate, goal.seconds, GIVE_UP * goal.p99_ns)
        each.memory = max(each.memory, self._bench.memory())
        each.gpu_memory = max(each.gpu_memory, self._bench.gpu_memory())
        if result.failed:
            each.error = f"{result.failed} requests failed: {result.error}"
        each.points.append(rate_point(result, rate, goal))
        return each.points[-1]


def rate_point(observation: Observation, rate: float, goal: Goal) -> RatePoint:
    holds = not observation.overloaded and not observation.failed and observation.p99_ns <= goal.p99_ns
    return RatePoint(
        rate,
        observation.per_s,
        observation.p50_ns,
        observation.p99_ns,
        observation.mean_batch,
        holds,
        observation.late_ns,
        observation.refused,
        observation.refusal,
    )
