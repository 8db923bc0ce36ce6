"""The outcome of tuning several models together, as text and as JSON, beside an earlier one."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from math import inf
from statistics import median
from typing import Any

from msgspec.structs import asdict

from shmserve.errors import InvalidRequest
from shmserve.terminal.console import Column, Screen
from shmserve.tools.load.report.table import rate_text
from shmserve.tools.tune import compared, report
from shmserve.tools.tune.goal import MIB, MS
from shmserve.tools.tune.joint import JointTuner, Settings

Document = Mapping[str, Any]
MODELS = (
    Column("MODEL"),
    Column("PRESENT"),
    Column("BEST"),
    Column("BUSY", right=True, rank=1),
    Column("MIB", right=True, rank=2),
    Column("GPU MIB", right=True, rank=2),
)
TARGETS = (
    Column("MODEL"),
    Column("REQUESTS/S", right=True),
    Column("P99 MS", right=True),
    Column("LIMIT MS", right=True),
)


def text(tuner: JointTuner, screen: Screen) -> str:
    outcome, chosen = tuner.outcome, tuner.outcome.chosen
    if chosen is None or outcome.best is None:
        return "No setting holds the targets in the simulator."
    rows = []
    for measured, now, best, busy in zip(tuner.measured, tuner.present, chosen, outcome.best.busy, strict=True):
        memory = [report.mib(size) for size in (measured.bytes_of(best), measured.gpu_bytes_of(best))]
        described = best.describe() if best != now else "as it is"
        rows.append([measured.step.model.name, now.describe(), described, f"{busy:.0%}", *memory])
    parts = [screen.table(MODELS, rows)]
    if reached := _reached(tuner, chosen):
        cells = []
        for name, each in reached.items():
            p99 = f"{each['p99_ms']:.2f}" if each["p99_ms"] is not None else "overloaded"
            cells.append([name, rate_text(each["rate"]), p99, f"{each['limit_ms']:g}"])
        parts.append(screen.table(TARGETS, cells))
    rate = outcome.rate(chosen)
    predicted = "" if tuner.fixed else f"Predicted: {_total(tuner, outcome.best.rate)} requests/s; "
    reached_rate = f"{_total(tuner, rate)} requests/s"
    result = ("the targets hold" if tuner.fixed else reached_rate) if rate else "none holds"
    lines = [f"{predicted}measured: {result}."]
    if chosen != tuner.present and not tuner.fixed:
        lines.append(f"The present settings reach {_total(tuner, outcome.rate(tuner.present))} requests/s.")
    return "\n\n".join([*parts, "\n".join(lines)])


def _total(tuner: JointTuner, rate: float) -> str:
    return rate_text(rate * sum(target.share for target in tuner.targets))


def _reached(tuner: JointTuner, settings: Settings) -> dict[str, dict[str, Any]]:
    """Target -> what it reached on the server at the highest rate that held, or at the lowest that was tried."""
    points = tuner.outcome.points.get(settings)
    if not points:
        return {}
    rate = tuner.outcome.rate(settings) or min(point.rate for point in points)
    reached = {}
    for index, target in enumerate(tuner.targets):
        p99 = median(point.targets[index].p99_ns for point in points if point.rate == rate)
        reached[target.name] = {
            "rate": rate * target.share,
            "p99_ms": p99 / MS if p99 < inf else None,
            "limit_ms": target.goal.p99_ns / MS,
        }
    return reached


def as_json(tuner: JointTuner) -> dict[str, Any]:
    outcome, chosen = tuner.outcome, tuner.outcome.chosen
    settings = chosen or tuner.present
    busy = outcome.best.busy if outcome.best is not None else (None,) * len(tuner.steps)
    return {
        "targets": {
            target.name: {"p99_ms": target.goal.p99_ns / MS, "rate": target.share if tuner.fixed else None}
            for target in tuner.targets
        },
        "holds": chosen is not None and outcome.rate(chosen) > 0,
        "present": _reached(tuner, tuner.present),
        "predicted_rate": outcome.best.rate if outcome.best is not None else None,
        "best": _reached(tuner, settings),
        "steps": [
            {
                "model": step.model.name,
                "settings": asdict(candidate),
                "present": asdict(step.model.current),
                "busy": share,
                "memory_bytes": (measured.bytes_of(candidate) or None) if measured is not None else None,
                "gpu_memory_bytes": (measured.gpu_bytes_of(candidate) or None) if measured is not None else None,
            }
            for step, candidate, share, measured in zip_longest(tuner.steps, settings, busy, tuner.measured)
        ],
    }


def check(before: Any, targets: Document) -> Document:
    """Returns the earlier outcome. Raises InvalidRequest if it is none, or has other targets."""
    if not isinstance(before, dict) or not {"targets", "best", "steps"} <= before.keys():
        raise InvalidRequest("not what `shmserve tune --json` prints for several models")
    if before["targets"] != targets:
        raise InvalidRequest(f"its targets are {before['targets']}, and here they are {targets}")
    return before


def comparison(before: Document, now: Document, screen: Screen) -> str:
    rows = []
    old, new = ({step["model"]: step for step in document["steps"]} for document in (before, now))
    for model in old.keys() & new.keys():
        both = old[model], new[model]
        rows.append([model, *(compared.setting(each["settings"]) for each in both), ""])
        rows.append(compared.row(f"{model}: MiB", *((each["memory_bytes"] or 0) / MIB or None for each in both)))
    for target in now["targets"]:
        both = before["best"].get(target, {}), now["best"].get(target, {})
        for label, key in (("requests/s", "rate"), ("p99 ms", "p99_ms")):
            rows.append(compared.row(f"{target}: {label}", *(each.get(key) for each in both)))
    return screen.table(compared.COLUMNS, sorted(rows, key=lambda row: row[0]))
