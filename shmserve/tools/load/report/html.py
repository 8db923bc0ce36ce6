"""A run as one HTML page. First what it found, and throughput against latency; then all loads, the split of the
server's time, histograms and timelines.
"""

from __future__ import annotations

import math
from html import escape

from shmserve.terminal.tables import duration_text
from shmserve.tools.charts import Axis, Series, bars, html_table, lines, page
from shmserve.tools.load.analysis.latencies import buckets
from shmserve.tools.load.plan import SECOND, percentile_name
from shmserve.tools.load.record import Latencies, Point, SavedRun
from shmserve.tools.load.report.table import NAMES, echo_text, percentile_text, rate_text, share_text

BARS_PER_DECADE = 20


def _time(ns: float) -> str:
    return duration_text(ns / SECOND) if ns > 0 else "0"


def _second(seconds: float) -> str:
    return f"{seconds:g}"


RATE = Axis("responses per second", rate_text)
LATENCY = Axis("latency", _time, log=True)
ROWS = Axis("rows", lambda rows: f"{rows:g}" if rows == int(rows) else "")


def html_text(run: SavedRun) -> str:
    title = f"{run.plan.model} on {run.server.get('name', '')} {run.server.get('version', '')}".strip()
    parts = [
        f"<p><b>{escape(_finding(run))}</b></p>",
        _curve(run),
        f"<p>{escape(_summary(run))}</p>",
        _table(run),
        _tokens(run),
        _split(run),
        *(part for point in run.points for part in _of_point(point)),
    ]
    if run.echo is not None:
        parts.append(f"<p>{escape(echo_text(run.echo))}</p>")
    return page(title, parts)


def _finding(run: SavedRun) -> str:
    """The best load: the highest one within the limit, or, without a limit, that with the most throughput."""
    within = [point for point in run.points if run.plan.limit is None or point.value == run.best]
    if not within:
        return f"No load met {run.plan.limit}." if run.points else "Nothing was measured."
    best = max(within, key=lambda point: point.throughput.mean)
    facts = [f"{rate_text(best.throughput.mean)} requests/s at {best.load}"]
    facts += [
        f"{name} {percentile_text(best.latency, name)}" for name in ("p50", "p99") if name in best.latency.percentiles
    ]
    failed = sum(point.failed for point in run.points)
    return ", ".join([*facts, f"{failed:,} failed" if failed else "none failed"]) + "."


def _summary(run: SavedRun) -> str:
    settings = run.plan.settings
    facts = [
        f"measured {run.created}",
        f"over {run.plan.endpoint.scheme}",
        f"windows of {settings.window_ns / SECOND:g} s until throughput and {percentile_name(settings.percentile)} "
        f"are known to +-{settings.tolerance:.0%} with {settings.confidence:.0%} confidence",
        f"{run.machine.get('cores')} cores, {run.machine.get('kernel')}",
    ]
    if run.plan.limit is not None:
        best = f"{run.best:g}" if run.best is not None else "none"
        facts.append(f"highest load with {run.plan.limit}: {best}")
    return "; ".join(facts) + "."


def _table(run: SavedRun) -> str:
    head = ["load", "requests/s", "+-", *NAMES, "failed", "stable"]
    rows = [
        [
            str(point.load),
            rate_text(point.throughput.mean),
            share_text(point.throughput),
            *(percentile_text(point.latency, name) for name in NAMES),
            f"{point.failed:,}",
            "yes" if point.stable else point.note,
        ]
        for point in run.points
    ]
    return html_table(head, rows)


def _curve(run: SavedRun) -> str:
    """A chart of throughput against latency, if there are several loads."""
    if len(run.points) < 2:
        return ""
    series = []
    for name in ("p50", "p99"):
        results = [
            (point, point.latency.percentiles[name]) for point in run.points if name in point.latency.percentiles
        ]
        series.append(
            Series(
                name,
                [(point.throughput.mean, value.mean) for point, value in results],
                [value.low for _, value in results],
                [value.high for _, value in results],
                [f"{point.value:g}" for point, _ in results],
            )
        )
    return lines("Throughput against latency", RATE, LATENCY, series)


def _tokens(run: SavedRun) -> str:
    """Charts for a language model: tokens per second, and the times of tokens, by load."""
    measured = [(point, point.language) for point in run.points if point.language is not None]
    if len(measured) < 2:
        return ""
    rates = [
        Series("in", [(point.value, language.prompt_per_s.mean) for point, language in measured]),
        Series("out", [(point.value, language.output_per_s.mean) for point, language in measured]),
    ]
    times = [
        Series(
            f"{head} {name}",
            [
                (point.value, values.percentiles[name].mean)
                for point, values in pairs
                if values and name in values.percentiles
            ],
        )
        for head, pairs in (
            ("first token", [(point, point.first_answer) for point, _ in measured]),
            ("between tokens", [(point, language.between_tokens) for point, language in measured]),
        )
        for name in ("p50", "p99")
    ]
    tokens = Axis("tokens per second", rate_text)
    return lines("Tokens per second", Axis("load"), tokens, rates) + lines(
        "Times of tokens", Axis("load"), LATENCY, times
    )


def _split(run: SavedRun) -> str:
    """Where the server spends the time of a request, by load."""
    points = [point for point in run.points if point.server is not None]
    if len(points) < 2:
        return ""
    series = []
    for part in ("queue", "gather", "compute", "scatter"):
        values = [(point.value, point.server.parts.get(part, 0.0)) for point in points if point.server is not None]
        series.append(Series(part, values))
    return lines("Mean time in the server", Axis("load"), Axis("time", _time), series)


def _of_point(point: Point) -> list[str]:
    parts = [f"<h2>{escape(str(point.load))}</h2>"]
    parts.append(_histogram("Latencies", point.latency))
    if point.first_answer is not None:
        parts.append(_histogram("Time to the first response", point.first_answer))
    if point.between_answers is not None:
        parts.append(_histogram("Time between responses", point.between_answers))
    shown = point.timeline or point.windows
    starts = [(window.start_ns + window.length_ns / 2) / SECOND for window in shown]
    time_axis = Axis("seconds since the start", _second)
    series = [
        Series(
            name,
            [
                (at, window.percentiles[name])
                for at, window in zip(starts, shown, strict=True)
                if name in window.percentiles
            ],
        )
        for name in ("p50", "p99")
    ]
    rates = Series("responses/s", [(at, window.per_s) for at, window in zip(starts, shown, strict=True)])
    parts.append(lines("Throughput over time", time_axis, RATE, [rates]))
    parts.append(lines("Latency over time", time_axis, LATENCY, series))
    if point.server is not None and point.server.batch_sizes:
        sizes = sorted((int(size), count) for size, count in point.server.batch_sizes.items())
        values = [(size - 0.5, size + 0.5, float(count)) for size, count in sizes]
        parts.append(bars("Batch sizes", ROWS, Axis("batches"), values))
    return parts


def _histogram(title: str, result: Latencies) -> str:
    """A histogram with bars of equal width on a logarithmic axis."""
    counts: dict[int, int] = {}
    for value, count in buckets(result.histogram):
        number = math.floor(math.log10(max(1.0, value)) * BARS_PER_DECADE)
        counts[number] = counts.get(number, 0) + count
    values = [
        (10 ** (number / BARS_PER_DECADE), 10 ** ((number + 1) / BARS_PER_DECADE), float(count))
        for number, count in sorted(counts.items())
    ]
    return bars(title, LATENCY, Axis("responses"), values)
