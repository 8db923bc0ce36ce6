"""Tunes the steps of an ensemble together, for the highest rate of the ensemble that holds the p99.

Each step is measured alone, with tensors that the steps before it have made. The simulator then runs the whole
ensemble: the settings of the busiest step are changed first, and a change stays if the ensemble holds the target at a
higher rate. What all instances compute together must fit the cores of the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from shmserve.core.policy import ModelPolicy
from shmserve.errors import Unsupported
from shmserve.repo.config.schema import ModelConfig
from shmserve.repo.rules.ensemble_steps import IF, MAP, added, steps_of
from shmserve.sim import Load, Plan, Poisson, SimModel, simulate
from shmserve.terminal.console import Column, Screen
from shmserve.tools.tune import report
from shmserve.tools.tune.bench import Bench
from shmserve.tools.tune.confirm import FACTOR, GIVE_UP, RatePoint, point, surplus
from shmserve.tools.tune.fit import Fit, Pair, fit
from shmserve.tools.tune.goal import Goal, per_s
from shmserve.tools.tune.measure import Measurement
from shmserve.tools.tune.predict import PRECISION, RatePredictor, p99_ns, request_count
from shmserve.tools.tune.space import Candidate, TunedModel

ROUNDS = 3
"""How often all steps are examined at most: a change of one can make another the bottleneck."""
GAIN = 1.03
"""Factor by which a change must raise the rate."""
TRIES = 8
HELD = 3
"""Measurements of a rate, most of which must hold the p99."""
COLUMNS = (Column("STEP"), Column("PRESENT"), Column("BEST"), Column("BUSY", right=True))
Tensors = Mapping[str, Any]
Settings = tuple[Candidate, ...]
"""Of each step, in their order."""


class Step(Struct):
    """The model of a step, and what was measured of it alone."""

    model: TunedModel
    bench: Bench
    fits: dict[Pair, Fit] = {}
    memory: dict[Pair, int] = {}


class JointPrediction(Struct, frozen=True):
    """The simulator's result for these settings at a rate. `busy`: of each step, the share of the time in which its
    instances ran batches."""

    settings: Settings
    rate: float
    p99_ns: float
    busy: tuple[float, ...]


class JointOutcome(Struct):
    present: JointPrediction | None = None
    best: JointPrediction | None = None
    points: dict[Settings, list[RatePoint]] = field(default_factory=dict)
    """Settings -> the measurements on the server."""

    def rate(self, settings: Settings) -> float:
        """The highest rate that has held the p99 in most measurements; 0: none has."""
        points = self.points.get(settings, ())
        return max((each.rate for each in points if surplus(points, each.rate) > 0), default=0.0)


def inputs_of_steps(
    config: ModelConfig, given: Tensors, infer: Callable[[str, Tensors], Tensors]
) -> dict[str, dict[str, Any]]:
    """Model of a step -> the inputs that it gets in the ensemble, for these inputs of the ensemble."""
    for index, step in enumerate(steps_of(config)):
        if added(config, index, MAP) or added(config, index, IF):
            raise Unsupported(f"step {index} ({step.model_name}) is mapped or conditional, so its load varies")
    tensors, found = dict(given), {}
    waiting = list(steps_of(config))
    while waiting:
        step = next(step for step in waiting if tensors.keys() >= set(step.input_map.values()))
        waiting.remove(step)
        found[step.model_name] = {name: tensors[key] for name, key in step.input_map.items()}
        outputs = infer(step.model_name, found[step.model_name])
        tensors |= {key: outputs[name] for name, key in step.output_map.items()}
    return found


class JointTuner:
    """`bench` sends requests to the ensemble, those of `steps` to their models."""

    def __init__(
        self,
        policy: ModelPolicy,
        bench: Bench,
        steps: Sequence[Step],
        goal: Goal,
        cores: int,
        progress: Callable[[str], None],
    ) -> None:
        self._policy = policy
        self._bench = bench
        self._steps = steps
        self._goal = goal
        self._cores = cores
        self._progress = progress
        self.present: Settings = tuple(step.model.current for step in steps)
        self.outcome = JointOutcome()

    def run(self) -> JointOutcome:
        for step in self._steps:
            measured = Measurement(step.bench, step.model, self._goal, partial(self._within, step.model.name)).run()
            step.fits, step.memory = fit(measured.samples), measured.memory
            step.bench.apply(step.model.config)
        self._search()
        for prediction in (self.outcome.present, self.outcome.best):
            if prediction is not None and prediction.settings not in self.outcome.points:
                self._confirm(prediction)
        self._apply(self.present)
        return self.outcome

    def _within(self, step: str, text: str) -> None:
        self._progress(f"{step}: {text}")

    # ------------------------------------------------------------------------------------ in the simulator

    def at(self, settings: Settings, rate: float) -> JointPrediction:
        goal = self._goal
        models = [SimModel(self._policy)]
        for step, candidate in zip(self._steps, settings, strict=True):
            service = step.fits[candidate.instances, candidate.threads].service()
            models.append(SimModel(step.model.policy_of(candidate), step.model.instances_of(candidate), service))
        load = Load(self._policy.name, Poisson(rate), 1, (goal.rows, goal.rows), lengths=goal.lengths)
        plan = Plan(tuple(models), (load,), requests=request_count(goal, rate), seed=1)
        result = simulate(plan).models
        busy = tuple(result[step.model.name].utilisation for step in self._steps)
        return JointPrediction(settings, rate, p99_ns(result[self._policy.name]), busy)

    def holds(self, prediction: JointPrediction) -> bool:
        """Whether the p99, the cores and the memory suffice."""
        cores = memory = 0.0
        for step, candidate, busy in zip(self._steps, prediction.settings, prediction.busy, strict=True):
            cores += busy * candidate.instances * max(candidate.threads, 1)
            memory += step.memory.get((candidate.instances, candidate.threads), 0)
        limit = self._goal.memory or float("inf")
        return prediction.p99_ns <= self._goal.p99_ns and cores <= self._cores and memory <= limit

    def highest(self, settings: Settings, floor: float = 0.0) -> JointPrediction | None:
        """The prediction at the highest rate that holds; None if no rate above `floor` does."""
        pairs = zip(self._steps, settings, strict=True)
        high = min(RatePredictor(step.model, self._goal, step.fits).capacity(candidate) for step, candidate in pairs)
        best: JointPrediction | None = None
        low = floor
        if floor and (high <= floor or not self.holds(self.at(settings, floor))):
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
        settings = self.present
        for _ in range(ROUNDS):
            before = settings
            busy = best.busy if best is not None else (0.0,) * len(self._steps)
            for index in sorted(range(len(self._steps)), key=lambda index: -busy[index]):
                for candidate in self._alternatives(index):
                    other = (*settings[:index], candidate, *settings[index + 1 :])
                    rate = best.rate if best is not None else 0.0
                    self._progress(f"{self._steps[index].model.name}: {candidate.describe()}; best {per_s(rate)}/s")
                    better = self.highest(other, GAIN * rate)
                    if better is not None:
                        best, settings = better, other
            if settings == before:
                break
        outcome.best = best

    def _alternatives(self, index: int) -> list[Candidate]:
        step = self._steps[index]
        now = step.model.current
        return [
            replace(now, instances=instances, threads=threads, batch=batch, delay_us=0)
            for instances, threads in step.fits
            for batch in step.model.batches(self._goal.rows)
        ]

    # ------------------------------------------------------------------------------------ on the server

    def _confirm(self, prediction: JointPrediction) -> None:
        """Measures the predicted rate, and lower ones until one holds the p99."""
        goal, rate = self._goal, prediction.rate
        points = self.outcome.points[prediction.settings] = []
        self._apply(prediction.settings)
        for _ in range(TRIES):
            for _ in range(HELD):
                self._progress(f"the ensemble at {per_s(rate)} requests/s")
                points.append(point(self._bench.open(rate, goal.seconds, GIVE_UP * goal.p99_ns), rate, goal))
            if self.outcome.rate(prediction.settings):
                return
            rate /= FACTOR

    def _apply(self, settings: Settings) -> None:
        for step, candidate in zip(self._steps, settings, strict=True):
            step.bench.apply(step.model.config_of(candidate))


# ------------------------------------------------------------------------------------------------- the report


def text(tuner: JointTuner, steps: Sequence[Step], screen: Screen) -> str:
    outcome = tuner.outcome
    if outcome.best is None:
        return "No setting holds the target in the simulator."
    rows = [
        [step.model.name, now.describe(), best.describe() if best != now else "as it is", f"{busy:.0%}"]
        for step, now, best, busy in zip(steps, tuner.present, outcome.best.settings, outcome.best.busy, strict=True)
    ]
    reached = outcome.rate(outcome.best.settings)
    lines = [f"Predicted: {per_s(outcome.best.rate)} requests/s; measured: {per_s(reached) if reached else 'none'}."]
    if outcome.best.settings != tuner.present:
        lines.append(f"The present settings reach {per_s(outcome.rate(tuner.present))} requests/s.")
    return "\n".join([screen.table(COLUMNS, rows), "", *lines])


def as_json(tuner: JointTuner, steps: Sequence[Step]) -> dict[str, Any]:
    outcome = tuner.outcome
    best = outcome.best.settings if outcome.best is not None else tuner.present
    return {
        "present": {"rate": outcome.rate(tuner.present) or None},
        "best": {
            "rate": outcome.rate(best) or None,
            "predicted_rate": outcome.best.rate if outcome.best is not None else None,
            "p99_ms": median([each.p99_ns for each in outcome.points[best]]) / 1e6 if best in outcome.points else None,
        },
        "steps": [
            {"model": step.model.name, "settings": report.settings(one)} for step, one in zip(steps, best, strict=True)
        ],
    }
