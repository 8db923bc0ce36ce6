"""Tunes several models together: the steps of an ensemble, or models that share a machine.

Each model is measured alone. The simulator then runs all of them under their loads at once: the settings of the busiest
model are changed first, and a change stays if all targets hold at a higher rate, or at the same rate while the changed
model is less busy. What all instances compute together must fit the cores of the machine, and their memory the limit.
Then the settings that cost less and hold the same rate are taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from shmserve.core.policy import ModelPolicy
from shmserve.errors import Unsupported
from shmserve.repo.config.schema import ModelConfig
from shmserve.repo.rules.ensemble_steps import IF, MAP, added, steps_of
from shmserve.sim import Load, Plan, Poisson, SimModel, simulate
from shmserve.tools.load.report.table import rate_text
from shmserve.tools.tune.bench import Bench, SharedBench
from shmserve.tools.tune.confirm import FACTOR, GIVE_UP, RatePoint, rate_point
from shmserve.tools.tune.goal import Goal
from shmserve.tools.tune.measure import Measurement, Times
from shmserve.tools.tune.predict import MAX_REQUESTS, PRECISION, RatePredictor, p99_ns, predictor_of, request_count
from shmserve.tools.tune.space import Candidate, TunedModel

ROUNDS = 3
"""How often all models are examined at most: a change of one can make another the bottleneck."""
GAIN = 1.03
"""Factor by which a change must raise the rate, or lower the p99."""
TRIES = 8
HELD = 3
"""Measurements of a rate, most of which must hold the p99."""
Tensors = Mapping[str, Any]
Settings = tuple[Candidate, ...]
"""Of each tuned model, in their order."""


class TunedStep(Struct, frozen=True):
    """A model to tune. `share`: its requests at a rate of 1."""

    model: TunedModel
    bench: Bench
    goal: Goal
    share: float


class MeasuredStep(Struct, frozen=True):
    """A model to tune, and what was measured of it alone."""

    step: TunedStep
    times: Times
    predictor: RatePredictor

    def bytes_of(self, candidate: Candidate) -> int:
        return self.times.memory.get((candidate.instances, candidate.threads), 0)

    def gpu_bytes_of(self, candidate: Candidate) -> int:
        return self.times.gpu_memory.get((candidate.instances, candidate.threads), 0)

    def alternatives(self) -> list[Candidate]:
        model, goal = self.step.model, self.step.goal
        limit = goal.memory or float("inf")
        return [
            replace(model.current, instances=instances, threads=threads, batch=batch, delay_us=0)
            for instances, threads in self.predictor.fits
            if self.times.memory.get((instances, threads), 0) <= limit
            for batch in model.batches(goal.rows)
        ]


class JointTarget(Struct, frozen=True):
    """What callers ask, and what it must hold: a tuned model, or an ensemble of such models, which has a policy of its
    own. `share`: its requests at a rate of 1."""

    name: str
    goal: Goal
    share: float = 1.0
    policy: ModelPolicy | None = None


class JointPrediction(Struct, frozen=True):
    """The simulator's result for these settings at a rate. `p99_ns`: of each target. `busy`: of each tuned model, the
    share of the time in which its instances ran batches."""

    settings: Settings
    rate: float
    p99_ns: tuple[float, ...]
    busy: tuple[float, ...]


class JointPoint(NamedTuple):
    """A measurement on the server at this rate, of all targets."""

    rate: float
    targets: list[RatePoint]


class JointOutcome(Struct):
    present: JointPrediction | None = None
    best: JointPrediction | None = None
    interrupted: bool = False
    """Ctrl-C was pressed. The rest has the results so far."""
    points: dict[Settings, list[JointPoint]] = {}
    """Settings -> the measurements on the server."""

    def rate(self, settings: Settings) -> float:
        """The highest rate at which all targets have held their p99 in most measurements; 0: none."""
        surplus: dict[float, int] = {}
        for rate, targets in self.points.get(settings, ()):
            surplus[rate] = surplus.get(rate, 0) + (1 if all(each.holds for each in targets) else -1)
        return max((rate for rate, value in surplus.items() if value > 0), default=0.0)

    @property
    def chosen(self) -> Settings | None:
        """The settings that hold the higher rate on the server, or those that the simulator found."""
        if self.best is None:
            return None
        if self.present is not None and self.rate(self.present.settings) > self.rate(self.best.settings):
            return self.present.settings
        return self.best.settings


def inputs_of_steps(
    config: ModelConfig, request: Tensors, infer: Callable[[str, Tensors], Tensors]
) -> dict[str, dict[str, Any]]:
    """Model of a step -> the inputs that it gets in the ensemble, for these inputs of the ensemble."""
    for index, step in enumerate(steps_of(config)):
        if added(config, index, MAP) or added(config, index, IF):
            raise Unsupported(f"step {index} ({step.model_name}) is mapped or conditional, so its load varies")
    tensors, inputs = dict(request), {}
    waiting = list(steps_of(config))
    while waiting:
        step = next(step for step in waiting if tensors.keys() >= set(step.input_map.values()))
        waiting.remove(step)
        inputs[step.model_name] = {name: tensors[key] for name, key in step.input_map.items()}
        outputs = infer(step.model_name, inputs[step.model_name])
        tensors |= {key: outputs[name] for name, key in step.output_map.items()}
    return inputs


class JointTuner:
    """`bench` sends requests to the targets, those of `steps` to the tuned models. `memory`: bytes for all instances;
    0: no limit. `fixed`: the targets must hold at a rate of 1; otherwise the highest rate is searched. `objective`:
    what is best among the settings that hold; empty: the fewest instances."""

    def __init__(
        self,
        targets: Sequence[JointTarget],
        bench: SharedBench,
        steps: Sequence[TunedStep],
        cores: int,
        progress: Callable[[str], None],
        memory: int = 0,
        fixed: bool = False,
        objective: str = "",
    ) -> None:
        self.targets = targets
        self.steps = steps
        self.fixed = fixed
        self._bench = bench
        self._cores = cores
        self._progress = progress
        self._memory = memory or float("inf")
        self._objective = objective
        self.present: Settings = tuple(step.model.current for step in steps)
        self.measured: list[MeasuredStep] = []
        """Those of `steps` that have been measured; the search follows when all have."""
        self.outcome = JointOutcome()

    def run(self) -> JointOutcome:
        try:
            self._run()
        except KeyboardInterrupt:
            self.outcome.interrupted = True
        return self.outcome

    def _run(self) -> None:
        for step in self.steps:
            measurement = Measurement(step.bench, step.model, step.goal, partial(self._within, step.model.name))
            times = measurement.run()
            self.measured.append(MeasuredStep(step, times, predictor_of(times, step.model, step.goal)))
            step.bench.apply(step.model.config)
        self._search()
        for prediction in (self.outcome.present, self.outcome.best):
            if prediction is not None and prediction.settings not in self.outcome.points:
                self._confirm(prediction)
        self._apply(self.present)

    def _within(self, step: str, text: str) -> None:
        self._progress(f"{step}: {text}")

    # ------------------------------------------------------------------------------------ in the simulator

    def at(self, settings: Settings, rate: float) -> JointPrediction:
        models = [SimModel(target.policy) for target in self.targets if target.policy is not None]
        for measured, candidate in zip(self.measured, settings, strict=True):
            model, predictor = measured.step.model, measured.predictor
            service = predictor.fits[candidate.instances, candidate.threads].service(predictor.spread)
            models.append(SimModel(model.policy_of(candidate), model.instances_of(candidate), service))
        loads = tuple(
            Load(
                target.name,
                Poisson(rate * target.share),
                1,
                (target.goal.rows, target.goal.rows),
                lengths=target.goal.lengths,
            )
            for target in self.targets
        )
        total = sum(target.share for target in self.targets)
        needed = max(request_count(each.goal, rate * each.share) * total / each.share for each in self.targets)
        link_ns = max(measured.predictor.link_ns for measured in self.measured)
        plan = Plan(tuple(models), loads, requests=min(round(needed), MAX_REQUESTS), seed=1, link_ns=link_ns)
        result = simulate(plan).models
        busy = tuple(result[step.model.name].utilization for step in self.steps)
        return JointPrediction(settings, rate, tuple(p99_ns(result[target.name]) for target in self.targets), busy)

    def holds(self, prediction: JointPrediction) -> bool:
        """Whether the p99 of all targets, the cores and the memory suffice."""
        cores = sum(
            busy * candidate.instances * max(candidate.threads, 1)
            for candidate, busy in zip(prediction.settings, prediction.busy, strict=True)
        )
        return (
            self._strain(prediction) <= 1
            and cores <= self._cores
            and self.bytes_of(prediction.settings) <= self._memory
        )

    def _strain(self, prediction: JointPrediction) -> float:
        """The largest p99, as a share of its limit."""
        return max(each / target.goal.p99_ns for each, target in zip(prediction.p99_ns, self.targets, strict=True))

    def bytes_of(self, settings: Settings) -> int:
        return sum(measured.bytes_of(candidate) for measured, candidate in zip(self.measured, settings, strict=True))

    def highest(self, settings: Settings, floor: float = 0.0) -> JointPrediction | None:
        """The prediction at the highest rate that holds, of at most 1 if it is fixed; None if no rate above `floor`
        does."""
        pairs = zip(self.measured, settings, strict=True)
        high = min(each.predictor.capacity(candidate) / each.step.share for each, candidate in pairs)
        best: JointPrediction | None = None
        low = floor
        if self.fixed and high > 1:
            whole = self.at(settings, 1.0)
            if self.holds(whole):
                return whole
            high = 1.0
        if self.bytes_of(settings) > self._memory or high <= floor:
            return None
        if floor and not self.holds(self.at(settings, floor)):
            return None
        while high - low > PRECISION * high:
            prediction = self.at(settings, (low + high) / 2)
            if self.holds(prediction):
                low, best = prediction.rate, prediction
            else:
                high = prediction.rate
        return best

    def _search(self) -> None:
        outcome = self.outcome
        outcome.present = best = self.highest(self.present)
        smallest = [
            min(measured.alternatives(), key=partial(_cost, measured, "memory"), default=None)
            for measured in self.measured
        ]
        if best is None:  # the others are reached from those that need the least memory
            best = self.highest(tuple(each for each in smallest if each is not None)) if all(smallest) else None
        if best is None:
            return
        for change in (self._grown, self._relaxed if self._objective == "latency" else self._trimmed):
            for _ in range(ROUNDS):
                before = best.settings
                for index in sorted(range(len(self.steps)), key=[-busy for busy in best.busy].__getitem__):
                    best = change(best, index)
                    if not self.fixed or best.rate == 1:
                        outcome.best = best
                if best.settings == before:
                    break

    def _grown(self, best: JointPrediction, index: int) -> JointPrediction:
        """The best settings of this model with those of the others, for the highest rate."""
        for candidate in self.measured[index].alternatives():
            if self.fixed and best.rate == 1:
                break
            self._tell(index, candidate, best)
            settings = _with(best.settings, index, candidate)
            higher = self.highest(settings, GAIN * best.rate)
            if higher is not None:
                best = higher
                continue
            same = self.at(settings, best.rate)  # another model may limit the rate
            if GAIN * same.busy[index] < best.busy[index] and self.holds(same):
                best = same
        return best

    def _trimmed(self, best: JointPrediction, index: int) -> JointPrediction:
        """The cheapest settings of this model that hold the rate."""
        cost = partial(_cost, self.measured[index], self._objective)
        for candidate in sorted(self.measured[index].alternatives(), key=cost):
            if cost(candidate) >= cost(best.settings[index]):
                break
            self._tell(index, candidate, best)
            cheaper = self.at(_with(best.settings, index, candidate), best.rate)
            if self.holds(cheaper):
                return cheaper
        return best

    def _relaxed(self, best: JointPrediction, index: int) -> JointPrediction:
        """The settings of this model with which the p99 are the farthest from their limits."""
        for candidate in self.measured[index].alternatives():
            self._tell(index, candidate, best)
            other = self.at(_with(best.settings, index, candidate), best.rate)
            if self.holds(other) and GAIN * self._strain(other) < self._strain(best):
                best = other
        return best

    def _tell(self, index: int, candidate: Candidate, best: JointPrediction) -> None:
        total = best.rate * sum(target.share for target in self.targets)
        self._within(self.steps[index].model.name, f"{candidate.describe()}; best {rate_text(total)}/s")

    # ------------------------------------------------------------------------------------ on the server

    def _confirm(self, prediction: JointPrediction) -> None:
        """Measures the predicted rate, and lower ones until one holds; a fixed rate alone."""
        targets, rate = self.targets, 1.0 if self.fixed else prediction.rate
        points = self.outcome.points[prediction.settings] = []
        limits = [GIVE_UP * target.goal.p99_ns for target in targets]
        self._apply(prediction.settings)
        for _ in range(1 if self.fixed else TRIES):
            for _ in range(HELD):
                rates = [rate * target.share for target in targets]
                self._progress(
                    " and ".join(f"{each.name} at {rate_text(r)}/s" for each, r in zip(targets, rates, strict=True))
                )
                seen = self._bench.open(rates, targets[0].goal.seconds, limits)
                goals = [target.goal for target in targets]
                points.append(JointPoint(rate, list(map(rate_point, seen, rates, goals))))
            if self.outcome.rate(prediction.settings):
                return
            rate /= FACTOR

    def _apply(self, settings: Settings) -> None:
        for step, candidate in zip(self.steps, settings, strict=True):
            step.bench.apply(step.model.config_of(candidate))


def _with(settings: Settings, index: int, candidate: Candidate) -> Settings:
    return (*settings[:index], candidate, *settings[index + 1 :])


def _cost(measured: MeasuredStep, objective: str, candidate: Candidate) -> tuple[int, ...]:
    memory, cores = measured.bytes_of(candidate), candidate.instances * max(candidate.threads, 1)
    return (memory, candidate.instances, cores) if objective == "memory" else (candidate.instances, memory, cores)
