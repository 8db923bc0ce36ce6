"""Tunes a model with sequences: its instances, the sequences that each holds, and how long a batch waits for them.

Each setting is measured on the server, with callers that send the requests of one sequence after the other. The number
of callers is raised as long as the p99 holds, so the wait of a sequence for a slot counts. Invariant: the strategy
stays, because the model may rely on it: with `direct`, a sequence keeps its row of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from msgspec import Struct, structs
from msgspec.structs import replace

from shmserve.errors import ServeError, Unsupported
from shmserve.repo.config.edit import Edit, edited, unified
from shmserve.repo.config.schema import ModelConfig, ModelSequenceBatching
from shmserve.repo.load import parse
from shmserve.tools.tune.bench import Observation
from shmserve.tools.tune.measure import COUNTS
from shmserve.tools.tune.space import devices_of, two_digits

GAIN = 1.05
"""Factor by which a setting must raise the rate to be preferred, and for still more of the same to be tried."""
FLAT = 2
"""Number of settings in succession that must fail to do so, as the speed of a machine varies."""
CANDIDATES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DELAYS = (0.025, 0.1, 0.25)
"""Queue delays to try, as shares of the latency target."""
UTILIZATIONS = (0.5, 1.0)
CALLERS = 1024
"""Maximum number of sequences at a time."""


class SequenceSetting(Struct, frozen=True, order=True):
    """`candidates`: max_candidate_sequences; 0: the strategy is `direct`, which has `utilization` instead."""

    instances: int
    candidates: int
    delay_us: int = 0
    utilization: float = 0.0

    def __str__(self) -> str:
        parts = [f"{self.instances} instance{'s' if self.instances > 1 else ''}"]
        parts += (
            [f"{self.candidates} candidate sequence{'s' if self.candidates > 1 else ''}"] if self.candidates else []
        )
        parts += [f"delay {self.delay_us / 1000:g} ms" if self.delay_us else "no delay"]
        parts += [f"slot utilization {self.utilization:g}"] if self.utilization else []
        return ", ".join(parts)


class SequenceGoal(Struct, frozen=True):
    """`length`: requests of a sequence. `memory`: bytes of the model's processes, 0: no limit. `instances`: range of
    the instance count. `seconds`: duration of a measurement."""

    p99_ns: int
    length: int = 10
    memory: int = 0
    instances: tuple[int, int] = (1, 16)
    seconds: float = 2.0


class SequenceTrial(Struct, frozen=True):
    """A measured setting with the most sequences at a time that hold the p99. `error`: why it could not be measured."""

    setting: SequenceSetting
    sequences: int = 0
    per_s: float = 0.0
    p99_ns: float = 0.0
    mean_batch: float = 0.0
    memory: int = 0
    error: str = ""


class SequenceBench(Protocol):
    """A server with the model, and callers for it."""

    def apply(self, config: ModelConfig) -> None: ...

    def memory(self) -> int:
        """Bytes of memory of the model's processes."""
        ...

    def correlated(self, sequences: int, length: int, seconds: float) -> Observation:
        """Measures this many callers, each of which sends one sequence of this length after the other."""
        ...


class TunedSequenceModel(Struct, frozen=True):
    """`text`: its config.pbtxt; `config`: as completed by the server."""

    text: str
    config: ModelConfig

    @property
    def batching(self) -> ModelSequenceBatching:
        assert self.config.sequence_batching is not None
        return self.config.sequence_batching

    @property
    def strategy(self) -> str:
        return "oldest" if self.batching.oldest is not None else "direct"

    @property
    def current(self) -> SequenceSetting:
        count, oldest, direct = self.config.instance_group[0].count, self.batching.oldest, self.batching.direct
        if oldest is not None:
            return SequenceSetting(count, oldest.max_candidate_sequences or 1, oldest.max_queue_delay_microseconds)
        if direct is None:
            return SequenceSetting(count, 0)
        return SequenceSetting(count, 0, direct.max_queue_delay_microseconds, direct.minimum_slot_utilization)

    def slots(self, setting: SequenceSetting) -> int:
        """How many sequences can run at a time."""
        return setting.instances * devices_of(self.config) * (setting.candidates or max(1, self.config.max_batch_size))

    def text_of(self, setting: SequenceSetting) -> str:
        now, edits, place = self.current, [], ("sequence_batching", self.strategy)
        if setting.instances != now.instances:
            groups = range(len(self.config.instance_group))
            edits += [Edit(("instance_group", "count"), str(setting.instances), group) for group in groups]
        for name, before, value in (
            ("max_candidate_sequences", now.candidates, setting.candidates),
            ("max_queue_delay_microseconds", now.delay_us, setting.delay_us),
            ("minimum_slot_utilization", now.utilization, setting.utilization),
        ):
            if value != before:
                edits.append(Edit((*place, name), f"{value:g}" if value else None))
        return edited(self.text, edits)

    def config_of(self, setting: SequenceSetting) -> ModelConfig:
        groups = tuple(replace(group, count=setting.instances) for group in self.config.instance_group)
        provided = parse(self.text_of(setting)).sequence_batching
        return replace(self.config, sequence_batching=provided, instance_group=groups)


def check_sequences(config: ModelConfig) -> None:
    """Raises Unsupported for models whose load the callers cannot generate."""
    batching = config.sequence_batching
    if batching is not None and batching.iterative_sequence:
        raise Unsupported(
            f"model '{config.name}' has iterative_sequence, so a request runs as often as the model wants: measure its "
            "settings with `shmserve bench`"
        )
    if len({(group.kind, group.count, group.passive) for group in config.instance_group}) > 1:
        raise Unsupported(f"model '{config.name}' has different instance groups, and `tune` sets one count for all")


class SequenceTuner:
    """`trials` has the results so far, also after an interrupt."""

    def __init__(
        self, bench: SequenceBench, model: TunedSequenceModel, goal: SequenceGoal, progress: Callable[[str], None]
    ) -> None:
        self._bench = bench
        self._goal = goal
        self._progress = progress
        self.model = model
        self.trials: list[SequenceTrial] = []

    def run(self) -> None:
        start = self.model.current
        self._try(start)
        if start.candidates:
            self._climb(replace(start, candidates=count) for count in CANDIDATES)
        best = self.chosen.setting if self.chosen is not None else start
        low, high = self._goal.instances
        self._climb(replace(best, instances=count) for count in sorted({low, high, *COUNTS}) if low <= count <= high)
        best = self.chosen.setting if self.chosen is not None else start
        for share in DELAYS:
            for utilization in (0.0,) if best.candidates else UTILIZATIONS:
                delay_us = two_digits(share * self._goal.p99_ns / 1000)
                self._try(replace(best, delay_us=delay_us, utilization=utilization))

    def _climb(self, settings: Iterable[SequenceSetting]) -> None:
        """Tries the settings in order, until FLAT of them in succession gain nothing or miss the p99."""
        best, flat = 0.0, 0
        for setting in settings:
            trial = self._try(setting)
            flat = flat + 1 if trial.per_s < best * GAIN or not self.holds(trial) else 0
            if flat == FLAT:
                return
            best = max(best, trial.per_s)

    def _try(self, setting: SequenceSetting) -> SequenceTrial:
        known = next((trial for trial in self.trials if trial.setting == setting), None)
        if known is None:
            try:
                self._bench.apply(self.model.config_of(setting))
                known = self._highest(setting)
            except ServeError as error:
                known = SequenceTrial(setting, error=str(error))
            self.trials.append(known)
        return known

    def _highest(self, setting: SequenceSetting) -> SequenceTrial:
        """Doubles or halves the sequences at a time, from the slots of the setting on, then tries a step between."""
        best, low, high = SequenceTrial(setting), 0, 0
        count = min(self.model.slots(setting), CALLERS)
        while count and count <= CALLERS:
            self._progress(f"{setting}: {count} sequences at a time")
            seen = self._bench.correlated(count, self._goal.length, self._goal.seconds)
            if seen.failed or seen.refused or not seen.per_s:
                reason = seen.error or seen.refusal or "no response arrived"
                return best if low else SequenceTrial(setting, count, error=reason)
            memory = max(best.memory, self._bench.memory())
            if seen.p99_ns <= self._goal.p99_ns:
                gained = seen.per_s >= best.per_s * GAIN
                low = count
                if seen.per_s > best.per_s:
                    best = SequenceTrial(setting, count, seen.per_s, seen.p99_ns, seen.mean_batch, memory)
                if not gained:  # further sequences only wait
                    break
            else:
                high, best = count, replace(best, memory=memory)
            if not high:
                count *= 2
            elif not low:
                count //= 2
            elif high > low + 1 and high == 2 * low:
                count = low + low // 2
            else:
                break
        return best

    def holds(self, trial: SequenceTrial) -> bool:
        limit = self._goal.memory or float("inf")
        return trial.per_s > 0 and trial.memory <= limit

    @property
    def chosen(self) -> SequenceTrial | None:
        """Of the settings with the highest rate, the current one, else the one with the fewest instances and sequences;
        None if none holds the p99."""
        good = [trial for trial in self.trials if self.holds(trial)]
        best = max((trial.per_s for trial in good), default=0.0)
        equal = [trial for trial in good if trial.per_s * GAIN >= best]
        return min(equal, key=lambda trial: (trial.setting != self.model.current, trial.setting), default=None)

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
            "strategy": self.model.strategy,
            "holds": chosen is not None,
            "diff": self.diff(path),
            "trials": [structs.asdict(trial.setting) | _numbers(trial) for trial in self.trials],
        }


def _numbers(trial: SequenceTrial) -> dict[str, Any]:
    return {key: value for key, value in structs.asdict(trial).items() if key != "setting"}
