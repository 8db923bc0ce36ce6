"""`python -m bench.peers.chart RESULT.json`: docs/figures/compare.svg, the chart of the README, from a saved result."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.lib.charts import Ranked, rankings
from bench.peers.report import OURS, Cell
from shmserve.tools.charts import COLORS

TITLES = {
    "shmserve": "shmserve",
    "triton": "Triton",
    "mosec": "mosec",
    "litserve": "LitServe",
    "bentoml": "BentoML",
    "ray": "Ray Serve",
}
OUT = Path(__file__).parents[2] / "docs" / "figures" / "compare.svg"


@dataclass(frozen=True)
class ChartPanel:
    title: str
    model: str
    flight: int
    value: Callable[[Cell], float | None]
    text: Callable[[float], str]
    highest_first: bool


PANELS = (
    ChartPanel(
        "mlp, 64 in flight: requests/s", "mlp", 64, lambda cell: cell.per_s, lambda value: f"{value:,.0f}", True
    ),
    ChartPanel(
        "mlp, one in flight: median ms", "mlp", 1, lambda cell: cell.p50_us, lambda us: f"{us / 1000:.2f}", False
    ),
)


def chart(cells: list[Cell], caption: str) -> str:
    panels = [(panel.title, bars) for panel in PANELS if (bars := ranked(panel, cells))]
    if not panels:
        loads = " and ".join(f"{panel.model} with {panel.flight} in flight" for panel in PANELS)
        raise SystemExit(f"the result has no load of the chart, which shows {loads}")
    return rankings(panels, caption)


def ranked(panel: ChartPanel, cells: list[Cell]) -> list[Ranked]:
    """The best server first. A server that failed has no bar, nor has the relay, which is not a server."""
    shown = (
        cell for cell in cells if cell.server in TITLES and (cell.model, cell.flight) == (panel.model, panel.flight)
    )
    values = {cell.server: value for cell in shown if (value := panel.value(cell)) is not None}
    results = [
        Ranked(TITLES[server], value, panel.text(value), **({"color": COLORS[0]} if server == OURS else {}))
        for server, value in values.items()
    ]
    return sorted(results, key=lambda one: one.value, reverse=panel.highest_first)


def main(path: str) -> None:
    result = json.loads(Path(path).read_text())
    machine = result["machine"]
    caption = f"HTTP, {machine['cores']} cores ({machine['cpu']}), {result['date']}: make compare"
    OUT.write_text(chart([Cell(**cell) for cell in result["cells"]], caption))


if __name__ == "__main__":
    main(sys.argv[1])
