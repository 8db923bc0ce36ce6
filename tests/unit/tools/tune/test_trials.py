"""The search for the settings of a language model and of a model with sequences, on simulated servers."""

from __future__ import annotations

import io
from typing import Any

import pytest
from msgspec.structs import replace

from shmserve.errors import Unavailable, Unsupported
from shmserve.repo.compile import compile_instances, compile_policy
from shmserve.repo.config.schema import ModelConfig, parameter
from shmserve.repo.load import parse
from shmserve.sim import Closed, Load, Measured, Plan, SimModel, simulate
from shmserve.terminal.console import Screen
from shmserve.tools.load.plan import ClosedLoop, Lengths, LoadPlan, Objectives, PromptPlan
from shmserve.tools.load.record import Interval, Language, Point
from shmserve.tools.tune.bench import Observation
from shmserve.tools.tune.language import LanguageGoal, LanguageTuner, TunedLanguageModel
from shmserve.tools.tune.sequences import SequenceGoal, SequenceTuner, TunedSequenceModel, check_sequences
from shmserve.tools.tune.trial_table import language_text, sequence_text
from tests.unit.tools.load.points import latencies, point, window
from tests.unit.tools.tune.simulated import CONFIG, EACH_MIB, MIB, MS, tuned

TEXT = 'backend: "llamacpp"\nparameters { key: "slots" value: { string_value: "2" } }\n'


class Served:
    """Each slot adds 100 tokens per second, up to eight; beyond `limit`, half of the requests miss the objectives. The
    best prompt batch is 256. A slot takes 1 MiB, and there is no memory for 32 slots."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.configs: list[ModelConfig] = []

    def _number(self, name: str, default: int) -> int:
        return int(parameter(self.configs[-1], name) or default)

    @property
    def slots(self) -> int:
        return self._number("slots", 4)

    def apply(self, config: ModelConfig) -> None:
        self.configs.append(config)
        if self.slots >= 32:
            raise Unavailable("no memory for the KV cache")

    def memory(self) -> int:
        return self.slots << 20

    def load(self, plan: LoadPlan) -> Point:
        assert plan.loads == (ClosedLoop(self.slots),)
        speed = 100 * min(self.slots, 8) * (1.5 if self._number("prompt_batch", 512) == 256 else 1)
        result = point(plan.loads[0], [window(0, 100), window(1, 100)])
        share = 1.0 if self.slots <= self._limit else 0.5
        language = Language(
            prompt_per_s=Interval(speed, speed, speed),
            output_per_s=Interval(speed, speed, speed),
            prompt_tokens=10,
            output_tokens=10,
            between_tokens=latencies([5_000_000]),
            good=Interval(share * result.throughput.mean, 0, 0),
        )
        return replace(result, language=language, first_answer=latencies([50_000_000]))


def searched(served: Served, memory: int = 0, prompts: PromptPlan = PromptPlan(), text: str = TEXT) -> Any:  # noqa: B008
    model = TunedLanguageModel(text, replace(parse(text), name="m"))
    tuner = LanguageTuner(served, model, LanguageGoal(Objectives(ttft=1), prompts, memory), lambda text: None)
    tuner.run()
    return tuner


@pytest.mark.parametrize(
    ("limit", "memory", "slots"), [(100, 0, 8), (4, 0, 4), (100, 2 << 20, 2)], ids=["fastest", "objectives", "memory"]
)
def test_the_setting_with_the_most_tokens_that_keeps_the_limits_is_chosen(limit: int, memory: int, slots: int) -> None:
    tuner = searched(Served(limit), memory)
    assert (tuner.chosen.setting.slots, tuner.chosen.setting.prompt_batch) == (slots, 256)
    changed = {line for line in tuner.diff("config.pbtxt").splitlines() if line.startswith("+  ") or '"256"' in line}
    assert any('"256"' in line for line in changed)
    assert "chosen" in language_text(tuner, Screen(False, io.StringIO()))


def test_no_setting_holds_the_objectives() -> None:
    tuner = searched(Served(0))
    assert (tuner.chosen, tuner.diff("f"), tuner.as_json("f")["holds"]) == (None, "", False)
    assert "No setting holds the objectives" in language_text(tuner, Screen(False, io.StringIO()))


def test_the_context_becomes_long_enough_for_the_prompts_unless_the_engine_chooses_it() -> None:
    tuner = searched(Served(100), prompts=PromptPlan(words=Lengths(5000, 6000), output=Lengths(100, 100)))
    assert {trial.setting.context_length for trial in tuner.trials} == {6144}
    assert '"6144"' in tuner.diff("f")
    served = Served(100)
    chosen = searched(served, text=TEXT.replace("llamacpp", "vllm")).chosen
    assert (chosen.setting.slots, chosen.setting.prompt_batch) == (8, 256)
    assert all("context_length" not in config.parameters for config in served.configs)


def test_a_setting_that_cannot_be_loaded_ends_the_search_for_more_slots() -> None:
    served = Served(100)
    served.load = lambda plan: faster(Served.load(served, plan), served.slots)  # type: ignore[method-assign]
    tuner = searched(served)
    assert [trial.error for trial in tuner.trials if trial.setting.slots == 32] == ["no memory for the KV cache"]
    assert tuner.chosen.setting.slots == 16


def faster(found: Any, slots: int) -> Any:
    """The speed continues to grow with the slots."""
    return replace(found, language=replace(found.language, output_per_s=Interval(slots * 100, 0, 0)))


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


def found(text: str, p99_ms: float, memory: int = 0) -> Any:
    server = SequenceServer()
    model = TunedSequenceModel(text, tuned(text).config)
    goal = SequenceGoal(round(p99_ms * MS), LENGTH, memory, (1, 3))
    tuner = SequenceTuner(server, model, goal, lambda text: None)
    tuner.run()
    return tuner


def test_more_candidates_and_instances_are_found() -> None:
    tuner = found(OLDEST, 30)
    chosen, (first, *_) = tuner.chosen, tuner.trials
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
    assert (chosen.setting.instances, chosen.setting.candidates, chosen.setting.delay_us) == (2, 0, 0)
    assert {trial.setting.utilization for trial in tuner.trials} == {0.0, 0.5, 1.0}
    waiting = next(trial.setting for trial in tuner.trials if trial.setting.utilization)
    batching: Any = parse(tuner.model.text_of(waiting)).sequence_batching
    direct = batching.direct
    assert (direct.max_queue_delay_microseconds, direct.minimum_slot_utilization) == (waiting.delay_us, 0.5)
    assert tuner.as_json("x")["strategy"] == "direct"


def test_the_limits_bound_the_choice() -> None:
    small = found(OLDEST, 30, memory=(EACH_MIB + 50) * MIB).chosen
    assert small.setting.instances == 1
    none = found(DIRECT, 3)
    assert (none.chosen, none.diff("x"), none.as_json("x")["holds"]) == (None, "", False)
    assert "No setting holds the p99" in sequence_text(none, Screen(False, io.StringIO()))
    with pytest.raises(Unsupported, match="has iterative_sequence"):
        check_sequences(parse("sequence_batching { iterative_sequence: true }"))
