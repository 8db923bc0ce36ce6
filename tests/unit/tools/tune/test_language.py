"""The search for the settings of a language model, on a server whose speed follows from them."""

from __future__ import annotations

import io

import pytest
from msgspec.structs import replace

from shmserve.errors import Unavailable
from shmserve.repo.config.schema import ModelConfig, parameter
from shmserve.repo.load import parse
from shmserve.terminal.console import Screen
from shmserve.tools.load.plan import ClosedLoop, Lengths, LoadPlan, Objectives, PromptPlan
from shmserve.tools.load.record import Interval, Language, Point
from shmserve.tools.tune.language import LanguageGoal, LanguageTuner, TunedLanguageModel
from shmserve.tools.tune.trial_table import language_text
from tests.unit.tools.load.points import latencies, point, window

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


def tuned(served: Served, memory: int = 0, prompts: PromptPlan = PromptPlan(), text: str = TEXT) -> LanguageTuner:  # noqa: B008
    model = TunedLanguageModel(text, replace(parse(text), name="m"))
    tuner = LanguageTuner(served, model, LanguageGoal(Objectives(ttft=1), prompts, memory), lambda text: None)
    tuner.run()
    return tuner


@pytest.mark.parametrize(
    ("limit", "memory", "slots"), [(100, 0, 8), (4, 0, 4), (100, 2 << 20, 2)], ids=["fastest", "objectives", "memory"]
)
def test_the_setting_with_the_most_tokens_that_keeps_the_limits_is_chosen(limit: int, memory: int, slots: int) -> None:
    tuner = tuned(Served(limit), memory)
    assert tuner.chosen is not None
    assert (tuner.chosen.setting.slots, tuner.chosen.setting.prompt_batch) == (slots, 256)
    changed = {line for line in tuner.diff("config.pbtxt").splitlines() if line.startswith("+  ") or '"256"' in line}
    assert any('"256"' in line for line in changed)
    assert "chosen" in language_text(tuner, Screen(False, io.StringIO()))


def test_no_setting_holds_the_objectives() -> None:
    tuner = tuned(Served(0))
    assert (tuner.chosen, tuner.diff("f"), tuner.as_json("f")["holds"]) == (None, "", False)
    assert "No setting holds the objectives" in language_text(tuner, Screen(False, io.StringIO()))


def test_the_context_becomes_long_enough_for_the_prompts() -> None:
    tuner = tuned(Served(100), prompts=PromptPlan(words=Lengths(5000, 6000), output=Lengths(100, 100)))
    assert {trial.setting.context_length for trial in tuner.trials} == {6144}
    assert '"6144"' in tuner.diff("f")


def test_the_context_that_an_engine_chooses_is_left_to_it() -> None:
    served = Served(100)
    tuner = tuned(served, text=TEXT.replace("llamacpp", "vllm"))
    assert tuner.chosen is not None
    assert (tuner.chosen.setting.slots, tuner.chosen.setting.prompt_batch) == (8, 256)
    assert all("context_length" not in config.parameters for config in served.configs)


def test_a_setting_that_cannot_be_loaded_ends_the_search_for_more_slots() -> None:
    served = Served(100)
    served.load = lambda plan: faster(Served.load(served, plan), served.slots)  # type: ignore[method-assign]
    tuner = tuned(served)
    assert [trial.error for trial in tuner.trials if trial.setting.slots == 32] == ["no memory for the KV cache"]
    assert tuner.chosen is not None
    assert tuner.chosen.setting.slots == 16


def faster(found: Point, slots: int) -> Point:
    """The speed continues to grow with the slots."""
    assert found.language is not None
    return replace(found, language=replace(found.language, output_per_s=Interval(slots * 100, 0, 0)))
