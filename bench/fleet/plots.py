"""The plots of docs/sizing.md, from the saved results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.fleet.experiments import GPUS
from bench.lib.charts import standalone
from shmserve.tools.charts import Axis, Series, lines

Rows = list[dict[str, Any]]
P99 = Axis("p99 in ms", log=True)
IN_TIME = Axis("answered within two seconds", lambda value: f"{value:.0%}")
SHARE = Axis("load", lambda value: f"{value:.0%}", from_zero=False)


def series(rows: Rows, name: Callable[[dict[str, Any]], str], x: str, y: str) -> list[Series]:
    results: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        results.setdefault(name(row), []).append((row[x], row[y]))
    return [Series(name, points) for name, points in results.items()]


def over_time(rows: Rows, name: Callable[[dict[str, Any]], str]) -> list[Series]:
    return [Series(name(row), [(each["at_s"], each["in_time"]) for each in row["timeline"]]) for row in rows]


def plots(results: dict[str, Rows]) -> dict[str, str]:
    """File name -> SVG."""
    seconds = Axis("seconds, when requests were sent")
    shown = [row for row in results["reports"] if row["policy"] == "least" or row["gpus"] == GPUS[1]]
    ends = [row for row in results["zone"] if row["gpus"] in (GPUS[0], GPUS[-1])]
    charts = {
        "load": lines(
            f"p99 by load, {GPUS[1]:,} GPUs",
            SHARE,
            P99,
            series(results["load"], lambda row: row["policy"], "load", "p99_ms"),
        ),
        "size": lines(
            "p99 by size, at a load of 90%",
            Axis("GPUs", lambda value: f"{value:,.0f}", log=True),
            P99,
            series(results["size"], lambda row: row["policy"], "gpus", "p99_ms"),
        ),
        "reports": lines(
            "Old reports, 20 balancers",
            Axis("reports every ms", log=True),
            P99,
            series(shown, lambda row: f"{row['policy'].partition('-')[0]} {row['gpus']:,}", "every_ms", "p99_ms"),
        ),
        "zone": lines(
            "A zone fails",
            seconds,
            IN_TIME,
            over_time(ends, lambda row: f"{row['gpus']:,}, {row['load']:.0%}"),
        ),
        "scaling": lines(
            "The load doubles at 20 s",
            seconds,
            IN_TIME,
            over_time(results["scaling"], lambda row: f"starts in {row['start_s']} s"),
        ),
    }
    return {name: standalone(svg) for name, svg in charts.items()}
