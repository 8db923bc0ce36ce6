"""Several servers as text, or as JSON; also the lines above the tables of the live view."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shmserve.terminal.tables import visible
from shmserve.tools.top.columns import STATES, Table
from shmserve.tools.top.fleet.totals import FLEET_TABLES, FleetView
from shmserve.tools.top.panels import joined, labelled, number_text
from shmserve.tools.top.plain import ordered, tables_text
from shmserve.tools.top.texts import Line, count_text, duration_text, line_text, rate_text


def fleet_tables_of(name: str | None) -> tuple[Table, ...]:
    """The table of this name; all if it is None."""
    return tuple(table for table in FLEET_TABLES if name in (None, table.name))


def fleet_summary(view: FleetView, width: int) -> list[Line]:
    """States, releases and totals of all servers."""
    total = view.total
    first: list[Line] = [[(f"{total['servers']} servers", "strong")]]
    first += [[(f"{count} ", "plain"), (state, STATES.get(state, "plain"))] for state, count in total["states"].items()]
    releases = total["releases"]
    if len(releases) > 1:
        listed = ", ".join(f"{visible(name)} on {count}" for name, count in releases.items())
        first += [[(f"releases differ: {listed}", "warn")]]
    elif releases:
        first += [[(f"all {visible(next(iter(releases)))}", "dim")]]
    failing = bool(total["failed_per_s"])
    second = [
        labelled("req/s", number_text(total["requests_per_s"], rate_text), "strong"),
        labelled("failed/s", number_text(total["failed_per_s"], rate_text), "bad" if failing else "plain"),
        labelled("p50", number_text(total["p50"], duration_text)),
        labelled("p99", number_text(total["p99"], duration_text)),
        labelled("waits", number_text(total["queue_seconds"], duration_text)),
        labelled("queued", number_text(total["queued"], count_text), "warn" if total["queued"] else "plain"),
        labelled("in flight", number_text(total["in_flight"], count_text)),
    ]
    return [joined(first, width), joined(second, width)]


def fleet_text(view: FleetView, tables: Sequence[Table], words: str, key: str | None, width: int | None) -> str:
    lines = [line_text(line).rstrip() for line in fleet_summary(view, width or 1000)]
    return "\n".join(lines + tables_text(view, tables, words, key, width))


def fleet_document(view: FleetView, tables: Sequence[Table], words: str, key: str | None) -> dict[str, Any]:
    """The document for --json, in the units of the document of one server."""
    rows = {table.name.replace("-", "_"): ordered(table, view, words, key) for table in tables}
    return {"total": view.total, **rows, "unknown": sorted(view.unknown)}
