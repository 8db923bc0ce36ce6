"""The terminal recording on the home page: its commands and what they print, as an SVG.

The output is in comments of the page, whose text cannot be seen twice. tests/process/docs/test_pages.py runs the
commands and compares it.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from tests import ROOT
from tests.support.docs.page_runner import blocks_of
from tests.support.docs.pages import page

FILE = ROOT / "docs" / "figures" / "terminal.svg"
WIDTH, LEFT, TOP, ROW = 760, 16, 48, 20
STYLE = """
text { font: 14px ui-monospace, monospace; fill: #1b1f24; white-space: pre; }
.p { fill: #f6f8fa; stroke: #d0d7de; }
.c { fill: #0b6bcb; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; }
.p { fill: #161b22; stroke: #30363d; }
.c { fill: #4d9be6; }
}
"""


def shown() -> Iterator[tuple[str, str]]:
    """The class and the text of each line."""
    for block in blocks_of(page("index")):
        if block.language == "sh":
            yield from (("c", f"$ {line}") for line in block.lines)
        elif block.language == "text":
            yield from (("", line) for line in block.text.splitlines())


def recording() -> str:
    lines = list(shown())
    height = TOP + ROW * len(lines)
    texts = [
        f'<text class="{kind}" x="{LEFT}" y="{TOP + ROW * number}">{escape(text)}</text>'
        for number, (kind, text) in enumerate(lines)
        if text
    ]
    dots = [f'<circle class="p" cx="{LEFT + 6 + 18 * number}" cy="18" r="5"/>' for number in range(3)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
            'aria-label="A terminal with the commands of this page">',
            f"<style>{STYLE}</style>",
            f'<rect class="p" x="1" y="1" width="{WIDTH - 2}" height="{height - 2}" rx="8"/>',
            *dots,
            *texts,
            "</svg>\n",
        ]
    )
