"""Charts as SVG: lines and bars with axes, readable without scripts, and usable by other reports.

This replaces plotly: a page with plotly's script takes 4.5 MB, a page of these charts a few KB, and there is nothing to
install.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from msgspec import Struct

WIDTH, HEIGHT = 720, 320
LEFT, RIGHT, TOP, BOTTOM = 78, 36, 30, 48
WIDEST = 48.0
"""Maximum width of a bar."""
COLORS = ("#0b6bcb", "#c7431a", "#2a8a43", "#8a4fbf", "#b8860b", "#c2185b")
Write = Callable[[float], str]


class Series(Struct, frozen=True):
    """`points`: x, y; `low` and `high`: the interval of y, one for each point, or empty. `labels`: texts shown at the
    points."""

    name: str
    points: Sequence[tuple[float, float]]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    labels: Sequence[str] = ()
    dashed: bool = False
    is_line: bool = True
    """Whether its points are connected."""
    color: int | None = None
    """Index of COLORS; None: the place of the series."""


class Axis(Struct, frozen=True):
    """`write` makes the text of a value. `log`: the axis is logarithmic, for values above 0 only."""

    name: str
    write: Write = lambda value: f"{value:,.4g}"
    log: bool = False
    from_zero: bool = True


class _Scale:
    """Values to pixels."""

    def __init__(self, axis: Axis, values: Sequence[float], start: float, end: float) -> None:
        usable = [value for value in values if math.isfinite(value) and (value > 0 or not axis.log)] or [1.0]
        self.low, self.high = min(usable), max(usable)
        self._log, self._start, self._end = axis.log, start, end
        if axis.log:
            self.low, self.high = 10 ** math.floor(math.log10(self.low)), 10 ** math.ceil(math.log10(self.high))
            if self.low == self.high:
                self.high *= 10
            self.ticks = [10.0**power for power in range(round(math.log10(self.low)), round(math.log10(self.high)) + 1)]
            return
        if axis.from_zero:
            self.low = min(0.0, self.low)
        if self.high <= self.low:
            self.high = self.low + 1
        step = _step(self.high - self.low)
        first = math.floor(self.low / step)
        count = math.ceil(self.high / step - first - 1e-9)
        self.ticks = [(first + number) * step for number in range(count + 1)]
        self.low, self.high = self.ticks[0], self.ticks[-1]

    def __call__(self, value: float) -> float:
        if self._log:
            value = max(value, self.low)
            share = (math.log10(value) - math.log10(self.low)) / (math.log10(self.high) - math.log10(self.low))
        else:
            share = (value - self.low) / (self.high - self.low)
        return self._start + share * (self._end - self._start)


def _step(span: float) -> float:
    """A round number that divides the span into 4 to 10 parts."""
    power = 10 ** math.floor(math.log10(span / 4))
    return float(next(power * factor for factor in (1, 2, 2.5, 5, 10) if span / (power * factor) <= 6))


def lines(title: str, x: Axis, y: Axis, series: Sequence[Series]) -> str:
    """A line chart."""
    points = [point for one in series for point in one.points]
    if not points:
        return ""
    across = _Scale(x, [point[0] for point in points], LEFT, WIDTH - RIGHT)
    heights = [point[1] for point in points] + [value for one in series for value in (*one.low, *one.high)]
    up = _Scale(y, heights, HEIGHT - BOTTOM, TOP)
    parts = _axes(title, x, y, across, up)
    for number, one in enumerate(series):
        color = _color(series, number)
        places = [(across(at), up(value)) for at, value in one.points]
        parts += [
            f'<line x1="{place[0]:.1f}" x2="{place[0]:.1f}" y1="{up(low):.1f}" y2="{up(high):.1f}" stroke="{color}" '
            'stroke-opacity=".45" stroke-width="5"/>'
            for place, low, high in zip(places, one.low, one.high, strict=False)
        ]
        path = " ".join(f"{left:.1f},{top:.1f}" for left, top in places)
        dash = ' stroke-dasharray="5 4"' if one.dashed else ""
        if one.is_line:
            parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"{dash}/>')
        for index, (place, point) in enumerate(zip(places, one.points, strict=True)):
            label = one.labels[index] if index < len(one.labels) else ""
            tip = escape(f"{one.name} {label}: {x.write(point[0])}, {y.write(point[1])}")
            parts.append(
                f'<circle cx="{place[0]:.1f}" cy="{place[1]:.1f}" r="3.5" fill="{color}"><title>{tip}</title></circle>'
            )
            if label and number == 0:
                parts.append(f'<text x="{place[0] + 6:.1f}" y="{place[1] - 6:.1f}" class="s">{escape(label)}</text>')
    return _svg(title, parts, [(one.name, _color(series, number)) for number, one in enumerate(series)])


def _color(series: Sequence[Series], number: int) -> str:
    color = series[number].color
    return COLORS[(number if color is None else color) % len(COLORS)]


def bars(title: str, x: Axis, y: Axis, values: Sequence[tuple[float, float, float]]) -> str:
    """A histogram: left edge, right edge, height."""
    if not values:
        return ""
    across = _Scale(x, [edge for left, right, _ in values for edge in (left, right)], LEFT, WIDTH - RIGHT)
    up = _Scale(y, [height for _, _, height in values], HEIGHT - BOTTOM, TOP)
    parts = _axes(title, x, y, across, up)
    for left, right, height in values:
        start, top = across(left), up(height)
        width = max(1.0, across(right) - start - 0.5)
        start += max(0.0, width - WIDEST) / 2
        tip = escape(f"{x.write(left)} to {x.write(right)}: {y.write(height)}")
        parts.append(
            f'<rect x="{start:.1f}" y="{top:.1f}" width="{min(width, WIDEST):.1f}" '
            f'height="{up(up.low) - top:.1f}" fill="{COLORS[0]}"><title>{tip}</title></rect>'
        )
    return _svg(title, parts, [])


def _axes(title: str, x: Axis, y: Axis, across: _Scale, up: _Scale) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = [f'<text x="{LEFT}" y="16" class="t">{escape(title)}</text>']
    for tick in up.ticks:
        at = up(tick)
        parts.append(f'<line x1="{LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}" class="g"/>')
        parts.append(
            f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end" class="s">{escape(y.write(tick))}</text>'
        )
    for tick in across.ticks:
        at = across(tick)
        parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{bottom}" y2="{bottom + 4}" class="a"/>')
        text = escape(x.write(tick))
        parts.append(f'<text x="{at:.1f}" y="{bottom + 17}" text-anchor="middle" class="s">{text}</text>')
    middle = (LEFT + right) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle" class="s">{escape(x.name)}</text>')
    where = f'x="14" y="{(TOP + bottom) / 2}" transform="rotate(-90 14 {(TOP + bottom) / 2})"'
    parts.append(f'<text {where} text-anchor="middle" class="s">{escape(y.name)}</text>')
    parts.append(f'<path d="M{LEFT},{TOP}V{bottom}H{right}" class="a" fill="none"/>')
    return parts


def _svg(title: str, parts: Sequence[str], names: Sequence[tuple[str, str]]) -> str:
    """`names`: those of the series, with their colors. They stand beside the title, or below if there is no room."""
    widths = [7 * len(name) + 22 for name, _ in names]
    room = WIDTH - RIGHT - LEFT
    above = sum(widths) + 8 * len(title) <= room
    at, top = (WIDTH - RIGHT - sum(widths) if above else LEFT), (7 if above else HEIGHT)
    legend = []
    for (name, color), width in zip(names, widths, strict=True):
        if not above and at > LEFT and at + width > WIDTH:
            at, top = LEFT, top + 16
        legend.append(f'<rect x="{at}" y="{top}" width="10" height="10" fill="{color}"/>')
        legend.append(f'<text x="{at + 14}" y="{top + 9}" class="s">{escape(name)}</text>')
        at += width
    body = "\n".join([*parts, *legend])
    height = HEIGHT if above else top + 16
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title, True)}">\n{body}\n</svg>'


STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --faint: #d0d7de; --paper: #fff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --faint: #30363d; --paper: #0d1117; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
       max-width: 1080px; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; } td:first-child, th:first-child { text-align: left; }
td, th { padding: .25rem .7rem; border-bottom: 1px solid var(--faint); text-align: right; white-space: nowrap; }
td:last-child { white-space: normal; min-width: 9rem; } .wide { overflow-x: auto; }
svg { width: 100%; max-width: 720px; margin: .5rem 0; display: block; } .t { font-weight: 600; font-size: 14px; }
svg text { fill: var(--ink); } .s { font-size: 11px; } .g { stroke: var(--faint); } .a { stroke: var(--ink); }
"""


def page(title: str, parts: Sequence[str]) -> str:
    """A whole HTML page without scripts or links. `parts` are HTML."""
    body = "\n".join(part for part in parts if part)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width">\n<title>{escape(title)}</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]], chosen: Sequence[bool] = ()) -> str:
    """`chosen`: for each row, whether it has the class `chosen`."""
    table = ['<div class="wide">', "<table>", f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr>"]
    for number, row in enumerate(rows):
        kind = ' class="chosen"' if number < len(chosen) and chosen[number] else ""
        table.append(f"<tr{kind}>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>")
    return "\n".join([*table, "</table>", "</div>"])
