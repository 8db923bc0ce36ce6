"""Tunes a language model, which forms its batches itself: its slots, its prompt batch and its context length.

Each setting is measured on the server, with all slots in use and nothing waiting. First the slots are doubled as long
as the objectives are met, then sizes of the prompt batch are tried. Invariant: the context is never made shorter,
because callers may need it; it becomes longer if the prompts to measure need that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from msgspec import Struct, structs
from msgspec.structs import replace

from shmserve.errors import ServeError
from shmserve.repo.config.edit import Edit, edited, unified
from shmserve.repo.config.schema import ModelConfig, ModelParameter, parameter
from shmserve.tools.load.plan import DEFAULT_OUTPUT, ClosedLoop, LoadPlan, MeasureSettings, Objectives, PromptPlan
from shmserve.tools.load.record import Point

DEFAULTS = {
    "llamacpp": {"slots": 4, "prompt_batch": 512, "context_length": 4096},
    "vllm": {"slots": 256, "prompt_batch": 0, "context_length": 0},
}
"""Backend -> the parameters that can be tuned, and their defaults; 0: the engine chooses one for the model."""
MAX_SLOTS = 256
GAIN = 1.05
"""Factor by which more slots must raise the tokens per second for still more to be tried."""
FLAT = 2
"""How often they must fail to do so: the speed of a machine varies."""
MET = 0.95
"""Share of the requests that must meet the objectives."""
PROMPT_BATCHES = (64, 128, 256, 512, 1024, 2048)
CONTEXT_STEP = 256
WINDOWS = 2


class LanguageSetting(Struct, frozen=True):
    """The fields are the names of the parameters."""

    slots: int
    prompt_batch: int
    context_length: int

    def __str__(self) -> str:
        return f"{self.slots} slots, prompt_batch {self.prompt_batch}, context_length {self.context_length}"


class LanguageGoal(Struct, frozen=True):
    """`memory`: bytes of the model's processes, 0: no limit. `seconds`: duration of a measurement."""

    objectives: Objectives
    prompts: PromptPlan
    memory: int = 0
    seconds: float = 2.0


class Trial(Struct, frozen=True):
    """A measured setting. `error`: why it could not be measured."""

    setting: LanguageSetting
    point: Point | None
    memory: int = 0
    error: str = ""

    @property
    def tokens_per_s(self) -> float:
        return self.point.language.output_per_s.mean if self.point is not None and self.point.language else 0.0

    @property
    def met(self) -> float:
        """The share of the requests that met the objectives."""
        point = self.point
        if point is None or point.language is None or point.language.good is None or not point.throughput.mean:
            return 0.0
        return point.language.good.mean / point.throughput.mean


class LanguageBench(Protocol):
    """A server with the model."""

    def apply(self, config: ModelConfig) -> None: ...

    def memory(self) -> int:
        """Bytes of memory of the model's processes."""
        ...

    def load(self, plan: LoadPlan) -> Point:
        """Raises ServeError if the load cannot be put on the model."""
        ...


class TunedLanguageModel(Struct, frozen=True):
    """`text`: its config.pbtxt; `config`: as completed by the server."""

    text: str
    config: ModelConfig

    @property
    def current(self) -> LanguageSetting:
        return LanguageSetting(
            **{name: int(parameter(self.config, name) or value) for name, value in self._defaults.items()}
        )

    @property
    def _defaults(self) -> Mapping[str, int]:
        return DEFAULTS[self.config.backend]

    def _changes(self, setting: LanguageSetting) -> dict[str, str]:
        now = structs.asdict(self.current)
        return {name: str(value) for name, value in structs.asdict(setting).items() if value != now[name]}

    def text_of(self, setting: LanguageSetting) -> str:
        return edited(
            self.text, [Edit(("parameters", name), f'"{value}"') for name, value in self._changes(setting).items()]
        )

    def config_of(self, setting: LanguageSetting) -> ModelConfig:
        changes = {name: ModelParameter(string_value=value) for name, value in self._changes(setting).items()}
        return replace(self.config, parameters={**self.config.parameters, **changes})


class LanguageTuner:
    """`trials` has the results so far, also after an interrupt."""

    def __init__(
        self, bench: LanguageBench, model: TunedLanguageModel, goal: LanguageGoal, progress: Callable[[str], None]
    ) -> None:
        self._bench = bench
        self._goal = goal
        self._progress = progress
        self.model = model
        self.trials: list[Trial] = []

    def run(self) -> None:
        start = self.model.current
        if start.context_length:
            start = replace(start, context_length=max(start.context_length, self._needed))
        self._try(start)
        for setting in self._more_slots(replace(start, slots=1)):
            self._try(setting)
        best = self.chosen
        if best is not None:
            for size in PROMPT_BATCHES:
                if size <= (best.setting.context_length or size):
                    self._try(replace(best.setting, prompt_batch=size))

    @property
    def _needed(self) -> int:
        """The context that the longest prompt and its text need."""
        prompts = self._goal.prompts
        tokens = prompts.words.high + (prompts.output.high if prompts.output is not None else DEFAULT_OUTPUT)
        return -(-tokens // CONTEXT_STEP) * CONTEXT_STEP

    def _more_slots(self, setting: LanguageSetting) -> Iterator[LanguageSetting]:
        best, flat = 0.0, 0
        while setting.slots <= MAX_SLOTS:
            yield setting
            trial = next(trial for trial in self.trials if trial.setting == setting)
            flat = flat + 1 if trial.tokens_per_s < best * GAIN else 0
            if not self.holds(trial) or flat == FLAT:
                return
            best = max(best, trial.tokens_per_s)
            setting = replace(setting, slots=2 * setting.slots)

    def _try(self, setting: LanguageSetting) -> None:
        if any(trial.setting == setting for trial in self.trials):
            return
        self._progress(str(setting))
        window = round(self._goal.seconds * 1e9 / WINDOWS)
        plan = LoadPlan(
            model=self.model.config.name,
            loads=(ClosedLoop(setting.slots),),
            prompts=self._goal.prompts,
            objectives=self._goal.objectives,
            stream=True,
            settings=MeasureSettings(warmup_ns=window // 2, window_ns=window, min_windows=WINDOWS, max_windows=WINDOWS),
            processes=1,
        )
        try:
            self._bench.apply(self.model.config_of(setting))
            point = self._bench.load(plan)
        except ServeError as error:
            self.trials.append(Trial(setting, None, error=str(error)))
        else:
            self.trials.append(Trial(setting, point, self._bench.memory(), next(iter(point.errors), "")))

    def holds(self, trial: Trial) -> bool:
        limit = self._goal.memory or float("inf")
        return not trial.error and trial.met >= MET and trial.memory <= limit

    @property
    def chosen(self) -> Trial | None:
        """The setting with the most tokens per second of those that hold the objectives, the current one if it is as
        good; None if none does."""
        good = [trial for trial in self.trials if self.holds(trial)]
        best = max((trial.tokens_per_s for trial in good), default=0.0)
        return next((trial for trial in good if trial.tokens_per_s * GAIN >= best), None)

    @property
    def text(self) -> str:
        """config.pbtxt with the chosen setting; as it is if there is none."""
        chosen = self.chosen
        return self.model.text_of(chosen.setting) if chosen is not None else self.model.text

    def diff(self, path: str) -> str:
        """The changes of config.pbtxt as a unified diff; empty if there are none."""
        return unified(self.model.text, self.text, path)

    def as_json(self, path: str) -> dict[str, Any]:
        chosen = self.chosen
        return {
            "chosen": structs.asdict(chosen.setting) if chosen is not None else None,
            "present": structs.asdict(self.model.current),
            "holds": chosen is not None,
            "diff": self.diff(path),
            "trials": [
                structs.asdict(trial.setting)
                | {"tokens_per_s": trial.tokens_per_s, "met": trial.met, "memory": trial.memory, "error": trial.error}
                for trial in self.trials
            ],
        }
