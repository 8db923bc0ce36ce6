"""The report as one HTML file: without scripts or downloads, so that it opens anywhere."""

from __future__ import annotations

from html import escape

from shmserve.tools import charts
from shmserve.tools.charts import COLORS, Axis, Series, html_table, lines
from shmserve.tools.load.report.table import rate_text
from shmserve.tools.tune.goal import MIB, MS
from shmserve.tools.tune.predict import Prediction
from shmserve.tools.tune.reasons import reasons
from shmserve.tools.tune.report import diff, headline, measured
from shmserve.tools.tune.space import pair_text
from shmserve.tools.tune.tuner import TuningOutcome

STYLE = """<style>
tr.chosen { font-weight: 600 } pre { background: #8882; padding: .8rem; overflow-x: auto }
.add { color: #2a8a43 } .del { color: #c7431a }
</style>"""


def page(outcome: TuningOutcome, path: str) -> str:
    goal, model = outcome.goal, outcome.model
    wanted = f"p99 up to {goal.p99_ns / MS:g} ms"
    wanted += f" at {rate_text(goal.rate)} requests/s" if goal.rate else ", as many requests per second as possible"
    wanted += f", {goal.memory / MIB:,.0f} MiB of memory" if goal.memory else ""
    times = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in outcome.seconds.items())
    parts = [
        STYLE,
        f"<p>Target: {wanted}.</p>",
        f"<p>Interrupted in the step &ldquo;{escape(outcome.interrupted)}&rdquo;.</p>" if outcome.interrupted else "",
        f"<h2>{escape(headline(outcome))}</h2><ul>",
        *(f"<li>{escape(reason)}</li>" for reason in reasons(outcome)),
        "</ul><h2>Changes</h2>",
        _changes(diff(outcome, path)),
        _candidates(outcome),
        _load_chart(outcome),
        _memory_chart(outcome),
        _service_chart(outcome),
        f"<p>{outcome.searched} settings simulated; {escape(times)}.</p>",
    ]
    return charts.page(f"Tuning of {model.name}", parts)


def _changes(text: str) -> str:
    marked = []
    for line in text.splitlines():
        kind = {"+": "add", "-": "del"}.get(line[:1], "")
        marked.append(f'<span class="{kind}">{escape(line)}</span>' if kind else escape(line))
    return f"<pre>{chr(10).join(marked)}</pre>" if marked else "<p>None: the present settings are kept.</p>"


def _candidates(outcome: TuningOutcome) -> str:
    columns, rows = measured(outcome)
    if not rows:
        return ""
    chosen = outcome.chosen.describe() if outcome.chosen is not None else ""
    table = html_table([column.name for column in columns], rows, [row[0] == chosen for row in rows])
    return f"<h2>Settings measured on the server</h2>{table}"


def _load_chart(outcome: TuningOutcome) -> str:
    """p99 by load: predicted curve, measured points, and the limit."""
    goal = outcome.goal
    top = 3 * goal.p99_ns / MS
    series = []
    if outcome.curve:
        points = tuple((each.rate, min(each.p99_ns / MS, top)) for each in outcome.curve)
        series.append(Series("chosen, predicted", points, color=0))
    for number, each in enumerate(outcome.confirmed):
        chosen = each.candidate == outcome.chosen
        points = tuple((point.rate, min(point.p99_ns / MS, top)) for point in each.points)
        if points:
            name = ("chosen" if chosen else each.candidate.describe()) + ", measured"
            color = 0 if chosen else 1 + number % (len(COLORS) - 2)
            series.append(Series(name, points, is_line=False, color=color))
    if not series:
        return ""
    ends = [x for each in series for x, _ in each.points]
    limit = goal.p99_ns / MS
    series.append(Series("limit", ((0.0, limit), (max(ends), limit)), dashed=True, color=len(COLORS) - 1))
    text = "<p>Values above three times the limit are drawn at the top.</p>"
    return text + lines("Load and latency", Axis("requests per second"), Axis("p99 in ms"), series)


def _memory_chart(outcome: TuningOutcome) -> str:
    """What memory buys: all predictions, and the settings that no other beats with as little memory."""
    goal = outcome.goal

    def place(each: Prediction) -> tuple[float, float]:
        return outcome.memory_of(each.candidate) / MIB, each.p99_ns / MS if goal.rate else each.rate

    frontier = outcome.frontier
    best = Series("best for its memory", tuple(map(place, frontier)), color=0)
    others = tuple(place(each) for each in outcome.ranked if each not in frontier)
    what = Axis("predicted p99 in ms" if goal.rate else "predicted requests per second")
    series = [best, *([Series("other settings", others, is_line=False, color=4)] if others else [])]
    return lines("Memory and " + ("latency" if goal.rate else "throughput"), Axis("MiB of all instances"), what, series)


def _service_chart(outcome: TuningOutcome) -> str:
    """Service times by rows: measured points and fitted curves. Shows the three settings with the highest
    throughput."""
    best = sorted(outcome.fits, key=lambda pair: -outcome.times.highest.get(pair, 0.0))[:3]
    series = []
    length = outcome.goal.typical_length
    for color, pair in enumerate(best):
        fit = outcome.fits[pair]
        name = pair_text(*pair)
        samples = [each for each in outcome.times.samples if each.pair == pair and each.length == length]
        measured = tuple((each.rows, each.batch_ns / MS) for each in samples)
        last = max((rows for rows, _ in measured), default=1)
        sizes = sorted({1, round(last), *(size for size, _ in fit.entries if size <= last)})
        fitted = tuple((size, fit.ns(size, length) / MS) for size in sizes)
        series.append(Series(f"{name}, fitted", fitted, color=color))
        series.append(Series(f"{name}, measured", measured, is_line=False, color=color))
    return lines("Service times", Axis("rows of a batch"), Axis("ms for a batch"), series)
