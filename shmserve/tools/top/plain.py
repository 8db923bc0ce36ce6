"""One view, of one server or of several, as text or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from shmserve.protocol.rates import Row
from shmserve.terminal.tables import table as plain_table
from shmserve.terminal.tables import visible
from shmserve.tools.top.columns import STATES, TABLES, TopTable, cell, choose, heading, select, sort, spans
from shmserve.tools.top.fleet_totals import FleetView
from shmserve.tools.top.panels import joined, labelled, number_text, summary
from shmserve.tools.top.texts import Line, count_text, line_text, rate_text, short_duration
from shmserve.tools.top.view import View


def tables_of(name: str | None, tables: Sequence[TopTable] = TABLES) -> tuple[TopTable, ...]:
    """The table of this name; all if it is None."""
    return tuple(table for table in tables if name in (None, table.name))


class Tables(Protocol):
    """Rows by the names of tables."""

    @property
    def unknown(self) -> frozenset[str]:
        """Keys of columns that no source knows."""

    def table(self, name: str) -> list[Row]: ...


def ordered(table: TopTable, view: Tables, text: str, key: str | None) -> list[Row]:
    """The rows to show. A sort key that the table does not have selects its default order."""
    known = key is not None and any(column.key == key for column in table.columns)
    return sort(table, select(table, view.table(table.name), text), key if known and key else table.sort)


def text(view: View, where: str, tables: Sequence[TopTable], words: str, key: str | None, width: int | None) -> str:
    """A summary of the server and the tables; empty tables are left out. `width` None: no limit."""
    lines = [line_text(line).rstrip() for line in summary(view, where, width or 1000)]
    return "\n".join(lines + tables_text(view, tables, words, key, width))


def tables_text(view: Tables, tables: Sequence[TopTable], words: str, key: str | None, width: int | None) -> list[str]:
    """Lines, with an empty one before each table."""
    lines: list[str] = []
    results = [(table, rows) for table in tables if (rows := ordered(table, view, words, key))]
    for table, rows in results:
        lines += ["", *(_narrow(table, rows, view, width) if width else _wide(table, rows, view))]
    if words and not results:
        lines += ["", f"no row has the words of --filter {words}"]
    return lines


def _narrow(table: TopTable, rows: Sequence[Row], view: Tables, width: int) -> list[str]:
    layout = choose(table, rows, width, view.unknown)
    gap = " " * layout.gap
    return [gap.join(heading(layout)).rstrip(), *[line_text(spans(layout, row, view.unknown)).rstrip() for row in rows]]


def _wide(table: TopTable, rows: Sequence[Row], view: Tables) -> list[str]:
    columns = [column for column in table.columns if any(row.get(column.key) not in (None, "", {}) for row in rows)]
    cells = [[cell(column, row, view.unknown) for column in columns] for row in rows]
    right = [place for place, column in enumerate(columns) if not column.is_text]
    return plain_table([column.head for column in columns], cells, right).split("\n")


def document(view: View, where: str, tables: Sequence[TopTable], words: str, key: str | None) -> dict[str, Any]:
    """Values are in units without prefixes (seconds, bytes, shares of 1); null: no value, or unknown."""
    return {
        "url": where,
        "interval": view.interval,
        "server": view.server,
        **{table.name: ordered(table, view, words, key) for table in tables},
        "unknown": sorted(view.unknown),
        "notes": list(view.notes),
    }


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
        labelled("p50", number_text(total["p50"], short_duration)),
        labelled("p99", number_text(total["p99"], short_duration)),
        labelled("waits", number_text(total["queue_seconds"], short_duration)),
        labelled("queued", number_text(total["queued"], count_text), "warn" if total["queued"] else "plain"),
        labelled("in flight", number_text(total["in_flight"], count_text)),
    ]
    if total["generated_tokens_per_s"] is not None:
        second.append(labelled("tok/s", number_text(total["generated_tokens_per_s"], rate_text)))
    return [joined(first, width), joined(second, width)]


def fleet_text(view: FleetView, tables: Sequence[TopTable], words: str, key: str | None, width: int | None) -> str:
    lines = [line_text(line).rstrip() for line in fleet_summary(view, width or 1000)]
    return "\n".join(lines + tables_text(view, tables, words, key, width))


def fleet_document(view: FleetView, tables: Sequence[TopTable], words: str, key: str | None) -> dict[str, Any]:
    """The document for --json, in the units of the document of one server."""
    rows = {table.name.replace("-", "_"): ordered(table, view, words, key) for table in tables}
    return {"total": view.total, **rows, "unknown": sorted(view.unknown)}
