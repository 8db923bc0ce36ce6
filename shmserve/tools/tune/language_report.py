"""The measured settings of a language model as text."""

from __future__ import annotations

from shmserve.terminal.console import Column, Screen
from shmserve.terminal.tables import bytes_text
from shmserve.tools.load.report.table import percentile_text, rate_text
from shmserve.tools.tune.language import LanguageTuner, Trial
from shmserve.tools.tune.trial_table import marks, trials_text

TRIALS = (
    Column("slots", right=True),
    Column("prompt batch", right=True),
    Column("context", right=True),
    Column("tokens/s", right=True),
    Column("first token p50", right=True),
    Column("p90", right=True, rank=1),
    Column("between tokens p50", right=True),
    Column("p90", right=True, rank=1),
    Column("met", right=True),
    Column("memory", right=True),
    Column("", free=True),
)


def language_text(tuner: LanguageTuner, screen: Screen) -> str:
    chosen, text = tuner.chosen, ""
    if chosen is not None:
        rate = rate_text(chosen.tokens_per_s)
        text = f"{chosen.setting}: {rate} tokens/s, and {chosen.met:.0%} of the requests met the objectives"
    return trials_text(screen, TRIALS, [_row(tuner, trial) for trial in tuner.trials], text, "the objectives")


def _row(tuner: LanguageTuner, trial: Trial) -> list[str]:
    setting, point = trial.setting, trial.point
    numbers = [f"{setting.slots}", f"{setting.prompt_batch}", f"{setting.context_length}"]
    first = point.first_answer if point is not None else None
    between = point.language.between_tokens if point is not None and point.language is not None else None
    times = [percentile_text(found, name) for found in (first, between) for name in ("p50", "p90")]
    return [
        *numbers,
        rate_text(trial.tokens_per_s),
        *times,
        f"{trial.met:.0%}",
        bytes_text(trial.memory) if trial.memory else "-",
        marks(trial.error, trial is tuner.chosen, setting == tuner.model.current),
    ]
