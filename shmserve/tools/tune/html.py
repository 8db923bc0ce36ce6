"""The report as one HTML file: without scripts or downloads, so that it opens anywhere."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from msgspec import Struct

from shmserve.tools.tune.goal import per_s
from shmserve.tools.tune.reasons import MIB, MS, reasons
from shmserve.tools.tune.report import diff, headline, measured
from shmserve.tools.tune.space import pair_text
from shmserve.tools.tune.tuner import Outcome

WIDTH, HEIGHT = 640, 320
LEFT, RIGHT, TOP, BOTTOM = 64, 30, 16, 44
COLORS = ("#1b6ac9", "#c9571b", "#2a8f4e", "#8a3fbf", "#a88a00", "#777777")
TICKS = 5

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse } td, th { padding: .2rem .8rem .2rem 0; text-align: right; font-weight: normal }
th { border-bottom: 1px solid #aaa } td:first-child, th:first-child { text-align: left }
tr.chosen { font-weight: 600 } pre { background: #f4f4f4; padding: .8rem; overflow-x: auto }
.add { color: #17692f } .del { color: #a31621 } svg { max-width: 100% } figure { margin: 0 }
td, th { white-space: nowrap } .wide { overflow-x: auto }
@media (prefers-color-scheme: dark) {
  body { background: #181818; color: #ddd } pre { background: #222 } .add { color: #7fd393 } .del { color: #f08a93 }
  svg text { fill: #ddd } svg .axis { stroke: #888 }
}
"""


class Series(Struct, frozen=True):
    """`line`: points are connected; otherwise they are dots."""

    name: str
    points: tuple[tuple[float, float], ...]
    line: bool
    color: int = 0


def page(outcome: Outcome, path: str) -> str:
    goal, model = outcome.goal, outcome.model
    wanted = f"p99 up to {goal.p99_ns / MS:g} ms"
    wanted += f" at {per_s(goal.rate)} requests/s" if goal.rate else ", as many requests per second as possible"
    wanted += f", {goal.memory / MIB:,.0f} MiB of memory" if goal.memory else ""
    parts = [
        f"<h1>Tuning of {escape(model.name)}</h1><p>Target: {wanted}.</p>",
        f"<p>Interrupted in the step &ldquo;{escape(outcome.interrupted)}&rdquo;.</p>" if outcome.interrupted else "",
        f"<h2>{escape(headline(outcome))}</h2><ul>",
        *(f"<li>{escape(reason)}</li>" for reason in reasons(outcome)),
        "</ul><h2>Changes</h2>",
        _changes(diff(outcome, path)),
        _candidates(outcome),
        _load_chart(outcome),
        _service_chart(outcome),
        f"<p>{outcome.searched} settings simulated; "
        + ", ".join(f"{escape(name)} {seconds:.1f} s" for name, seconds in outcome.seconds.items())
        + ".</p>",
    ]
    title = f"shmserve tune {escape(model.name)}"
    head = f'<meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def _changes(text: str) -> str:
    lines = []
    for line in text.splitlines():
        kind = {"+": "add", "-": "del"}.get(line[:1], "")
        lines.append(f'<span class="{kind}">{escape(line)}</span>' if kind else escape(line))
    return f"<pre>{chr(10).join(lines)}</pre>" if lines else "<p>None: the present settings are kept.</p>"


def _candidates(outcome: Outcome) -> str:
    columns, rows = measured(outcome)
    if not rows:
        return ""
    chosen = outcome.chosen.describe() if outcome.chosen is not None else ""
    lines = []
    for row in rows:
        kind = ' class="chosen"' if row[0] == chosen else ""
        lines.append(f"<tr{kind}>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>")
    head = "".join(f"<th>{escape(column.name)}</th>" for column in columns)
    return (
        "<h2>Settings measured on the server</h2><div class='wide'><table>"
        f"<tr>{head}</tr>{''.join(lines)}</table></div>"
    )


def _load_chart(outcome: Outcome) -> str:
    """p99 by load: predicted curve, measured points, and the limit."""
    goal = outcome.goal
    top = 3 * goal.p99_ns / MS
    series = []
    if outcome.curve:
        points = tuple((each.rate, min(each.p99_ns / MS, top)) for each in outcome.curve)
        series.append(Series("chosen, predicted", points, True))
    for number, each in enumerate(outcome.confirmed):
        chosen = each.candidate == outcome.chosen
        points = tuple((point.rate, min(point.p99_ns / MS, top)) for point in each.points)
        if points:
            name = ("chosen" if chosen else each.candidate.describe()) + ", measured"
            series.append(Series(name, points, False, 0 if chosen else 1 + number % (len(COLORS) - 1)))
    if not series:
        return ""
    ends = [x for each in series for x, _ in each.points]
    limit = goal.p99_ns / MS
    series.append(Series("limit", ((0.0, limit), (max(ends), limit)), True, len(COLORS) - 1))
    text = "<h2>Load and latency</h2><p>Values above three times the limit are drawn at the top.</p>"
    return text + chart("requests per second", "p99 in ms", series)


def _service_chart(outcome: Outcome) -> str:
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
        series.append(Series(f"{name}, fitted", fitted, True, color))
        series.append(Series(f"{name}, measured", measured, False, color))
    return "<h2>Service times</h2>" + chart("rows of a batch", "ms for a batch", series) if series else ""


# ------------------------------------------------------------------------------------ charts


def chart(x_name: str, y_name: str, series: Sequence[Series]) -> str:
    """A chart with linear axes from 0."""
    x_top = _round_up(max(x for each in series for x, _ in each.points))
    y_top = _round_up(max(y for each in series for _, y in each.points))

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + x / x_top * (WIDTH - LEFT - RIGHT)
        return across, HEIGHT - BOTTOM - y / y_top * (HEIGHT - TOP - BOTTOM)

    parts = list(_axes(x_name, y_name, x_top, y_top))
    for each in series:
        color = COLORS[each.color]
        places = [place(x, y) for x, y in each.points]
        if each.line:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        else:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"/>' for x, y in places]
    legend = " &nbsp; ".join(
        f'<span style="color:{COLORS[each.color]}">{"&mdash;" if each.line else "&bull;"}</span> {escape(each.name)}'
        for each in series
    )
    drawing = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img">{"".join(parts)}</svg>'
    return f"<figure>{drawing}<figcaption>{legend}</figcaption></figure>"


def _axes(x_name: str, y_name: str, x_top: float, y_top: float) -> Iterator[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    yield f'<path class="axis" d="M{LEFT},{TOP} V{bottom} H{right}" fill="none" stroke="#555"/>'
    for number in range(TICKS + 1):
        x = LEFT + (right - LEFT) * number / TICKS
        y = bottom - (bottom - TOP) * number / TICKS
        across, up = f"{x_top * number / TICKS:,.6g}", f"{y_top * number / TICKS:,.4g}"
        yield f'<text x="{x:.0f}" y="{bottom + 16}" font-size="11" text-anchor="middle">{across}</text>'
        yield f'<text x="{LEFT - 6}" y="{y + 4:.0f}" font-size="11" text-anchor="end">{up}</text>'
    middle = (LEFT + right) / 2
    yield f'<text x="{middle}" y="{HEIGHT - 6}" font-size="12" text-anchor="middle">{escape(x_name)}</text>'
    yield (
        f'<text x="14" y="{(TOP + bottom) / 2}" font-size="12" text-anchor="middle" '
        f'transform="rotate(-90 14 {(TOP + bottom) / 2})">{escape(y_name)}</text>'
    )


def _round_up(value: float) -> float:
    """The next number of the form 1, 2, 2.5 or 5 times a power of ten."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= value)
