"""The outcome as text, as JSON, and as a diff of config.pbtxt. `html` draws it."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from statistics import median
from typing import Any

from msgspec.structs import asdict

from shmserve.repo.config.edit import unified
from shmserve.terminal.console import FAINT, GOOD, HEAD, Column, Screen
from shmserve.tools.load.report.table import rate_text
from shmserve.tools.tune.confirm import GIVE_UP, Confirmed
from shmserve.tools.tune.goal import MIB, MS
from shmserve.tools.tune.reasons import prediction_error, reasons
from shmserve.tools.tune.tuner import TuningOutcome

COLUMNS = (
    Column("SETTING"),
    Column("PREDICTED/S", right=True),
    Column("MEASURED/S", right=True),
    Column("P99 MS", right=True, rank=1),
    Column("BATCH", right=True, rank=2),
    Column("MIB", right=True, rank=3),
    Column("GPU MIB", right=True, rank=3),
    Column(""),
)
RATE_COLUMNS = (
    Column("SETTING"),
    Column("PREDICTED P99 MS", right=True, rank=1),
    Column("MEASURED P99 MS", right=True),
    Column("BATCH", right=True, rank=2),
    Column("MIB", right=True, rank=3),
    Column("GPU MIB", right=True, rank=3),
    Column(""),
)
"""Columns with a target rate."""
POINTS = (
    Column("REQUESTS/S", right=True),
    Column("PREDICTED P99 MS", right=True),
    Column("MEASURED P99 MS", right=True),
    Column("ERROR", right=True),
)


def diff(outcome: TuningOutcome, path: str) -> str:
    """The changes of config.pbtxt as a unified diff; empty if there are none."""
    if outcome.chosen is None:
        return ""
    return unified(outcome.model.text, outcome.model.text_of(outcome.chosen), path)


def text(outcome: TuningOutcome, screen: Screen) -> str:
    """Everything but the diff."""
    parts = []
    columns, rows = measured(outcome)
    if rows:
        parts.append(screen.table(columns, rows))
    if outcome.curve:
        curve = screen.table(POINTS, _points(outcome))
        parts.append(f"{screen.styled('The chosen setting, by load:', HEAD)}\n{curve}")
    if outcome.chosen is not None:
        lines = [screen.styled(headline(outcome), GOOD if outcome.holds else HEAD)]
        for reason in reasons(outcome):
            lines += screen.wrapped(reason, "  ", "    ")
        parts.append("\n".join(lines))
    elif nothing := reasons(outcome):
        parts.append("\n".join(line for reason in nothing for line in screen.wrapped(reason, "", "")))
    took = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in outcome.seconds.items())
    parts.append(screen.styled(f"{outcome.searched} settings simulated; {took}", FAINT))
    return "\n\n".join(parts)


def headline(outcome: TuningOutcome) -> str:
    """The chosen setting, and a note if it has not held the target."""
    if outcome.chosen is None:
        return "Nothing found"
    setting = outcome.chosen.describe()
    if outcome.holds:
        return f"Best: {setting}"
    result = outcome.of(outcome.chosen)
    if result is None or not result.points:
        return f"Best prediction, not measured: {setting}"
    return f"No setting held the target on the server. The closest: {setting}"


def measured(outcome: TuningOutcome) -> tuple[Sequence[Column], list[list[str]]]:
    """The table of the settings that were measured on the server."""
    results = [each for each in outcome.confirmed if each.points or each.error]
    return RATE_COLUMNS if outcome.goal.rate else COLUMNS, [_row(outcome, each) for each in results]


def _row(outcome: TuningOutcome, each: Confirmed) -> list[str]:
    goal, predicted = outcome.goal, each.predicted
    lowest = min((point.rate for point in each.points), default=0.0)
    rate = goal.rate or each.rate or lowest
    at = [point for point in each.points if point.rate == rate]
    times = [point.p99_ns for point in at]
    notes = ["chosen"] if each.candidate == outcome.chosen else []
    notes += ["present"] if each.candidate == outcome.model.current else []
    notes += [each.error] if each.error else []
    if goal.rate:
        rates = [_p99(predicted.p99_ns) if predicted is not None else "-"]
    else:
        reached = rate_text(each.rate) if each.rate else f"< {rate_text(lowest)}" if lowest else "-"
        rates = [rate_text(predicted.rate) if predicted is not None else "-", reached]
    return [
        each.candidate.describe(),
        *rates,
        _p99(median(times) if goal.rate or each.rate else max(times)) if at else "-",
        f"{at[-1].mean_batch:.1f}" if at else "-",
        mib(each.memory),
        mib(each.gpu_memory),
        ", ".join(notes),
    ]


def mib(size: int) -> str:
    """A number of bytes that is 0 if unknown."""
    return f"{size / MIB:,.0f}" if size else "-"


def _points(outcome: TuningOutcome) -> list[list[str]]:
    """The predicted curve of the chosen setting, with the measured points."""
    result = outcome.of(outcome.chosen)
    rows = []
    for predicted in outcome.curve:
        known = result is not None and any(point.rate == predicted.rate for point in result.points)
        p99 = result.p99_ns(predicted.rate) if result is not None and known else 0.0
        # A measurement would have ended there. Beyond that, the length of the queue only depends on the length of the
        # simulation.
        expected = predicted.p99_ns if predicted.p99_ns <= GIVE_UP * outcome.goal.p99_ns else inf
        finite = 0 < p99 < inf and expected < inf
        error = f"{expected / p99 - 1:+.0%}" if finite else "-"
        seen = _p99(p99) if known else "-"
        rows.append([rate_text(predicted.rate), _p99(expected), seen, error])
    return rows


def _p99(ns: float) -> str:
    """The p99 as text. Infinite: the queue grew until the measurement ended, or more than 1 % of the requests were
    refused."""
    return f"{ns / MS:.2f}" if ns < inf else "overloaded"


def _ms(ns: float) -> float | None:
    """Milliseconds for JSON, which has no infinity."""
    return ns / MS if ns < inf else None


def as_json(outcome: TuningOutcome, path: str) -> dict[str, Any]:
    goal = outcome.goal
    return {
        "model": outcome.model.name,
        "p99_ms": goal.p99_ns / MS,
        "rate": goal.rate or None,
        "objective": goal.objective or None,
        "memory_bytes": goal.memory or None,
        "interrupted": outcome.interrupted or None,
        "holds": outcome.holds,
        "chosen": asdict(outcome.chosen) if outcome.chosen is not None else None,
        "present": asdict(outcome.model.current),
        "reasons": reasons(outcome),
        "diff": diff(outcome, path),
        "confirmed": [_confirmed(outcome, each) for each in outcome.confirmed],
        "curve": [
            {
                "rate": predicted.rate,
                "p50_ms": _ms(predicted.p50_ns),
                "p99_ms": _ms(predicted.p99_ns),
                "mean_batch": predicted.mean_batch,
            }
            for predicted in outcome.curve
        ],
        "service_times": [
            {
                "instances": sample.instances,
                "threads": sample.threads or None,
                "rows": sample.rows,
                "length": sample.length,
                "measured_ms": sample.batch_ns / MS,
                "fitted_ms": outcome.fits[sample.pair].ns(max(1, round(sample.rows)), sample.length) / MS
                if sample.pair in outcome.fits
                else None,
            }
            for sample in outcome.times.samples
        ],
        "memory": [
            {
                "instances": count,
                "threads": threads or None,
                "bytes": size,
                "gpu_bytes": outcome.times.gpu_memory[count, threads],
            }
            for (count, threads), size in sorted(outcome.times.memory.items())
        ],
        "frontier": [
            {
                "settings": asdict(each.candidate),
                "bytes": outcome.memory_of(each.candidate),
                "rate": each.rate,
                "p99_ms": _ms(each.p99_ns),
            }
            for each in outcome.frontier
        ],
        "simulated": outcome.searched,
        "seconds": {name: round(seconds, 2) for name, seconds in outcome.seconds.items()},
    }


def _confirmed(outcome: TuningOutcome, each: Confirmed) -> dict[str, Any]:
    predicted = each.predicted
    return {
        "settings": asdict(each.candidate),
        "predicted": {"rate": predicted.rate, "p99_ms": _ms(predicted.p99_ns)} if predicted is not None else None,
        "rate": each.rate or None,
        "prediction_error": prediction_error(outcome, each.candidate),
        "memory_bytes": each.memory,
        "gpu_memory_bytes": each.gpu_memory,
        "error": each.error or None,
        "points": [
            {
                "rate": point.rate,
                "responses_per_s": point.per_s,
                "p50_ms": _ms(point.p50_ns),
                "p99_ms": _ms(point.p99_ns),
                "mean_batch": point.mean_batch,
                "refused": point.refused,
                "holds": point.holds,
            }
            for point in each.points
        ],
    }
