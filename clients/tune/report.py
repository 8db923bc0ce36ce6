"""The outcome as text, as JSON, and as a diff of config.pbtxt. `html` draws it."""

from __future__ import annotations

from difflib import unified_diff
from typing import Any

from shmserve.clients.tune.confirm import Confirmed
from shmserve.clients.tune.reasons import MIB, MS, prediction_error, reasons
from shmserve.clients.tune.space import Candidate
from shmserve.clients.tune.tuner import Outcome
from shmserve.terminal.console import FAINT, GOOD, HEAD, Column, Screen

COLUMNS = (
    Column("SETTING"),
    Column("PREDICTED/S", right=True),
    Column("MEASURED/S", right=True),
    Column("P99 MS", right=True, rank=1),
    Column("BATCH", right=True, rank=2),
    Column("MIB", right=True, rank=3),
    Column(""),
)
POINTS = (
    Column("REQUESTS/S", right=True),
    Column("PREDICTED P99 MS", right=True),
    Column("MEASURED P99 MS", right=True),
    Column("ERROR", right=True),
)


def diff(outcome: Outcome, path: str) -> str:
    """The changes of config.pbtxt as a unified diff; empty if there are none."""
    if outcome.chosen is None:
        return ""
    before, after = outcome.model.text, outcome.model.text_of(outcome.chosen)
    lines = unified_diff(before.splitlines(), after.splitlines(), f"a/{path}", f"b/{path}", lineterm="")
    return "\n".join(lines) + "\n" if before != after else ""


def text(outcome: Outcome, screen: Screen) -> str:
    """Everything but the diff."""
    parts = []
    if outcome.confirmed:
        parts.append(screen.table(COLUMNS, [_row(outcome, each) for each in outcome.confirmed]))
    if outcome.curve:
        rows = _points(outcome)
        parts.append(f"{screen.styled('The chosen setting, by load:', HEAD)}\n{screen.table(POINTS, rows)}")
    if outcome.chosen is not None:
        lines = [screen.styled(f"Best: {outcome.chosen.describe()}", GOOD)]
        for reason in reasons(outcome):
            lines += screen.wrapped(reason, "  ", "    ")
        parts.append("\n".join(lines))
    elif nothing := reasons(outcome):
        parts.append("\n".join(line for reason in nothing for line in screen.wrapped(reason, "", "")))
    took = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in outcome.seconds.items())
    parts.append(screen.styled(f"{outcome.searched} settings simulated; {took}", FAINT))
    return "\n\n".join(parts)


def _row(outcome: Outcome, each: Confirmed) -> list[str]:
    goal = outcome.goal
    rate = goal.rate or each.rate
    at = [point for point in each.points if point.rate == rate]
    notes = ["chosen"] if each.candidate == outcome.chosen else []
    notes += ["present"] if each.candidate == outcome.model.current else []
    notes += [each.error] if each.error else []
    return [
        each.candidate.describe(),
        f"{each.predicted.rate:,.0f}" if each.predicted is not None else "-",
        f"{each.rate:,.0f}" if each.rate else "-",
        f"{each.p99_ns(rate) / MS:.2f}" if at else "-",
        f"{at[-1].mean_batch:.1f}" if at else "-",
        f"{each.memory / MIB:,.0f}" if each.memory else "-",
        ", ".join(notes),
    ]


def _points(outcome: Outcome) -> list[list[str]]:
    """The predicted curve of the chosen setting, with the measured points."""
    found = outcome.of(outcome.chosen)
    rows = []
    for told in outcome.curve:
        measured = found is not None and any(point.rate == told.rate for point in found.points)
        p99 = found.p99_ns(told.rate) if found is not None and measured else 0.0
        finite = 0 < p99 < float("inf")
        error = f"{told.p99_ns / p99 - 1:+.0%}" if finite else "-"
        seen = f"{p99 / MS:.2f}" if finite else ("overloaded" if measured else "-")
        rows.append([f"{told.rate:,.0f}", f"{told.p99_ns / MS:.2f}", seen, error])
    return rows


def settings(candidate: Candidate) -> dict[str, int]:
    return {name: getattr(candidate, name) for name in candidate.__struct_fields__}


def as_json(outcome: Outcome, path: str) -> dict[str, Any]:
    goal = outcome.goal
    return {
        "model": outcome.model.name,
        "p99_ms": goal.p99_ns / MS,
        "rate": goal.rate or None,
        "memory_bytes": goal.memory or None,
        "interrupted": outcome.interrupted or None,
        "holds": outcome.holds,
        "chosen": settings(outcome.chosen) if outcome.chosen is not None else None,
        "present": settings(outcome.model.current),
        "reasons": reasons(outcome),
        "diff": diff(outcome, path),
        "confirmed": [_confirmed(outcome, each) for each in outcome.confirmed],
        "curve": [
            {"rate": told.rate, "p50_ms": told.p50_ns / MS, "p99_ms": told.p99_ns / MS, "mean_batch": told.mean_batch}
            for told in outcome.curve
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
            {"instances": count, "threads": threads or None, "bytes": size}
            for (count, threads), size in sorted(outcome.times.memory.items())
        ],
        "simulated": outcome.searched,
        "seconds": {name: round(seconds, 2) for name, seconds in outcome.seconds.items()},
    }


def _confirmed(outcome: Outcome, each: Confirmed) -> dict[str, Any]:
    predicted = each.predicted
    return {
        "settings": settings(each.candidate),
        "predicted": {"rate": predicted.rate, "p99_ms": predicted.p99_ns / MS} if predicted is not None else None,
        "rate": each.rate or None,
        "prediction_error": prediction_error(outcome, each.candidate),
        "memory_bytes": each.memory,
        "error": each.error or None,
        "points": [
            {
                "rate": point.rate,
                "responses_per_s": point.per_s,
                "p50_ms": point.p50_ns / MS,
                "p99_ms": point.p99_ns / MS if point.p99_ns < float("inf") else None,
                "mean_batch": point.mean_batch,
                "holds": point.holds,
            }
            for point in each.points
        ],
    }
