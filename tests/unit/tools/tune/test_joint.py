"""The steps of an ensemble tuned together, on simulated servers."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from shmserve.errors import Unsupported
from shmserve.repo.compile import compile_policy
from shmserve.repo.config.schema import ModelConfig
from shmserve.repo.load import parse
from shmserve.sim import Load, Plan, Poisson, SimModel, simulate
from shmserve.terminal.console import Screen
from shmserve.tools.tune import joint
from shmserve.tools.tune.bench import Observation
from shmserve.tools.tune.goal import Goal
from tests.unit.tools.tune.simulated import CONFIG, MS, SimulatedBench, tuned

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


class EnsembleBench(SimulatedBench):
    """Sends requests to the ensemble of the models that these benches serve."""

    def __init__(self, config: ModelConfig, steps: list[SimulatedBench]) -> None:
        super().__init__(lambda count, threads, rows: 0.0)
        self._config, self._steps = config, steps

    def open(self, rate: float, seconds: float, give_up_ns: float) -> Observation:
        models = [SimModel(compile_policy(self._config, 1)), *(step.model() for step in self._steps)]
        plan = Plan(tuple(models), (Load("both", Poisson(rate)),), requests=2000, seed=7)
        result = simulate(plan).models["both"]
        return Observation(rate, 1.0, result.latency.quantile(0.5), result.latency.quantile(0.99))


def test_the_slow_step_gets_what_the_ensemble_needs() -> None:
    steps = []
    for name, ms in TIMES.items():
        text = CONFIG.replace("max_batch_size: 32", "max_batch_size: 4").replace("dynamic_batching { }", "")
        model = tuned(text, 2, name)
        bench = SimulatedBench(partial(whole_batch, ms))
        bench.apply(model.config)
        steps.append(joint.Step(model, bench))
    config = parse(ENSEMBLE)
    benches: Any = [step.bench for step in steps]
    goal = Goal(30 * MS, simulated=200, instances=(1, 2))
    whole = EnsembleBench(config, benches)
    tuner = joint.JointTuner(compile_policy(config, 1), whole, steps, goal, 2, lambda text: None)
    outcome = tuner.run()
    assert outcome.present is not None
    assert outcome.best is not None
    slow, fast = outcome.best.settings
    assert slow.batch > 1
    assert fast == steps[1].model.current or fast.batch > 1
    # Alone, one instance of the slow step runs 250 requests of one row in a second.
    assert outcome.present.rate < 250 < 500 < outcome.best.rate
    assert 2 * outcome.rate(tuner.present) < outcome.rate(outcome.best.settings) <= outcome.best.rate
    assert "dynamic_batching { }" in steps[0].model.text_of(slow)
    assert joint.as_json(tuner, steps)["best"]["rate"] == outcome.rate(outcome.best.settings)
    assert joint.text(tuner, steps, Screen(False)).splitlines()[1].startswith("slow")
    assert [bench.applied[-1] for bench in benches] == [step.model.config for step in steps], "as before"


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
