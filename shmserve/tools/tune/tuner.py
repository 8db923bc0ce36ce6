"""Runs the steps of tuning: measure, fit, search, confirm, choose.

Invariant: an interrupt (KeyboardInterrupt) ends the current step; the outcome then has the results so far.
"""

from __future__ import annotations

from time import monotonic

from msgspec import Struct, field

from shmserve.errors import InvalidRequest, ModelFailed
from shmserve.tools.tune.bench import Bench
from shmserve.tools.tune.confirm import Confirmation, Confirmed
from shmserve.tools.tune.fit import Fit, Pair, Spread
from shmserve.tools.tune.goal import Goal
from shmserve.tools.tune.measure import Measurement, Times
from shmserve.tools.tune.predict import MESSAGE_NS, Prediction, RatePredictor, predictor_of
from shmserve.tools.tune.search import Search, SimulationPool, shortlist
from shmserve.tools.tune.space import Candidate, TunedModel

WORST = 0.75
"""Candidates whose predicted rate is a lower share of the best are not confirmed."""
EQUAL = 1.04
"""Measured rates that differ by less count as equal: the setting with the fewest instances is chosen, then the one with
the higher predicted rate."""
CURVE = (0.3, 0.5, 0.7, 0.85)
"""Points of the predicted curve, as shares of the highest rate, besides the measured rates."""
CLOSE = 0.05
CALIBRATION_ROUNDS = 4
"""Number of measurements of the current setting before the search; the rest follow in turn with the other
candidates."""


class TuningOutcome(Struct):
    """Everything that was found. Steps that were not reached leave their defaults."""

    model: TunedModel
    goal: Goal
    times: Times = field(default_factory=Times)
    fits: dict[Pair, Fit] = field(default_factory=dict)
    link_ns: int = 0
    message_ns: int = MESSAGE_NS
    spread: Spread = Spread()
    ranked: list[Prediction] = field(default_factory=list)
    searched: int = 0
    confirmed: list[Confirmed] = field(default_factory=list)
    curve: list[Prediction] = field(default_factory=list)
    chosen: Candidate | None = None
    interrupted: str = ""
    """The step in which Ctrl-C was pressed."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Duration of each step."""

    def of(self, candidate: Candidate | None) -> Confirmed | None:
        return next((each for each in self.confirmed if each.candidate == candidate), None)

    def prediction(self, candidate: Candidate | None) -> Prediction | None:
        return next((each for each in self.ranked if each.candidate == candidate), None)

    def memory_of(self, candidate: Candidate) -> int:
        """Measured bytes of its instances; 0: unknown."""
        return self.times.memory.get((candidate.instances, candidate.threads), 0)

    @property
    def frontier(self) -> list[Prediction]:
        """What memory buys: the settings that no other beats with as little memory, the smallest first."""
        kept: list[Prediction] = []
        for each in sorted(self.ranked, key=lambda each: (self.memory_of(each.candidate), -self._value(each))):
            if not kept or self._value(each) > self._value(kept[-1]):
                kept.append(each)
        return kept

    def _value(self, each: Prediction) -> float:
        return -each.p99_ns if self.goal.rate else each.rate

    @property
    def holds(self) -> bool:
        """Whether the chosen candidate has held the p99 on the server."""
        result = self.of(self.chosen)
        return result is not None and (result.holds_at(self.goal.rate) if self.goal.rate else result.rate > 0)


class Events:
    """Receives the progress. `step` begins a step; `within` describes what is done now; `simulated` counts."""

    def step(self, name: str) -> None: ...
    def within(self, text: str) -> None: ...
    def simulated(self, done: int, total: int, best: Prediction | None) -> None: ...


class Tuner:
    def __init__(self, bench: Bench, model: TunedModel, goal: Goal, events: Events, processes: int = 1) -> None:
        if goal.rows > model.max_rows:
            largest = f"the largest batch of '{model.name}' is {model.max_rows}"
            raise InvalidRequest(f"requests of {goal.rows} rows: {largest}")
        self._bench = bench
        self._events = events
        self._processes = processes
        self._confirmation = Confirmation(bench, model, goal, events.within)
        self.outcome = TuningOutcome(model, goal, confirmed=self._confirmation.results)

    def run(self) -> TuningOutcome:
        steps = (
            ("measure", self._measure),
            ("calibrate", self._calibrate),
            ("search", self._search),
            ("confirm", self._confirm),
        )
        for name, work in steps:
            begun = monotonic()
            try:
                self._events.step(name)
                work()
            except KeyboardInterrupt:
                self.outcome.interrupted = name
                break
            finally:
                self.outcome.seconds[name] = monotonic() - begun
        self.outcome.chosen = choose(self.outcome)
        return self.outcome

    def _measure(self) -> None:
        outcome = self.outcome
        measurement = Measurement(self._bench, outcome.model, outcome.goal, self._events.within)
        outcome.times = measurement.times
        predictor = predictor_of(measurement.run(), outcome.model, outcome.goal)
        outcome.fits, outcome.spread, outcome.link_ns = predictor.fits, predictor.spread, predictor.link_ns

    def _calibrate(self) -> None:
        """Measures the current setting. If it holds a lower rate than predicted although its instances are idle, the
        cost of messages is adapted."""
        outcome, goal, now = self.outcome, self.outcome.goal, self.outcome.model.current
        pair = now.instances, now.threads
        if goal.rate or pair not in outcome.fits or now.batch < goal.rows:
            return
        predicted = self.predictor.highest(now)
        if predicted is None:
            return
        (result,) = self._confirmation.run([(now, predicted)], CALIBRATION_ROUNDS)
        if result.rate and not result.error:
            batches = [point.mean_batch for point in result.points if point.rate == result.rate]
            outcome.message_ns = self.predictor.calibrated(now, result.rate, batches[-1]).message_ns

    def _search(self) -> None:
        outcome = self.outcome
        with SimulationPool(self._processes) as pool:
            search = Search(self.predictor, outcome.times.memory, pool, self._events.simulated)
            try:
                outcome.ranked = search.run()
            except KeyboardInterrupt:
                outcome.ranked = search.ranked()
                raise
            finally:
                outcome.searched = len(search.tried)

    @property
    def predictor(self) -> RatePredictor:
        outcome = self.outcome
        return RatePredictor(
            outcome.model, outcome.goal, outcome.fits, outcome.spread, outcome.link_ns, outcome.message_ns
        )

    def _confirm(self) -> None:
        outcome, goal = self.outcome, self.outcome.goal
        best = shortlist(outcome.ranked, goal.confirm, WORST)
        wanted: list[tuple[Candidate, Prediction | None]] = [(each.candidate, each) for each in best]
        now = outcome.model.current
        if all(candidate != now for candidate, _ in wanted) and (now.instances, now.threads) in outcome.fits:
            wanted.append((now, outcome.prediction(now) or self._of_current(now)))
        self._confirmation.run(wanted)
        chosen = choose(outcome)
        result = outcome.of(chosen)
        if chosen is not None and result is not None and result.rate:
            rates = {each.rate for each in result.points}
            others = [result.rate * share for share in CURVE]
            rates |= {rate for rate in others if all(abs(rate / known - 1) > CLOSE for known in rates)}
            outcome.curve = self.predictor.curve(chosen, tuple(sorted(rates)))
        errors = [each.error for each in outcome.confirmed]
        if errors and all(errors):
            raise ModelFailed(f"no candidate could be confirmed: {errors[0]}")

    def _of_current(self, now: Candidate) -> Prediction | None:
        """The prediction for the current setting, for which the search may have none."""
        goal, predictor = self.outcome.goal, self.predictor
        if goal.rate:
            return predictor.at(now, goal.rate)
        return predictor.highest(now)


def choose(outcome: TuningOutcome) -> Candidate | None:
    """The best confirmed candidate, else the best predicted one. The current setting is only kept if it is as good."""
    goal = outcome.goal
    limit = goal.memory or float("inf")
    tried = [each for each in outcome.confirmed if each.points and not each.error and each.memory <= limit]
    now = outcome.model.current
    others = [each for each in outcome.confirmed if each.candidate != now and (each.points or each.error)]
    if outcome.ranked and outcome.ranked[0].candidate != now and not others:
        return outcome.ranked[0].candidate  # only the current setting has been measured
    if goal.rate:
        good = [each for each in tried if each.holds_at(goal.rate)]
        if good and goal.objective == "latency":
            return min(good, key=lambda each: each.p99_ns(goal.rate)).candidate
        if good:  # in the order of the search, the cheapest first
            order = [each.candidate for each in outcome.ranked]
            place = {candidate: number for number, candidate in enumerate(order)}
            return min(good, key=lambda each: place.get(each.candidate, len(order))).candidate
        if tried and outcome.ranked:
            return min(tried, key=lambda each: each.p99_ns(goal.rate)).candidate
    elif any(each.rate for each in tried):
        best = max(each.rate for each in tried)
        equal = [each for each in tried if each.rate * EQUAL >= best]
        return min(equal, key=_simplest).candidate
    return outcome.ranked[0].candidate if outcome.ranked else None


def _simplest(each: Confirmed) -> tuple[float, ...]:
    return each.candidate.instances, -(each.predicted.rate if each.predicted is not None else 0.0)
