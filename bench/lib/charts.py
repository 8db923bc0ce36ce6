"""Charts as files, for the documentation: bars side by side, and the style of a chart on a page of its own."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from msgspec import Struct

FILE_STYLE = (
    "text { font-family: system-ui, sans-serif; font-size: 12px; fill: #1b1f24; } .t { font-weight: 600; "
    "font-size: 14px; } .s { font-size: 11px; } .g { stroke: #d0d7de; } .a { stroke: #1b1f24; } .p { fill: #fff; }\n"
    "@media (prefers-color-scheme: dark) { text { fill: #e6edf3; } .g { stroke: #30363d; } .a { stroke: #e6edf3; } "
    ".p { fill: #0d1117; } }"
)


def standalone(svg: str) -> str:
    """A chart as a file of its own, light or dark as the page that shows it."""
    head, _, rest = svg.partition(">")
    head = head.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"')
    return f'{head}>\n<style>{FILE_STYLE}</style>\n<rect width="100%" height="100%" class="p"/>{rest}\n'


class Ranked(Struct, frozen=True):
    """A bar with the text beside it. `color`: one of COLORS, or grey."""

    name: str
    value: float
    text: str
    color: str = "#afb8c1"


RANKED_WIDTH, RANKED_NAMES, RANKED_BAR, RANKED_ROW, RANKED_GAP, RANKED_TOP = 380, 74, 210, 24, 40, 48


def rankings(panels: Sequence[tuple[str, Sequence[Ranked]]], caption: str) -> str:
    """Titles and bars side by side, the bars in the given order."""
    parts = []
    for number, (title, ranked) in enumerate(panels):
        x = number * (RANKED_WIDTH + RANKED_GAP) + RANKED_GAP / 2
        largest = max(one.value for one in ranked)
        parts.append(f'<text class="t" x="{x}" y="28">{escape(title)}</text>')
        for index, one in enumerate(ranked):
            y = RANKED_TOP + index * RANKED_ROW
            length = max(1.0, RANKED_BAR * one.value / largest)
            start = x + RANKED_NAMES
            parts.append(f'<text x="{x}" y="{y + 13}">{escape(one.name)}</text>')
            parts.append(
                f'<rect x="{start}" y="{y}" width="{length:.1f}" height="{RANKED_ROW - 6}" fill="{one.color}"/>'
            )
            parts.append(f'<text class="s" x="{start + length + 6:.1f}" y="{y + 13}">{escape(one.text)}</text>')
    width = len(panels) * RANKED_WIDTH + RANKED_GAP
    height = RANKED_TOP + max(len(ranked) for _, ranked in panels) * RANKED_ROW + 28
    parts.append(f'<text class="s" x="{RANKED_GAP / 2}" y="{height - 10}">{escape(caption)}</text>')
    body = "\n".join(parts)
    return standalone(f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}">\n{body}\n</svg>')
