"""Compares an outcome with an earlier one that `shmserve tune --json` printed: the chosen setting, what it reaches, and
how long batches take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shmserve.errors import InvalidRequest
from shmserve.terminal.console import Column, Screen
from shmserve.tools.load.report.table import rate_text
from shmserve.tools.tune.goal import MIB

Document = Mapping[str, Any]
COLUMNS = (Column(""), Column("BEFORE", right=True), Column("NOW", right=True), Column("CHANGE", right=True))
TARGET = ("model", "p99_ms", "rate")
"""What both must have in common, or their rates cannot be compared."""


def check(before: Any, target: Document) -> Document:
    """Returns the earlier outcome. Raises InvalidRequest if it is none, or has another target."""
    if not isinstance(before, dict) or not {*TARGET, "chosen", "confirmed", "service_times"} <= before.keys():
        raise InvalidRequest("not what `shmserve tune --json` prints")
    for name in TARGET:
        if before[name] != target[name]:
            raise InvalidRequest(f"its {name} is {before[name]}, and here it is {target[name]}")
    return before


def text(before: Document, now: Document, screen: Screen) -> str:
    return screen.table(COLUMNS, _rows(before, now))


def _rows(before: Document, now: Document) -> list[list[str]]:
    rows = [["setting", *(setting(document["chosen"] or {}) for document in (before, now)), ""]]
    for name, scale in (("rate", 1.0), ("memory_bytes", 1 / MIB)):
        label = {"rate": "requests/s", "memory_bytes": "MiB"}[name]
        rows.append(row(label, *(_of_chosen(document, name, scale) for document in (before, now))))
    old, new = _batch_ms(before), _batch_ms(now)
    return rows + [row(f"ms per batch of {size}", old[size], new[size]) for size in sorted(old.keys() & new.keys())]


def row(label: str, before: float | None, now: float | None) -> list[str]:
    change = f"{now / before - 1:+.0%}" if before and now else ""
    return [label, *("-" if value is None else rate_text(value) for value in (before, now)), change]


def setting(chosen: Document) -> str:
    return ", ".join(f"{name} {value}" for name, value in chosen.items() if value) or "-"


def _of_chosen(document: Document, name: str, scale: float) -> float | None:
    values = [each[name] for each in document["confirmed"] if each["settings"] == document["chosen"]]
    return values[0] * scale if values and values[0] else None


def _batch_ms(document: Document) -> dict[int, float]:
    """Rows -> milliseconds of a batch, with one instance and the first number of threads that was measured."""
    alone: Sequence[Document] = [each for each in document["service_times"] if each["instances"] == 1]
    return {round(each["rows"]): each["measured_ms"] for each in reversed(alone)}
