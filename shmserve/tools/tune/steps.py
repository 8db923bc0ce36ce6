"""How busy the models of an ensemble are under load, from the server's statistics: the busiest one limits it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shmserve.terminal.console import Column, Screen

COLUMNS = (
    Column("STEP"),
    Column("INSTANCES", right=True),
    Column("BUSY", right=True),
    Column("MS PER BATCH", right=True),
    Column("ROWS PER BATCH", right=True, rank=1),
)
PHASES = ("compute_input", "compute_infer", "compute_output")


class StepUse(NamedTuple):
    """The model of a step. `busy`: the share of the time in which its instances ran batches."""

    model: str
    instances: int
    busy: float
    batch_ms: float
    batch_rows: float


def step_uses(
    before: Mapping[str, Any], after: Mapping[str, Any], instances: Mapping[str, int], elapsed_ns: int
) -> list[StepUse]:
    """The busiest first. `before` and `after`: documents of statistics. `instances`: of each model, and only of those
    that have some, which ensembles have not."""
    old, new = _sums(before), _sums(after)
    uses = []
    for model, count in instances.items():
        batches, rows, ns = (b - a for a, b in zip(old.get(model, (0, 0, 0)), new[model], strict=True))
        divisor = max(batches, 1)
        uses.append(StepUse(model, count, ns / (elapsed_ns * count), ns / divisor / 1e6, rows / divisor))
    return sorted(uses, key=lambda use: -use.busy)


def _sums(document: Mapping[str, Any]) -> dict[str, tuple[int, int, int]]:
    """Model -> batches, rows, and nanoseconds of its batches, over its versions."""
    sums: dict[str, tuple[int, int, int]] = {}
    for entry in document["model_stats"]:
        batches, rows, ns = sums.get(entry["name"], (0, 0, 0))
        for sized in entry["batch_stats"]:
            count = sized["compute_infer"]["count"]
            batches += count
            rows += count * sized["batch_size"]
            ns += sum(sized[phase]["ns"] for phase in PHASES)
        sums[entry["name"]] = batches, rows, ns
    return sums


def text(uses: Sequence[StepUse], screen: Screen) -> str:
    rows = [
        [use.model, str(use.instances), f"{use.busy:.0%}", f"{use.batch_ms:.3g}", f"{use.batch_rows:.3g}"]
        for use in uses
    ]
    return screen.table(COLUMNS, rows)
