"""The steps of an ensemble tuned together, on simulated servers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import pytest

from shmserve.errors import InvalidRequest, Unsupported
from shmserve.repo.compile import compile_policy
from shmserve.repo.load import parse
from shmserve.sim import Load, Plan, Poisson, SimModel, simulate
from shmserve.terminal.console import Screen
from shmserve.tools.tune import joint, joint_report
from shmserve.tools.tune.bench import Observation
from shmserve.tools.tune.goal import Goal
from tests.support.cases import cases
from tests.unit.tools.tune.simulated import CONFIG, EACH_MIB, GPU_MIB, MIB, MS, Service, SimulatedBench, tuned

ENSEMBLE = """
name: "both" platform: "ensemble" max_batch_size: 4
input [ { name: "x" data_type: TYPE_FP32 dims: [ 16 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 16 ] } ]
ensemble_scheduling { step [
  { model_name: "slow" input_map { key: "x" value: "between" } output_map { key: "y" value: "y" } },
  { model_name: "fast" input_map { key: "x" value: "x" } output_map { key: "y" value: "between" } }
] }
"""
TIMES = {"slow": 4.0, "fast": 0.5}
"""ms for a batch of any size."""


def whole_batch(ms: float, count: int, threads: int, rows: int) -> float:
    return ms * max(1.0, count / 2)


class SharedBench:
    """Sends requests to the targets: models that these benches serve, or ensembles of them."""

    def __init__(self, targets: Sequence[joint.JointTarget], steps: Sequence[SimulatedBench]) -> None:
        self._targets = [target.name for target in targets]
        self._ensembles = [target.policy for target in targets if target.policy is not None]
        self._steps = steps

    def open(self, rates: Sequence[float], seconds: float, give_up_ns: Sequence[float]) -> list[Observation]:
        loads = tuple(Load(name, Poisson(rate)) for name, rate in zip(self._targets, rates, strict=True))
        models = (*map(SimModel, self._ensembles), *(step.model() for step in self._steps))
        results = simulate(Plan(models, loads, requests=2000, seed=7)).models
        latencies = [results[name].latency for name in self._targets]
        return [
            Observation(rate, 1.0, latency.quantile(0.5), latency.quantile(0.99))
            for rate, latency in zip(rates, latencies, strict=True)
        ]


def step_of(name: str, service: Service, goal: Goal, share: float = 1.0, config: str = CONFIG) -> joint.TunedStep:
    model, bench = tuned(config, 2, name), SimulatedBench(service)
    bench.apply(model.config)
    return joint.TunedStep(model, bench, goal, share)


def tuner_of(targets: Sequence[joint.JointTarget], steps: Sequence[joint.TunedStep], **more: Any) -> joint.JointTuner:
    benches: Any = [step.bench for step in steps]
    return joint.JointTuner(targets, SharedBench(targets, benches), steps, 2, lambda text: None, **more)


def test_the_slow_step_gets_what_the_ensemble_needs() -> None:
    goal = Goal(30 * MS, simulated=200, instances=(1, 2))
    text = CONFIG.replace("max_batch_size: 32", "max_batch_size: 4").replace("dynamic_batching { }", "")
    steps = [step_of(name, partial(whole_batch, ms), goal, config=text) for name, ms in TIMES.items()]
    tuner = tuner_of([joint.JointTarget("both", goal, policy=compile_policy(parse(ENSEMBLE), 1))], steps)
    outcome: Any = tuner.run()
    slow, fast = outcome.best.settings
    assert slow.batch > 1
    assert fast == steps[1].model.current or fast.batch > 1
    # Alone, one instance of the slow step runs 250 requests of one row in a second.
    assert outcome.present.rate < 250 < 500 < outcome.best.rate
    assert 2 * outcome.rate(tuner.present) < outcome.rate(outcome.best.settings) <= outcome.best.rate
    assert "dynamic_batching { }" in steps[0].model.text_of(slow)
    assert joint_report.as_json(tuner)["best"]["both"]["rate"] == outcome.rate(outcome.best.settings)
    assert joint_report.text(tuner, Screen(False)).splitlines()[1].startswith("slow")
    applied = [cast("SimulatedBench", step.bench).applied[-1] for step in steps]
    assert applied == [step.model.config for step in steps], "as before"


HEAVY, LIGHT = 8.0, 1.0
"""ms for a batch of two models that share two cores."""


@cases(
    ((240.0, 400.0), 0, "memory", (1, 1), (4, 1)),
    ((0.0, 0.0), 2, "", (1, 1), (4, 4)),
    ((60.0, 60.0), 0, "latency", (2, 1), (1, 1)),
)
def test_models_that_share_a_machine(
    rates: tuple[float, float], memory: int, objective: str, instances: tuple[int, int], batches: tuple[int, int]
) -> None:
    """`batches`: at least this large."""
    steps, targets = [], []
    for name, ms, p99, rate in (("heavy", HEAVY, 60, rates[0]), ("light", LIGHT, 20, rates[1])):
        goal = Goal(p99 * MS, rate, simulated=200, instances=(1, 2))
        text = CONFIG.replace("max_batch_size: 32", "max_batch_size: 4")
        steps.append(step_of(name, partial(whole_batch, ms), goal, rate or 1.0, text))
        targets.append(joint.JointTarget(name, goal, rate or 1.0))
    tuner = tuner_of(targets, steps, memory=memory * EACH_MIB * MIB, fixed=bool(rates[0]), objective=objective)
    outcome: Any = tuner.run()
    chosen = outcome.chosen
    assert tuple(each.instances for each in chosen) == instances
    assert all(each.batch >= size for each, size in zip(chosen, batches, strict=True))
    document = joint_report.as_json(tuner)
    assert document["holds"]
    assert [each["gpu_memory_bytes"] for each in document["steps"]] == [count * GPU_MIB * MIB for count in instances]
    assert all(each["p99_ms"] <= each["limit_ms"] for each in document["best"].values())
    assert [each["rate"] for each in document["best"].values()] == [*rates] or not rates[0]
    assert joint_report.check(document, document["targets"]) is document
    lines = [line.split() for line in joint_report.comparison(document, document, Screen(False)).splitlines()]
    assert [line[0] for line in lines[1:]] == ["heavy", *["heavy:"] * 3, "light", *["light:"] * 3]
    with pytest.raises(InvalidRequest, match="its targets are"):
        joint_report.check(document, {})


def test_models_that_do_not_hold_together_are_named() -> None:
    goal = Goal(9 * MS, 1000.0, simulated=200, instances=(1, 1))
    steps = [step_of(name, partial(whole_batch, HEAVY), goal, 1000.0) for name in ("heavy", "more")]
    tuner = tuner_of([joint.JointTarget(step.model.name, goal, 1000.0) for step in steps], steps, fixed=True)
    assert tuner.run().chosen is None
    assert joint_report.text(tuner, Screen(False)) == "No setting holds the targets in the simulator."
    assert not joint_report.as_json(tuner)["holds"]


def test_the_inputs_of_steps_are_made_by_those_before() -> None:
    asked = []

    def infer(name: str, given: Any) -> Any:
        asked.append(name)
        return {"y": given["x"] + 1}

    found = joint.inputs_of_steps(parse(ENSEMBLE), {"x": np.zeros(2)}, infer)
    assert asked == ["fast", "slow"]
    assert {name: given["x"].tolist() for name, given in found.items()} == {"fast": [0, 0], "slow": [1, 1]}
    mapped = parse(ENSEMBLE + 'parameters { key: "step[0].map" value: { string_value: "between" } }')
    with pytest.raises(Unsupported, match="mapped or conditional"):
        joint.inputs_of_steps(mapped, {}, infer)
