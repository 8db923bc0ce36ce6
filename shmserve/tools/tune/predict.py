"""Predicts how a candidate performs under a load: runs the server's scheduler in simulated time, with the fitted times.

Invariant: a prediction depends only on its arguments. All candidates see the same arrivals, so that they differ by
their settings and not by chance.
"""

from __future__ import annotations

from math import inf

from msgspec import Struct
from msgspec.structs import replace

from shmserve.sim import Load, ModelResult, Plan, Poisson, SimModel, simulate
from shmserve.tools.tune.fit import Fit, Pair, Spread, fit, spread_of
from shmserve.tools.tune.goal import Goal
from shmserve.tools.tune.measure import Times
from shmserve.tools.tune.space import Candidate, TunedModel

MAX_REQUESTS = 40_000
LATENCIES = 5
"""A simulation lasts at least this many times the latency target, so that a growing queue has time to show."""
STEPS = (0.8, 0.95, 0.5, 0.25, 0.1, 0.03)
"""Shares of the capacity at which the search for the highest rate begins."""
AROUND = (1.0, 1.04, 0.96, 0.9)
"""Factors applied to a guess, to try first."""
PRECISION = 0.04
FINE = 0.015
"""Relative precision of the highest rate, in short and in longer simulations. Rates closer than PRECISION are equal."""
WRONG = 1.1
"""From this factor between predicted and measured rate, the cost of messages is adapted."""
BUSY = 0.75
"""From this utilization, the instances themselves are the bottleneck."""
MESSAGE_NS = 4_000
TURN_NS = 20_000
"""Duration of a turn of the broker in the simulator."""
LINK_NS = (5_000, 500_000)
CLIENTS = 1
"""One process sends all requests, as in a measurement."""


class Prediction(Struct, frozen=True):
    """The simulator's result for a candidate at this many requests per second. `p99_ns` is infinite if more than 1 % of
    the requests are refused."""

    candidate: Candidate
    rate: float
    p50_ns: float
    p99_ns: float
    mean_batch: float
    utilization: float


def request_count(goal: Goal, rate: float, longer: int = 1) -> int:
    """Requests of a simulation at this rate. `longer`: factor for its length."""
    return min(max(longer * goal.simulated, round(rate * LATENCIES * goal.p99_ns / 1e9)), MAX_REQUESTS)


def p99_ns(result: ModelResult) -> float:
    """The 99th percentile of all requests. A refused request misses the target."""
    asked = result.answered + sum(result.failed.values())
    late = 0.99 * asked > result.answered
    return inf if late else result.latency.quantile(0.99 * asked / max(result.answered, 1))


class RatePredictor(Struct, frozen=True):
    """`fits` and `spread` describe the service times, `link_ns` the delay of a message, and `message_ns` the time that
    the server and the callers spend on a message."""

    model: TunedModel
    goal: Goal
    fits: dict[Pair, Fit]
    spread: Spread = Spread()
    link_ns: int = 20_000
    message_ns: int = MESSAGE_NS

    def capacity(self, candidate: Candidate) -> float:
        """An upper limit for the requests per second."""
        fit = self.fits[candidate.instances, candidate.threads]
        sizes = {size for size, _ in fit.entries if size <= candidate.batch} | {candidate.batch, self.goal.rows}
        shortest = self.goal.lengths[0]
        return max(fit.rows_per_s(size, shortest) for size in sizes) / self.goal.rows * self.model.devices

    def at(self, candidate: Candidate, rate: float, longer: int = 1) -> Prediction:
        """`longer`: factor for the length of the simulation."""
        goal = self.goal
        service = self.fits[candidate.instances, candidate.threads].service(self.spread)
        policy = self.model.policy_of(candidate)
        model = SimModel(policy, self.model.instances_of(candidate), service)
        load = Load(policy.name, Poisson(rate), CLIENTS, (goal.rows, goal.rows), lengths=goal.lengths)
        count = request_count(goal, rate, longer)
        plan = Plan((model,), (load,), requests=count, seed=1, link_ns=self.link_ns, message_ns=self.message_ns)
        result = simulate(plan).models[policy.name]
        p50 = result.latency.quantile(0.5)
        return Prediction(candidate, rate, p50, p99_ns(result), result.mean_batch, result.utilization)

    def holds(self, prediction: Prediction) -> bool:
        return prediction.p99_ns <= self.goal.p99_ns

    def highest(
        self, candidate: Candidate, floor: float = 0.0, longer: int = 1, guess: float = 0.0
    ) -> Prediction | None:
        """The prediction at the highest rate that holds the p99; None if no rate above `floor` does. `guess`: a rate
        near it, if known. Longer simulations find it more precisely."""
        low, high = 0.0, self.capacity(candidate)
        best: Prediction | None = None
        around = [guess * factor for factor in AROUND] if guess else []
        # A guess that holds saves the simulation at the floor.
        begin = [guess, floor] if guess > floor else [floor]
        if floor >= high:
            return None
        for rate in (*begin, *around, *(high * share for share in STEPS)):
            if not low < rate < high:
                continue
            result = self.at(candidate, rate, longer=longer)
            if self.holds(result):
                low, best = rate, result
            elif rate <= floor:
                return None
            else:
                high = rate
        if best is None:
            return None
        while high - low > (FINE if longer > 1 else PRECISION) * high:
            rate = (low + high) / 2
            result = self.at(candidate, rate, longer=longer)
            if self.holds(result):
                low, best = rate, result
            else:
                high = rate
        return best

    def calibrated(self, candidate: Candidate, rate: float, mean_batch: float) -> RatePredictor:
        """The predictor with a message cost that explains why `candidate` holds the p99 up to `rate` and not up to the
        predicted rate. The cost is only adapted if the instances are not the bottleneck: batches of `mean_batch` rows
        at this rate leave them idle."""
        predicted = self.highest(candidate)
        fit = self.fits[candidate.instances, candidate.threads]
        rows = max(1, round(mean_batch))
        use = rate * self.goal.rows / fit.rows_per_s(rows, self.goal.typical_length) / self.model.devices
        if predicted is None or predicted.rate < rate * WRONG or use > BUSY:
            return self
        low, high = self.message_ns, round(1e9 / rate)
        while high - low > FINE * high:
            middle = (low + high) // 2
            if self.holds(replace(self, message_ns=middle).at(candidate, rate)):
                low = middle
            else:
                high = middle
        return replace(self, message_ns=low)

    def curve(self, candidate: Candidate, rates: tuple[float, ...]) -> list[Prediction]:
        return [self.at(candidate, rate) for rate in rates]


def predictor_of(times: Times, model: TunedModel, goal: Goal) -> RatePredictor:
    fits = fit(times.samples)
    assert times.lone is not None
    first, full = fits[times.first], times.full
    service = first.ns(goal.rows, goal.typical_length)
    overhead = max(0.0, times.lone.p50_ns - service)
    rows = max(goal.rows, round(full.mean_batch)) if full is not None else goal.rows
    ratio = first.ns(rows, goal.typical_length) / service
    spread = spread_of(times.lone.latencies, overhead, full.latencies if full is not None else (), ratio)
    link_ns = round(min(max((overhead - 2 * TURN_NS) / 4, LINK_NS[0]), LINK_NS[1]))
    return RatePredictor(model, goal, fits, spread, link_ns)
