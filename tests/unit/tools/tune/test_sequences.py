"""The search for the settings of a model with sequences, on the simulator of the server."""

from __future__ import annotations

import io

import pytest

from shmserve.errors import Unsupported
from shmserve.repo.compile import compile_instances, compile_policy
from shmserve.repo.config.schema import ModelConfig
from shmserve.repo.load import parse
from shmserve.sim import Closed, Load, Measured, Plan, SimModel, simulate
from shmserve.terminal.console import Screen
from shmserve.tools.tune.bench import Observation
from shmserve.tools.tune.sequences import SequenceGoal, SequenceTuner, TunedSequenceModel, check_sequences
from shmserve.tools.tune.trial_table import sequence_text
from tests.unit.tools.tune.simulated import CONFIG, EACH_MIB, MIB, MS, tuned

OLDEST = CONFIG.replace("dynamic_batching { }", "sequence_batching { oldest { max_candidate_sequences: 2 } }  # kept")
OLDEST = OLDEST.replace(": 32", ": 8")
DIRECT = CONFIG.replace("dynamic_batching { }", "sequence_batching { }").replace(": 32", ": 4")
LENGTH = 10


class SequenceServer:
    """A batch takes 4 ms and 0.25 ms per row, with each of up to two instances; more share the cores."""

    def __init__(self) -> None:
        self.applied: list[ModelConfig] = []

    @property
    def count(self) -> int:
        return self.applied[-1].instance_group[0].count

    def apply(self, config: ModelConfig) -> None:
        self.applied.append(config)

    def memory(self) -> int:
        return EACH_MIB * MIB * self.count

    def correlated(self, sequences: int, length: int, seconds: float) -> Observation:
        assert length == LENGTH
        config, slower = self.applied[-1], max(1.0, self.count / 2)
        entries = tuple((rows, (4 + 0.25 * rows) * slower * MS) for rows in (1, 2, 4, 8))
        model = SimModel(compile_policy(config, 1), compile_instances(config), Measured(entries))
        load = Load(config.name, Closed(sequences), sequence=(length, length))
        result = simulate(Plan((model,), (load,), requests=12 * max(sequences, 20), seed=1)).models[config.name]
        return Observation(
            result.answered / result.elapsed_s,
            result.elapsed_s,
            result.latency.quantile(0.5),
            result.latency.quantile(0.99),
            batches=sum(result.batches.values()),
            rows=sum(rows * times for rows, times in result.batches.items()),
            failed=sum(result.failed.values()),
        )


def found(text: str, p99_ms: float, memory: int = 0) -> SequenceTuner:
    server = SequenceServer()
    model = TunedSequenceModel(text, tuned(text).config)
    goal = SequenceGoal(round(p99_ms * MS), LENGTH, memory, (1, 3))
    tuner = SequenceTuner(server, model, goal, lambda text: None)
    tuner.run()
    return tuner


def test_more_candidates_and_instances_are_found() -> None:
    tuner = found(OLDEST, 30)
    chosen, (first, *_) = tuner.chosen, tuner.trials
    assert chosen is not None
    assert first.setting == tuner.model.current
    # Two instances with batches of 8 rows answer 2 * 8 / 6 ms; a third only takes time from them.
    assert chosen.setting.instances == 2
    assert chosen.setting.candidates >= 8
    assert 3 * first.per_s < chosen.per_s < 1.05 * 2 * 8 / 0.006
    assert chosen.p99_ns <= 30 * MS
    changed = tuner.model.text_of(chosen.setting)
    assert f"max_candidate_sequences: {chosen.setting.candidates} }} }}  # kept" in changed
    assert parse(changed).instance_group[0].count == 2
    assert "chosen" in sequence_text(tuner, Screen(False, io.StringIO()))
    assert f"+sequence_batching {{ oldest {{ max_candidate_sequences: {chosen.setting.candidates} }} }}" in tuner.diff(
        "x"
    )


def test_the_direct_strategy_stays() -> None:
    """Its slots are the rows of the batch. Waiting for full batches gains nothing when each caller sends at once."""
    tuner = found(DIRECT, 30)
    chosen = tuner.chosen
    assert chosen is not None
    assert (chosen.setting.instances, chosen.setting.candidates, chosen.setting.delay_us) == (2, 0, 0)
    assert {trial.setting.utilization for trial in tuner.trials} == {0.0, 0.5, 1.0}
    waiting = next(trial.setting for trial in tuner.trials if trial.setting.utilization)
    direct = parse(tuner.model.text_of(waiting)).sequence_batching.direct  # type: ignore[union-attr]
    assert direct is not None
    assert (direct.max_queue_delay_microseconds, direct.minimum_slot_utilization) == (waiting.delay_us, 0.5)
    assert tuner.as_json("x")["strategy"] == "direct"


def test_the_limits_bound_the_choice() -> None:
    small = found(OLDEST, 30, memory=(EACH_MIB + 50) * MIB).chosen
    assert small is not None
    assert small.setting.instances == 1
    none = found(DIRECT, 3)
    assert (none.chosen, none.diff("x"), none.as_json("x")["holds"]) == (None, "", False)
    assert "No setting holds the p99" in sequence_text(none, Screen(False, io.StringIO()))
    with pytest.raises(Unsupported, match="has iterative_sequence"):
        check_sequences(parse("sequence_batching { iterative_sequence: true }"))
