"""`python -m bench.peers.chart RESULT.json`: docs/compare.svg, the chart of the README, from a saved result."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.peers.report import OURS, Cell

TITLES = {
    "shmserve": "shmserve", "triton": "Triton", "mosec": "mosec", "litserve": "LitServe", "bentoml": "BentoML",
    "ray": "Ray Serve",
}  # fmt: skip
OUT = Path(__file__).parents[2] / "docs" / "compare.svg"
WIDTH, NAMES, BAR, ROW, GAP, TOP = 380, 74, 210, 24, 40, 48
STYLE = (
    "text { font-family: system-ui, sans-serif; font-size: 12px; fill: #1b1f24; } .t { font-weight: 600; } "
    ".s { fill: #57606a; } .o { fill: #0969da; } .p { fill: #afb8c1; }"
)


@dataclass(frozen=True)
class Panel:
    title: str
    model: str
    flight: int
    value: Callable[[Cell], float | None]
    text: Callable[[float], str]
    best: Callable[[list[float]], float]


PANELS = (
    Panel("mlp, 64 in flight: requests/s", "mlp", 64, lambda cell: cell.per_s, lambda value: f"{value:,.0f}", max),
    Panel("mlp, one in flight: median ms", "mlp", 1, lambda cell: cell.p50_us, lambda us: f"{us / 1000:.2f}", min),
)


def chart(cells: list[Cell], caption: str) -> str:
    panels = [bars(panel, cells, index * (WIDTH + GAP)) for index, panel in enumerate(PANELS)]
    rows = max(panel.count("<rect") for panel in panels)
    width, height = len(PANELS) * WIDTH + GAP, TOP + rows * ROW + 28
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">\n'
        f'<style>{STYLE}</style>\n<rect width="100%" height="100%" fill="#fff"/>\n'
        + "\n".join(panels)
        + f'\n<text class="s" x="{GAP / 2}" y="{height - 10}">{caption}</text>\n</svg>\n'
    )


def bars(panel: Panel, cells: list[Cell], left: float) -> str:
    """Draws the bars, the best first. A server that failed has no bar."""
    values = {
        cell.server: value
        for cell in cells
        if (cell.model, cell.flight) == (panel.model, panel.flight) and (value := panel.value(cell)) is not None
    }
    best = panel.best(list(values.values()))
    x = left + GAP / 2
    parts = [f'<text class="t" x="{x}" y="28">{panel.title}</text>']
    for index, (server, value) in enumerate(sorted(values.items(), key=lambda item: abs(item[1] - best))):
        y = TOP + index * ROW
        length = max(1.0, BAR * value / max(values.values()))
        kind = "o" if server == OURS else "p"
        parts.append(f'<text x="{x}" y="{y + 13}">{TITLES[server]}</text>')
        parts.append(f'<rect class="{kind}" x="{x + NAMES}" y="{y}" width="{length:.1f}" height="{ROW - 6}"/>')
        parts.append(f'<text class="s" x="{x + NAMES + length + 6:.1f}" y="{y + 13}">{panel.text(value)}</text>')
    return "\n".join(parts)


def main(path: str) -> None:
    result = json.loads(Path(path).read_text())
    machine = result["machine"]
    caption = f"HTTP, {machine['cores']} cores ({machine['cpu']}), {result['date']}: make compare"
    OUT.write_text(chart([Cell(**cell) for cell in result["cells"]], caption))


if __name__ == "__main__":
    main(sys.argv[1])
