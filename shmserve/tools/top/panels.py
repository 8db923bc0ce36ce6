"""The lines above the tables, and those about one model, as spans of text with the name of a style.

Invariant: styles only emphasize; the lines have the same content without them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, takewhile
from typing import Any

from msgspec import Struct, field

from shmserve.llm.figures import FIGURES
from shmserve.protocol.rates import Row
from shmserve.terminal.tables import text_width, visible
from shmserve.tools.top.columns import INSTANCES, NUMBERS, STATES, STEPS, TopTable, choose, heading, spans
from shmserve.tools.top.sources import Curves
from shmserve.tools.top.texts import (
    NOTHING,
    UNKNOWN,
    Line,
    Span,
    bytes_text,
    count_text,
    fit,
    line_width,
    pad,
    rate_text,
    share_text,
    short_duration,
)
from shmserve.tools.top.view import View

BLOCKS = "▁▂▃▄▅▆▇█"
ROW_GRAPH = 15
"""Number of samples in the graph of a row."""
KEPT = 240
"""Number of samples of a model that are kept."""
_LABEL = 11
_GROUP = _LABEL + 9
"""Width of a name, a value and a gap."""
_GAP: Span = ("   ", "plain")
"""Between the parts of a line."""
_TRENDS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("requests_per_s", "req/s", rate_text),
    ("p99", "p99", short_duration),
    ("queued", "queued", count_text),
)


class Trends(Struct):
    """The last values of a model, one for each refresh; None where there was none."""

    requests_per_s: deque[float | None] = field(default_factory=lambda: deque(maxlen=KEPT))
    p99: deque[float | None] = field(default_factory=lambda: deque(maxlen=KEPT))
    queued: deque[float | None] = field(default_factory=lambda: deque(maxlen=KEPT))
    seeded: bool = False
    """Whether it has all that was recorded before the first refresh."""


class TrendHistory:
    """Samples of the versions that are served."""

    def __init__(self) -> None:
        self._samples: dict[tuple[str, int | None], Trends] = {}

    def add(self, view: View) -> None:
        kept: dict[tuple[str, int | None], Trends] = {}
        for row in view.models:
            key = row["model"], row["version"]
            samples = kept[key] = self._samples.get(key) or Trends()
            if view.interval is not None:
                for name in ("requests_per_s", "p99", "queued"):
                    getattr(samples, name).append(row[name])
        self._samples = kept

    def draw(self, view: View) -> None:
        """Sets the graphs of the rows."""
        for row in view.models:
            values = self.of(row["model"], row["version"]).requests_per_s
            shown = list(values)[-ROW_GRAPH:] if values else []
            row["trend"] = sparkline(shown, ROW_GRAPH) if any(shown) else None

    def seed(self, model: str, version: int | None, curves: Curves, step: int, whole: bool = True) -> None:
        """Puts every `step`-th of the recorded values before the samples, which begin when they were recorded. `whole`:
        these are all that were recorded."""
        samples = self._samples.get((model, version))
        if samples is None or samples.seeded:
            return
        samples.seeded = whole
        for name, curve in (("requests_per_s", "requests"), ("p99", "p99"), ("queued", "queue")):
            kept: deque[float | None] = getattr(samples, name)
            recorded = list(curves.get(curve, ()))[::-1][::step][len(kept) :]
            kept.extendleft(recorded[: KEPT - len(kept)])

    def of(self, model: str, version: int | None) -> Trends:
        return self._samples.get((model, version)) or Trends()


def sparkline(values: Iterable[float | None], width: int) -> str:
    """The last values as blocks. The highest value is a full block; a space means no value."""
    shown = list(values)[-width:] if width > 0 else []
    highest = max((value for value in shown if value is not None), default=0.0)
    text = ""
    for value in shown:
        if value is None:
            text += " "
        else:
            text += BLOCKS[round(value / highest * (len(BLOCKS) - 1))] if highest > 0 else BLOCKS[0]
    return text


def bar(share: float, width: int) -> Line:
    """`[|||||   45%]`, with a warning style when nearly full."""
    text = share_text(share).rjust(width)
    filled = round(min(1.0, max(0.0, share)) * width)
    drawn = "".join("|" if place < filled and char == " " else char for place, char in enumerate(text))
    style = "bad" if share >= 0.95 else "warn" if share >= 0.8 else "good"
    return [("[", "dim"), (drawn[:filled], style), (drawn[filled:], "plain"), ("]", "dim")]


def joined(parts: Sequence[Line], width: int) -> Line:
    """Joins as many of the parts as fit, in order."""
    line: Line = []
    for part in parts:
        more = [_GAP, *part] if line else part
        if line and line_width(line) + line_width(more) > width:
            break
        line += more
    return fit(line, width)


# ------------------------------------------------------------------------------------------ the server


def summary(view: View, where: str, width: int) -> list[Line]:
    """Three lines about the server and, if it has GPUs, one about them."""
    server = view.server
    ready = server["ready"]
    state: Line = [("READY", "good")] if ready else [("NOT READY", "bad")]
    if ready is None:
        state = [(UNKNOWN, "dim")]
    elif server["out_of_service"]:
        state = [("OUT OF SERVICE", "warn")]
    title: Line = [(visible(str(server["name"] or "server")), "strong"), (f" {server['version'] or ''}", "dim")]
    if server["uptime_seconds"] is None:
        first = [title, state, [(where, "dim")]]
    else:
        first = [title, state, [("up ", "dim"), (short_duration(server["uptime_seconds"]), "plain")], [(where, "dim")]]
    refused = sum((server["refused"] or {}).values())
    failing = bool(server["failed_per_s"])
    second = [
        labelled("req/s", number_text(server["requests_per_s"], rate_text), "strong"),
        labelled("failed/s", number_text(server["failed_per_s"], rate_text), "bad" if failing else "plain"),
        labelled("in flight", number_text(server["in_flight"], count_text)),
        labelled("queued", number_text(server["queued"], count_text), "warn" if server["queued"] else "plain"),
        labelled("clients", number_text(server["connections"], count_text)),
        labelled("held", number_text(server["held_bytes"], bytes_text)),
        labelled("shared", number_text(server["segment_bytes"], bytes_text)),
        *([labelled("refused", count_text(refused), "warn")] if refused else []),
    ]
    return [
        fit([span for part in first for span in (*part, _GAP)], width),
        joined(second, width),
        joined(_machine(server), width),
        *([joined([_gpu(gpu) for gpu in view.gpus], width)] if view.gpus else []),
        *[fit([(visible(note), "warn")], width) for note in view.notes],
    ]


def labelled(name: str, value: str, style: str = "plain") -> Line:
    return [(f"{name} ", "dim"), (value, style)]


def number_text(value: Any, text: Callable[[Any], str]) -> str:
    return NOTHING if value is None else text(value)


def _machine(server: Row) -> list[Line]:
    parts: list[Line] = []
    used, total = server["machine_memory_used_bytes"], server["machine_memory_bytes"]
    if server["machine_utilization"] is not None:
        cores = f" {server['cores']} cores" if server["cores"] else ""
        parts.append([("cpu ", "dim"), *bar(server["machine_utilization"], 12), (cores, "plain")])
    if total:
        parts.append([("mem ", "dim"), *bar(used / total, 12), (f" {bytes_text(used)}/{bytes_text(total)}", "plain")])
    if server["cpu"] is not None or server["memory_bytes"] is not None:
        broker: Line = [("broker ", "dim"), (number_text(server["cpu"], share_text), "plain")]
        parts.append([*broker, (f" {number_text(server['memory_bytes'], bytes_text)}", "plain")])
    return parts or [[("machine ", "dim"), (UNKNOWN, "dim")]]


def _gpu(gpu: Row) -> Line:
    line: Line = [(f"gpu {gpu['number']} ", "dim")]
    line += bar(gpu["utilization"], 8) if gpu["utilization"] is not None else [(UNKNOWN, "dim")]
    if gpu["memory_share"] is not None:
        memory = f" {bytes_text(gpu['memory_used_bytes'])}/{bytes_text(gpu['memory_bytes'])}"
        line.append((memory, "bad" if gpu["memory_share"] >= 0.95 else "plain"))
    if gpu.get("power_watts") is not None:
        line.append((f" {gpu['power_watts']:.0f}W", "plain"))
    if gpu["throttled"]:
        line.append((f" {gpu['throttled']}", "warn"))
    if gpu["out_of_service"]:
        line.append((" OUT OF SERVICE", "bad"))
    return line


# ------------------------------------------------------------------------------------------ one model


def detail(
    view: View, history: TrendHistory, model: str, version: int | None, width: int, steps: Sequence[Row]
) -> list[Line]:
    """Everything about one version of a model. `steps`: those of an ensemble."""
    row = next((row for row in view.models if (row["model"], row["version"]) == (model, version)), None)
    if row is None:
        return [[(f"{visible(model)} is not listed by the server any more", "warn")]]
    unknown = view.unknown
    lines: list[Line] = [
        [
            (visible(model), "strong"),
            (f"  version {row['version']}" if row["version"] is not None else "  no version", "plain"),
            ("  default" if row["default"] else "", "dim"),
            ("  ", "plain"),
            (row["state"], STATES.get(row["state"], "plain")),
        ]
    ]
    if row["reason"]:
        lines += wrapped(row["reason"], width, "bad" if row["state"] == "UNAVAILABLE" else "warn")
    lines += [[], *_figures(row, width, unknown), []]
    samples = history.of(model, version)
    room = max(10, min(KEPT, width - _LABEL - 8))
    for name, head, text in _TRENDS:
        values = getattr(samples, name)
        highest = max((value for value in values if value is not None), default=None)
        peak = number_text(highest, text).rjust(6)
        lines.append([(pad(head, _LABEL), "dim"), (f"{peak}  ", "plain"), (sparkline(values, room), "bar")])
    lines += [[(" " * _LABEL + "  peak", "dim")]]
    lines += _shares("batches formed because", row["reasons"], width)
    lines += _shares("texts ended by", row.get("ended") or {}, width)
    sizes = {f"{size} rows": count for size, count in row["batch_sizes"].items()}
    lines += _shares("batch sizes since it was loaded", sizes, width)
    ours = [one for one in view.instances if (one["model"], one["version"]) == (model, version)]
    if steps:
        lines += [[], [("steps", "dim")], *_table(STEPS, steps, width, unknown)]
    if ours:
        lines += [[], *_table(INSTANCES.without("model", "version"), ours, width, unknown)]
    return [fit(line, width) for line in lines]


def _figures(row: Row, width: int, unknown: frozenset[str]) -> list[Line]:
    """The numbers, in as many columns as fit."""

    def fact(name: str, key: str, text: Callable[[Any], str]) -> tuple[str, str]:
        value = row.get(key)
        return name, (UNKNOWN if key in unknown else NOTHING) if value is None else text(value)

    groups = [
        [
            fact("req/s", "requests_per_s", rate_text),
            fact("failed/s", "failed_per_s", rate_text),
            fact("rows/s", "rows_per_s", rate_text),
            fact("batches/s", "batches_per_s", rate_text),
            fact("mean batch", "mean_batch", rate_text),
            fact("max batch", "max_batch", count_text),
        ],
        [
            fact("p50", "p50", short_duration),
            fact("p95", "p95", short_duration),
            fact("p99", "p99", short_duration),
            fact("queue", "queue_seconds", short_duration),
            fact("input", "input_seconds", short_duration),
            fact("infer", "infer_seconds", short_duration),
            fact("output", "output_seconds", short_duration),
        ],
        [
            fact("queued", "queued", count_text),
            fact("running", "in_flight", count_text),
            fact("instances", "instances", str),
            fact("busy", "busy", share_text),
            fact("cpu", "cpu", share_text),
            fact("sequences", "sequences", count_text),
            fact("scaled", "scaled", str),
        ],
        [
            fact("memory", "memory_bytes", bytes_text),
            fact("gpu memory", "gpu_memory_bytes", bytes_text),
            fact("requests", "requests", count_text),
            fact("failed", "failed", count_text),
            fact("restarts", "restarts", count_text),
            fact("cache hits", "cache_hits", share_text),
            fact("loaded in", "loading_seconds", short_duration),
        ],
    ]
    language = [fact(figure.head, figure.key, NUMBERS[figure.unit]) for figure in FIGURES if figure.unit in NUMBERS]
    if any(row.get(figure.key) for figure in FIGURES):
        groups += [language[first : first + 7] for first in range(0, len(language), 7)]
    together = max(1, min(len(groups), (width + 2) // _GROUP))
    lines: list[Line] = []
    for first in range(0, len(groups), together):
        block = groups[first : first + together]
        for place in range(max(map(len, block))):
            line: Line = []
            for group in block:
                name, value = group[place] if place < len(group) else ("", "")
                line += [(name.ljust(_LABEL), "dim"), (value.rjust(7), "plain"), ("  ", "plain")]
            lines.append(line)
    return lines


def _shares(head: str, counts: dict[str, int], width: int) -> list[Line]:
    """A bar for each count, the largest first; at most eight."""
    total = sum(counts.values())
    if not total:
        return []
    lines: list[Line] = [[], [(head, "dim")]]
    room = max(10, min(40, width - _LABEL - 16))
    for name, count in sorted(counts.items(), key=lambda item: -item[1])[:8]:
        drawn = "█" * max(1, round(count / total * room))
        lines.append(
            [
                (pad(f"  {name}", _LABEL), "plain"),
                (f"{share_text(count / total):>5} ", "plain"),
                (drawn, "bar"),
                (f" {count_text(count)}", "dim"),
            ]
        )
    return lines


def _table(table: TopTable, rows: Sequence[Row], width: int, unknown: frozenset[str]) -> list[Line]:
    layout = choose(table, rows, width, unknown)
    head = (" " * layout.gap).join(heading(layout))
    return [[(head, "dim")], *[spans(layout, row, unknown) for row in rows]]


def wrapped(text: str, width: int, style: str) -> list[Line]:
    """The text in lines of at most `width` columns, which end at spaces where they can."""
    words = visible(" ".join(text.split()))
    lines: list[Line] = []
    while words:
        room = _fitting(words, width)
        cut = words.rfind(" ", 0, room) if room < len(words) and " " in words[:room] else room
        lines.append([(words[:cut], style)])
        words = words[cut:].lstrip()
    return lines


def _fitting(text: str, width: int) -> int:
    """How many characters of the text fit into this width, but at least one."""
    columns = accumulate(map(text_width, text))
    return max(1, sum(1 for _ in takewhile(lambda column: column <= width, columns)))
