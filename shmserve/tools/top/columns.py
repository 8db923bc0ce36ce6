"""The columns of the tables: their definitions, which of them fit a width, and how values are formatted, sorted and
filtered.

Widths of numbers are fixed, so that columns do not move when values change; texts share the rest of the width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from shmserve.llm.figures import FIGURES
from shmserve.protocol.rates import Row
from shmserve.terminal import console
from shmserve.terminal.tables import text_width, visible
from shmserve.tools.top.texts import (
    NOTHING,
    UNKNOWN,
    Line,
    bytes_text,
    count_text,
    pad,
    rate_text,
    reasons_text,
    share_text,
    short_duration,
)

WIDE = 110
"""From this width on, two spaces separate columns."""
RARE = 22
"""Columns from this rank on are shown only if a row has a value."""
_KEPT = 9
"""Columns up to this rank keep their place even if no row has a value."""
_WIDTHS = {"count": 6, "rate": 6, "duration": 6, "bytes": 6, "share": 5}


class TopColumn(Struct, frozen=True):
    """`rank`: columns with a low one are kept when space is short. `min_width`: minimum width of a text. `rare`: it is
    left out if no row has a value, as from rank RARE on."""

    key: str
    head: str
    kind: str
    rank: float
    about: str
    min_width: int = 0
    rare: bool = False

    @property
    def is_text(self) -> bool:
        return self.kind in ("text", "counts")

    @property
    def is_rare(self) -> bool:
        return self.rare or self.rank >= RARE

    @property
    def grows(self) -> bool:
        """Whether its width depends on its values."""
        return self.is_text or self.kind == "id"

    @property
    def width(self) -> int:
        """The minimum width."""
        return max(len(self.head), self.min_width or _WIDTHS.get(self.kind, 0))

    @property
    def descends(self) -> bool:
        """Whether the largest values come first."""
        return not self.grows


class TopTable(Struct, frozen=True):
    """`name`: the attribute of View. `sort`: the initial sort column. `identity`: the columns that identify a row; rows
    with equal values are sorted by them."""

    name: str
    title: str
    sort: str
    identity: tuple[str, ...]
    columns: tuple[TopColumn, ...]

    def column(self, key: str) -> TopColumn:
        return next(column for column in self.columns if column.key == key)

    def without(self, *keys: str) -> TopTable:
        return replace(self, columns=tuple(column for column in self.columns if column.key not in keys))

    def identity_of(self, row: Row) -> tuple[Any, ...]:
        """The rows below others have an identity of their own, `below`."""
        return *(row.get(key) for key in self.identity), row.get("below")


MODELS = TopTable(
    "models",
    "Models",
    "model",
    ("model", "version"),
    (
        TopColumn("model", "model", "text", 0, "name of the model", 10),
        TopColumn("version", "ver", "id", 1, "version", 3),
        TopColumn("state", "state", "text", 2, "state of the version", 11),
        TopColumn("instances", "inst", "text", 6, "instances that serve, of those that should", 5),
        TopColumn("requests_per_s", "req/s", "rate", 3, "answered requests per second, also failed ones"),
        TopColumn("failed_per_s", "fail/s", "rate", 12, "failed requests per second"),
        TopColumn("p50", "p50", "duration", 7, "median time from arrival to answer"),
        TopColumn("p95", "p95", "duration", 11, "95th percentile of this time"),
        TopColumn("p99", "p99", "duration", 4, "99th percentile of this time"),
        TopColumn("queued", "queue", "count", 5, "requests that have not started"),
        TopColumn("in_flight", "run", "count", 8, "requests that are running"),
        TopColumn("mean_batch", "batch", "rate", 9, "mean rows per batch"),
        TopColumn("trend", "req/s over time", "graph", 9.5, "answered requests per second, up to now", 15, rare=True),
        TopColumn("busy", "busy", "share", 10, "share of time in which instances ran a batch"),
        TopColumn("cpu", "cpu", "share", 16, "CPU time of its processes; 100% is one core"),
        TopColumn("memory_bytes", "mem", "bytes", 13, "memory of its processes (PSS)"),
        TopColumn("gpu_memory_bytes", "gpu mem", "bytes", 18, "memory of its processes on GPUs"),
        TopColumn("queue_seconds", "waits", "duration", 15, "mean time in the queue"),
        TopColumn("compute_seconds", "runs", "duration", 17, "mean time of a request's batch at its instance"),
        TopColumn("reasons", "batches formed because", "counts", 14, "reasons of the batches in the interval", 28),
        TopColumn("batches_per_s", "batch/s", "rate", 19, "batches per second"),
        TopColumn("rows_per_s", "rows/s", "rate", 20, "rows per second"),
        TopColumn("cache_hits", "cache", "share", 24, "share of answers from the response cache"),
        TopColumn("share", "share", "share", 22, "share of requests that name no version"),
        TopColumn("sequences", "seqs", "count", 25, "live sequences"),
        TopColumn("requests", "requests", "count", 21, "requests answered since the version was loaded"),
        TopColumn("failed", "failed", "count", 23, "requests failed since the version was loaded"),
        TopColumn("restarts", "restarts", "count", 26, "restarts of its instances"),
        *(TopColumn(one.key, one.head, one.unit, 8 + one.rank / 100, one.help, rare=True) for one in FIGURES),
        TopColumn("reason", "reason", "text", 27, "why it is not, or not fully, served", 16),
    ),
)
STEPS = TopTable(
    "steps",
    "Steps",
    "step",
    ("step",),
    tuple(
        column
        for column in MODELS.columns
        if column.key in ("model", "version", "requests_per_s", "failed_per_s", "queue_seconds", "compute_seconds")
    ),
)
"""The steps of an ensemble in detail."""
INSTANCES = TopTable(
    "instances",
    "Instances",
    "instance",
    ("model", "version", "instance", "pid"),
    (
        TopColumn("instance", "instance", "text", 0, "name of the instance", 14),
        TopColumn("model", "model", "text", 12, "its model", 10),
        TopColumn("version", "ver", "id", 11, "version of the model", 3),
        TopColumn("state", "state", "text", 1, "state of the instance", 11),
        TopColumn("busy_seconds", "busy", "duration", 2, "how long its current batch has run"),
        TopColumn("batch_rows", "batch", "count", 3, "rows of its current batch"),
        TopColumn("waiting_rows", "next", "count", 4, "rows of the batch that waits at it"),
        TopColumn("running", "run", "count", 5, "requests that it is running"),
        TopColumn("device", "device", "text", 9, "where it runs", 6),
        TopColumn("pid", "pid", "id", 8, "its process", 7),
        TopColumn("cpu", "cpu", "share", 7, "CPU time of its process; 100% is one core"),
        TopColumn("memory_bytes", "mem", "bytes", 6, "memory of its process (PSS)"),
        TopColumn("gpu_memory_bytes", "gpu mem", "bytes", 10, "memory of its process on GPUs"),
        TopColumn("restarts", "restarts", "count", 13, "restarts since the version was loaded"),
        TopColumn("reason", "reason", "text", 14, "why it does not serve", 24),
    ),
)
CLIENTS = TopTable(
    "clients",
    "Clients",
    "in_flight",
    ("number",),
    (
        TopColumn("number", "client", "id", 0, "number of the connection", 6),
        TopColumn("name", "name", "text", 1, "name that the client gave itself", 14),
        TopColumn("user", "user", "text", 2, "user of the connection; shown to operators", 9),
        TopColumn("plane", "link", "text", 5, "lane or zmq", 5),
        TopColumn("in_flight", "in flight", "count", 3, "requests without an answer"),
        TopColumn("held_bytes", "held", "bytes", 4, "bytes of answers in shared memory that it holds"),
        TopColumn("segment_bytes", "memory", "bytes", 6, "shared memory that it has announced"),
        TopColumn("segments", "segments", "count", 7, "segments of this memory"),
    ),
)
GPUS = TopTable(
    "gpus",
    "GPUs",
    "number",
    ("uuid",),
    (
        TopColumn("number", "gpu", "id", 0, "number in configurations", 3),
        TopColumn("name", "name", "text", 1, "type of the GPU", 12),
        TopColumn("utilization", "busy", "share", 2, "share of the time in which anything ran"),
        TopColumn("memory_used_bytes", "used", "bytes", 3, "memory in use, by all processes"),
        TopColumn("memory_bytes", "memory", "bytes", 4, "its memory"),
        TopColumn("memory_share", "used %", "share", 5, "share of its memory in use"),
        TopColumn("power_watts", "watts", "rate", 6, "power draw"),
        TopColumn("power_limit_watts", "limit", "rate", 7, "power limit"),
        TopColumn("out_of_service", "out of service", "text", 8, "why no instance runs on it", 14),
        TopColumn("temperature_celsius", "celsius", "rate", 9, "temperature"),
        TopColumn("sm_clock_share", "clock", "share", 10, "clock as a share of the highest"),
        TopColumn("throttled", "throttled", "text", 11, "why the clock is reduced", 10),
        TopColumn("uuid", "uuid", "text", 12, "UUID", 12),
    ),
)
TABLES = (MODELS, INSTANCES, CLIENTS, GPUS)


# ------------------------------------------------------------------------------------------ cells

_NONZERO = {"failed_per_s": "bad", "queued": "warn"}
"""Column -> style of its values above 0."""
_STYLES = {console.GOOD: "good", console.WARN: "warn", console.BAD: "bad", console.FAINT: "dim"}
STATES = {state: _STYLES[style] for state, style in console.STATES.items()} | {
    "NOT READY": "bad",
    "DRAINING": "warn",
    "UNREACHABLE": "bad",
    "NO ANSWER": "bad",
    "CONNECTING": "dim",
    "PARTLY": "warn",
    "VERSIONS DIFFER": "warn",
}
"""State of a version, an instance, a server, or a model on several servers -> style."""
NUMBERS: dict[str, Callable[[Any], str]] = {
    "count": count_text,
    "id": str,
    "rate": rate_text,
    "duration": short_duration,
    "bytes": bytes_text,
    "share": share_text,
}


def cell(column: TopColumn, row: Mapping[str, Any], unknown: frozenset[str] = frozenset()) -> str:
    value = row.get(column.key)
    if value is None or value in ("", {}):
        return UNKNOWN if column.key in unknown else NOTHING
    if column.kind == "counts":
        return reasons_text(value)
    if column.key == "model":
        return f"{row.get('branch', '')}{visible(value)}{row.get('mark', '')}"
    return visible(value) if column.kind in ("text", "graph") else NUMBERS[column.kind](value)


def style(column: TopColumn, row: Mapping[str, Any]) -> str:
    value = row.get(column.key)
    if value is None or value in ("", {}):
        return "dim"
    if column.key == "state":
        return STATES.get(value, "plain")
    if column.key == "busy_seconds":
        return "bad" if row.get("slow") else "plain"
    if column.kind == "graph":
        return "bar"
    if column.key == "release":
        return "warn" if row.get("release_differs") else "plain"
    return _NONZERO.get(column.key, "plain") if value else "plain"


# ------------------------------------------------------------------------------------------ selection


class ColumnLayout(Struct, frozen=True):
    """Columns with their widths, in the order of display."""

    columns: tuple[TopColumn, ...]
    widths: tuple[int, ...]
    gap: int = 1


def choose(
    table: TopTable, rows: Sequence[Mapping[str, Any]], width: int, unknown: frozenset[str] = frozenset()
) -> ColumnLayout:
    """The most important columns that fit. Columns without a value in any row give way to more important ones, and are
    left out from rank RARE on."""
    gap = 2 if width >= WIDE else 1
    empty = {column.key for column in table.columns if (column.rare or column.rank > _KEPT) and _is_empty(column, rows)}
    candidates = [column for column in table.columns if column.key not in empty or not column.is_rare]
    ranked = sorted(candidates, key=lambda column: (column.key in empty, column.rank))
    longest = {column.key: _longest(column, rows, unknown) for column in candidates if column.grows}
    widths: dict[str, int] = {}
    remaining = width
    for column in ranked:
        needed = column.width
        if column.rank == 0 and column.is_text:  # names, which must stay distinguishable
            needed = max(needed, min(longest[column.key], width // 4))
        if not widths:
            widths[column.key] = min(needed, width)
            remaining -= widths[column.key]
        elif needed + gap <= remaining:
            widths[column.key] = needed
            remaining -= needed + gap
    for column in ranked:
        if column.grows and column.key in widths:
            more = max(0, min(remaining, longest[column.key] - widths[column.key]))
            widths[column.key] += more
            remaining -= more
    shown = tuple(column for column in table.columns if column.key in widths)
    return ColumnLayout(shown, tuple(widths[column.key] for column in shown), gap)


def _longest(column: TopColumn, rows: Sequence[Mapping[str, Any]], unknown: frozenset[str]) -> int:
    return max((text_width(cell(column, row, unknown)) for row in rows), default=0)


def heading(layout: ColumnLayout) -> list[str]:
    return [
        pad(column.head, width, not column.is_text) for column, width in zip(layout.columns, layout.widths, strict=True)
    ]


def spans(layout: ColumnLayout, row: Mapping[str, Any], unknown: frozenset[str] = frozenset()) -> Line:
    """The cells of a row, padded or cut to the widths of their columns, with the gaps between them."""
    line: Line = []
    for column, width in zip(layout.columns, layout.widths, strict=True):
        if line:
            line.append((" " * layout.gap, "plain"))
        line.append((pad(cell(column, row, unknown), width, not column.is_text), style(column, row)))
    return line


def _is_empty(column: TopColumn, rows: Sequence[Mapping[str, Any]]) -> bool:
    return not any(row.get(column.key) for row in rows)


def sort(table: TopTable, rows: Iterable[Row], key: str, reverse: bool = False) -> list[Row]:
    """The rows sorted by a column, in its default direction or reversed. Rows without a value are last."""
    column = table.column(key)
    result = sorted(rows, key=lambda row: _comparable([row.get(name) for name in table.identity]))
    known = [row for row in result if _sortable(column, row) is not None]
    rest = [row for row in result if _sortable(column, row) is None]
    known.sort(key=lambda row: _comparable([_sortable(column, row)]), reverse=column.descends is not reverse)
    return known + rest


def _sortable(column: TopColumn, row: Row) -> Any:
    value = row.get(column.key)
    if column.kind == "counts":
        return reasons_text(value) or None if value else None
    return value if value != "" else None


def _comparable(values: Sequence[Any]) -> list[tuple[bool, Any]]:
    return [(value is not None, value if value is not None else 0) for value in values]


def select(table: TopTable, rows: Iterable[Row], text: str) -> list[Row]:
    """The rows whose texts contain all words of `text`, in any case."""
    wanted = text.casefold().split()
    columns = [column for column in table.columns if column.is_text or column.kind == "id"]
    results = []
    for row in rows:
        words = " ".join(cell(column, row) for column in columns).casefold()
        if all(word in words for word in wanted):
            results.append(row)
    return results
