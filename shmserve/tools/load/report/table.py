"""A run, or a comparison, as text for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from shmserve.terminal.console import BAD, FAINT, GOOD, WARN, Column, Screen, nonzero
from shmserve.terminal.tables import duration_text
from shmserve.tools.load.analysis.compare import BETTER, FAILED, MIXED, SAME, UNKNOWN, WORSE, Change, RunComparison
from shmserve.tools.load.measure import MeasureProgress
from shmserve.tools.load.plan import PERCENTILES, SECOND, ClosedLoop, LatencyLimit, Load, percentile_name
from shmserve.tools.load.record import EchoResult, Interval, Latencies, Point, SavedRun

NAMES = tuple(map(percentile_name, PERCENTILES))
_RANKS = {"p90": 3, "p95": 3, "p99.9": 2, "p99.99": 4}
ERRORS = 5
"""Maximum number of error texts shown for a load, the most frequent ones."""
BUSY = 0.9
"""Use of a core by a generator process from which the generator may be the bottleneck."""
TOO_FEW = "too few"
"""Shown instead of an interval for which there are too few windows or responses."""
RATES = ("throughput", "in time/s")
VERDICTS = {BETTER: GOOD, WORSE: BAD, SAME: FAINT, MIXED: WARN}


def run_text(run: SavedRun, screen: Screen) -> str:
    """Everything about a run."""
    parts = [_loads(run.points, screen)]
    if any(point.language for point in run.points):
        parts.append(_tokens(run.points, screen))
    elif any(point.first_answer for point in run.points):
        parts.append(_streams(run.points, screen))
    if any(point.server for point in run.points):
        parts.append(_server(run.points, screen))
    parts.append(_processors(run.points, screen))
    return "\n\n".join([*parts, "\n".join(_notes(run, screen))]).rstrip()


def _loads(points: Sequence[Point], screen: Screen) -> str:
    columns = [Column("load"), Column("requests/s", right=True), Column("+-", right=True, rank=1)]
    rows = [[str(point.load), rate_text(point.throughput.mean), share_text(point.throughput)] for point in points]
    if any(point.rows > 1 for point in points):
        columns.append(Column("inferences/s", right=True))
        _extend(rows, points, lambda point: rate_text(point.throughput.mean * point.rows))
    if any(point.goodput is not None for point in points):
        columns.append(Column("in time/s", right=True))
        _extend(rows, points, lambda point: rate_text(point.goodput.mean) if point.goodput is not None else "-")
    for name in NAMES:
        columns.append(Column(name, right=True, rank=_RANKS.get(name, 0)))
        _extend(rows, points, partial(_percentile, "latency", name))
    columns += [Column("failed", right=True, style=nonzero(BAD)), Column("note", free=True, style=lambda text: WARN)]
    _extend(rows, points, lambda point: f"{point.failed:,}")
    _extend(rows, points, lambda point: "" if point.stable else f"not stable: {point.note}")
    return screen.table(columns, rows)


def _streams(points: Sequence[Point], screen: Screen) -> str:
    columns = [Column("load"), Column("answers/s", right=True)]
    rows = [[str(point.load), rate_text(point.answers_per_s)] for point in points]
    for head, latencies in (("first response", "first_answer"), ("between responses", "between_answers")):
        for name in ("p50", "p99"):
            columns.append(Column(f"{head} {name}", right=True))
            _extend(rows, points, partial(_percentile, latencies, name))
    return screen.table(columns, rows)


def _tokens(points: Sequence[Point], screen: Screen) -> str:
    """Of a language model."""
    measured = [(point, point.language) for point in points if point.language is not None]
    columns = [Column("tokens"), *(Column(name, right=True) for name in ("in/s", "out/s"))]
    columns += [Column(name, right=True, rank=2) for name in ("in/request", "out/request")]
    rows = [
        [
            str(point.load),
            rate_text(language.prompt_per_s.mean),
            rate_text(language.output_per_s.mean),
            f"{language.prompt_tokens:,.0f}",
            f"{language.output_tokens:,.0f}",
        ]
        for point, language in measured
    ]
    times = [(point.first_answer, language.between_tokens) for point, language in measured]
    for place, head in enumerate(("first token", "between tokens")):
        for name in ("p50", "p90", "p99"):
            columns.append(Column(f"{head} {name}" if name == "p50" else name, right=True, rank=_RANKS.get(name, 0)))
            for row, pair in zip(rows, times, strict=True):
                row.append(percentile_text(pair[place], name))
    if any(language.good is not None for _, language in measured):
        columns.append(Column("good/s", right=True))
        for row, (_, language) in zip(rows, measured, strict=True):
            row.append(rate_text(language.good.mean) if language.good is not None else "-")
    return screen.table(columns, rows)


def _server(points: Sequence[Point], screen: Screen) -> str:
    parts = ("queue", "gather", "compute", "scatter")
    columns = [Column("server"), *(Column(part, right=True) for part in parts)]
    columns += [Column("mean batch", right=True), Column("batches", right=True, rank=1)]
    columns.append(Column("batches formed because", free=True))
    rows = []
    for point in points:
        server = point.server
        if server is None:
            continue
        reasons = sorted(server.reasons.items(), key=lambda item: -item[1])
        total = sum(server.reasons.values())
        rows.append(
            [
                str(point.load),
                *(duration_text(server.parts.get(part, 0.0) / SECOND) for part in parts),
                f"{server.mean_batch:.1f}" if server.batches else "-",
                f"{server.batches:,}",
                ", ".join(f"{reason} {count / total:.0%}" for reason, count in reasons) or "-",
            ]
        )
    return screen.table(columns, rows)


def _processors(points: Sequence[Point], screen: Screen) -> str:
    roles = list(dict.fromkeys(role for point in points if point.usage for role in point.usage.server))
    gpus = list(dict.fromkeys(gpu for point in points if point.usage for gpu in point.usage.gpus))
    columns = [Column("cores used"), Column("machine", right=True), *(Column(role, right=True) for role in roles)]
    columns += [Column(gpu, right=True) for gpu in gpus]
    columns += [Column("generator", right=True), Column("generator/request", right=True, rank=1)]
    rows = []
    for point in points:
        used = point.usage
        rows.append(
            [
                str(point.load),
                f"{used.machine:.2f}" if used else "-",
                *(f"{used.server.get(role, 0.0):.2f}" if used else "-" for role in roles),
                *(f"{used.gpus.get(gpu, 0.0):.0%}" if used else "-" for gpu in gpus),
                f"{point.cost.cores:.2f}",
                duration_text(point.cost.request_ns / SECOND),
            ]
        )
    return screen.table(columns, rows)


def _notes(run: SavedRun, screen: Screen) -> list[str]:
    lines = []

    def add(text: str, style: str = "") -> None:
        lines.extend(screen.wrapped(text, "", "    ", style))

    if run.plan.limit is not None:
        add(_limit_text(run, run.plan.limit), "bold" if run.best is not None and run.undecided is None else WARN)
    for point in run.points:
        errors = sorted(point.errors.items(), key=lambda item: (-item[1], item[0]))
        for text, count in errors[:ERRORS]:
            add(f"{point.load}: {count:,} failed: {text}")
        if point.cost.busiest > BUSY:
            used = f"a generator process used {point.cost.busiest:.0%} of a core and may be the limit"
            add(f"{point.load}: {used}; --processes adds others", WARN)
        if point.cost.send_delay_p99_ns > 0.1 * _p50(point) and _is_open(point.load):
            late = duration_text(point.cost.send_delay_p99_ns / SECOND)
            add(f"{point.load}: 1 % of the requests were sent {late} late or later, which counts as latency")
    if run.plan.objectives is not None:
        add(f"good/s: requests with {run.plan.objectives}", FAINT)
    if run.echo is not None:
        add(echo_text(run.echo), FAINT)
    add(f"seed of random inputs and arrivals: {run.plan.inputs.seed}", FAINT)
    return lines


def _limit_text(run: SavedRun, limit: LatencyLimit) -> str:
    """The result of the search for the highest load."""
    kind, unit = ("rate", "/s") if _is_open(run.plan.loads[0]) else ("concurrency", "")
    text = f"no load kept {limit}; the lowest that was tried was {limit.low:g}{unit}"
    if run.best is not None:
        text = f"highest {kind} with {limit}: {run.best:,.6g}{unit}"
        if run.best >= limit.high:
            text += f", the upper bound of the search: --{kind} LOW:HIGH allows more"
    if run.undecided is not None:
        text = f"{text}; the search ended there" if run.best is not None else "no load is known to keep the limit"
        text += f", as {kind} {run.undecided:,.6g}{unit} had too few responses to judge {limit}"
    return text


def echo_text(echo: EchoResult) -> str:
    limit = f"{SECOND / echo.request_ns:,.0f}/s" if echo.request_ns else "-"
    return (
        f"generator: {duration_text(echo.request_ns / SECOND)} of CPU time per request, at most {limit} per "
        f"process; {echo.per_s:,.0f}/s against an echo server over {echo.protocol}"
    )


def _is_open(load: Load) -> bool:
    return not isinstance(load, ClosedLoop)


def _p50(point: Point) -> float:
    result = point.latency.percentiles.get("p50")
    return result.mean if result is not None else 0.0


def _extend(rows: list[list[str]], points: Sequence[Point], text: Callable[[Point], str]) -> None:
    for row, point in zip(rows, points, strict=True):
        row.append(text(point))


def _percentile(latencies: str, name: str, point: Point) -> str:
    """`latencies`: the field of the point."""
    return percentile_text(getattr(point, latencies), name)


def rate_text(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


def share_text(interval: Interval) -> str:
    if not interval.mean:
        return "-"
    return f"{interval.half / interval.mean:.1%}" if interval.half < interval.mean else TOO_FEW


def percentile_text(latencies: Latencies | None, name: str) -> str:
    value = latencies.percentiles.get(name) if latencies is not None else None
    return duration_text(value.mean / SECOND) if value is not None else "-"


# ---------------------------------------------------------------------------------------- comparison


def comparison_text(comparison: RunComparison, names: tuple[str, str], screen: Screen) -> str:
    columns = [Column("load"), Column("metric"), Column(names[0], right=True), Column(names[1], right=True)]
    columns += [Column("difference", right=True), Column("interval", right=True, rank=1)]
    columns.append(Column("verdict", style=lambda text: VERDICTS.get(text, "")))
    text = screen.table(columns, [_change_row(change) for change in comparison.changes])
    verdict = screen.wrapped(
        f"{names[1]} is {_sentence(comparison, names[0])}", "", "    ", VERDICTS.get(comparison.verdict, "")
    )
    notes = [line for note in comparison.notes for line in screen.wrapped(f"note: {note}", "", "    ")]
    each = f"{comparison.row_confidence:.4%}".rstrip("0%").rstrip(".")
    confidence = f"{comparison.confidence * 100:g}"
    about = f"confidence: {confidence} % for the whole verdict, which requires {each} % for each interval"
    return "\n".join([text, "", *verdict, *notes, *screen.wrapped(about, "", "    ", FAINT)])


def _sentence(result: RunComparison, old: str) -> str:
    """The conclusion in one sentence; for a mixed result it names what is worse."""
    text = {
        BETTER: f"better than {old}",
        WORSE: f"worse than {old}",
        SAME: f"not different from {old}",
        MIXED: f"better than {old} in some metrics and worse in others",
    }.get(result.verdict, f"not known to differ from {old}")
    if result.verdict == SAME and any(change.verdict == UNKNOWN for change in result.changes):
        return f"{text}, as far as that is known"
    if result.verdict != MIXED:
        return text
    worse = [f"{change.metric} of {change.load}" for change in result.changes if change.verdict == WORSE]
    return f"{text}: {', '.join(worse)}"


def _change_row(change: Change) -> list[str]:
    relative = change.relative
    between, known = "-", f"{relative.mean:+.1%}" if relative is not None else "-"
    if change.metric == FAILED:
        known = f"{(change.new - change.old) * 100:+.2g} points"
    elif relative is None or relative.half >= max(1.0, abs(relative.mean)):
        between = TOO_FEW
    else:
        between = f"{relative.low:+.1%} to {relative.high:+.1%}"
    write = _writer(change.metric)
    return [change.load, change.metric, write(change.old), write(change.new), known, between, change.verdict]


def _writer(metric: str) -> Callable[[float], str]:
    if metric == FAILED:
        return lambda share: f"{share * 100:.3g}%"
    return rate_text if metric in RATES else lambda ns: duration_text(ns / SECOND)


def progress_text(progress: MeasureProgress) -> str:
    """The important parts come first, because a narrow terminal cuts off the end."""
    of, state = f"/{progress.loads}" if progress.loads else "", progress.state
    parts = [f"[{progress.number}{of}]", str(progress.load), f"{rate_text(state.per_s)} requests/s"]
    if state.p50_ns:
        parts.append(f"p50 {duration_text(state.p50_ns / SECOND)}, p99 {duration_text(state.p99_ns / SECOND)}")
    if state.failed:
        parts.append(f"{state.failed:,} failed")
    return "  ".join([*parts, f"{state.phase}, {state.seconds:.0f} s"])
