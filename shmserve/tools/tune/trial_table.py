"""The settings that were only measured, of language models and of models with sequences, as text."""

from __future__ import annotations

from collections.abc import Sequence

from shmserve.terminal.console import BAD, GOOD, Column, Screen
from shmserve.terminal.tables import bytes_text
from shmserve.tools.load.report.table import percentile_text, rate_text
from shmserve.tools.tune.language import LanguageTuner, Trial
from shmserve.tools.tune.sequences import SequenceTrial, SequenceTuner

LANGUAGE = (
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
SEQUENCES = (
    Column("setting"),
    Column("sequences", right=True),
    Column("requests/s", right=True),
    Column("p99", right=True),
    Column("batch", right=True),
    Column("memory", right=True, rank=1),
    Column("", free=True),
)


def language_text(tuner: LanguageTuner, screen: Screen) -> str:
    chosen, text = tuner.chosen, ""
    if chosen is not None:
        rate = rate_text(chosen.tokens_per_s)
        text = f"{chosen.setting}: {rate} tokens/s, and {chosen.met:.0%} of the requests met the objectives"
    return _table(screen, LANGUAGE, [_language_row(tuner, trial) for trial in tuner.trials], text, "the objectives")


def _language_row(tuner: LanguageTuner, trial: Trial) -> list[str]:
    setting, point = trial.setting, trial.point
    numbers = [f"{setting.slots}", f"{setting.prompt_batch}", f"{setting.context_length}"]
    first = point.first_answer if point is not None else None
    between = point.language.between_tokens if point is not None and point.language is not None else None
    times = [percentile_text(latencies, name) for latencies in (first, between) for name in ("p50", "p90")]
    return [
        *numbers,
        rate_text(trial.tokens_per_s),
        *times,
        f"{trial.met:.0%}",
        bytes_text(trial.memory) if trial.memory else "-",
        _marks(trial.error, trial is tuner.chosen, setting == tuner.model.current),
    ]


def sequence_text(tuner: SequenceTuner, screen: Screen) -> str:
    chosen, text = tuner.chosen, ""
    if chosen is not None:
        text = (
            f"{chosen.setting}: {rate_text(chosen.per_s)} requests/s of {chosen.sequences} sequences at a time hold "
            f"the p99, with {chosen.p99_ns / 1e6:.3g} ms"
        )
    return _table(screen, SEQUENCES, [_sequence_row(tuner, trial) for trial in tuner.trials], text, "the p99")


def _sequence_row(tuner: SequenceTuner, trial: SequenceTrial) -> list[str]:
    problem = trial.error or ("" if trial.per_s else "does not hold the p99")
    text = _marks(problem, trial is tuner.chosen, trial.setting == tuner.model.current)
    if not trial.per_s:
        return [str(trial.setting), "-", "-", "-", "-", "-", text]
    return [
        str(trial.setting),
        f"{trial.sequences}",
        rate_text(trial.per_s),
        f"{trial.p99_ns / 1e6:.3g} ms",
        f"{trial.mean_batch:.3g}",
        bytes_text(trial.memory) if trial.memory else "-",
        text,
    ]


def _table(screen: Screen, columns: Sequence[Column], rows: Sequence[Sequence[str]], chosen: str, target: str) -> str:
    """`chosen`: the setting and what it reaches; "" if no setting holds `target`."""
    end = screen.styled(chosen, GOOD) if chosen else screen.styled(f"No setting holds {target}.", BAD)
    return f"{screen.table(columns, rows)}\n\n{end}"


def _marks(problem: str, is_chosen: bool, is_present: bool) -> str:
    texts = (problem, "chosen" if is_chosen else "", "present" if is_present else "")
    return ", ".join(filter(None, texts))
