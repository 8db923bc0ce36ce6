"""The measured settings of a model with sequences as text."""

from __future__ import annotations

from shmserve.terminal.console import Column, Screen
from shmserve.terminal.tables import bytes_text
from shmserve.tools.load.report.table import rate_text
from shmserve.tools.tune.sequences import SequenceTrial, SequenceTuner
from shmserve.tools.tune.trial_table import marks, trials_text

TRIALS = (
    Column("setting"),
    Column("sequences", right=True),
    Column("requests/s", right=True),
    Column("p99", right=True),
    Column("batch", right=True),
    Column("memory", right=True, rank=1),
    Column("", free=True),
)


def sequence_text(tuner: SequenceTuner, screen: Screen) -> str:
    chosen, text = tuner.chosen, ""
    if chosen is not None:
        text = (
            f"{chosen.setting}: {rate_text(chosen.per_s)} requests/s of {chosen.sequences} sequences at a time hold "
            f"the p99, with {chosen.p99_ns / 1e6:.3g} ms"
        )
    return trials_text(screen, TRIALS, [_row(tuner, trial) for trial in tuner.trials], text, "the p99")


def _row(tuner: SequenceTuner, trial: SequenceTrial) -> list[str]:
    problem = trial.error or ("" if trial.per_s else "does not hold the p99")
    text = marks(problem, trial is tuner.chosen, trial.setting == tuner.model.current)
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
