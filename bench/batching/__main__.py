"""`python -m bench.batching [--simulate]`: draws the plots from the saved results, or simulates again first."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bench.batching.experiments import EXPERIMENTS
from bench.fleet.plots import series, standalone
from shmserve.tools.load.report.charts import Axis, lines

RESULTS = Path(__file__).with_name("results.json")
PLOTS = Path(__file__).parents[2] / "docs" / "explanation"
RATE = Axis("requests a second", lambda value: f"{value:,.0f}", log=True)


def saved() -> dict[str, list[dict[str, Any]]]:
    results: dict[str, list[dict[str, Any]]] = json.loads(RESULTS.read_text())
    return results


def plots(results: dict[str, list[dict[str, Any]]]) -> dict[str, str]:
    """File name -> SVG."""
    size, delay = results["size"], results["delay"]
    found = {
        "batch-size-p99": lines(
            "p99 by rate", RATE, Axis("p99 in ms", log=True),
            series(size, lambda row: f"up to {row['max_batch']}", "rate", "p99_ms"),
        ),
        "batch-size-mean": lines(
            "rows in a batch", RATE, Axis("mean rows in a batch"),
            series(size, lambda row: f"up to {row['max_batch']}", "rate", "mean_batch"),
        ),
        "delay-p50": lines(
            "p50 by queue delay", RATE, Axis("p50 in ms"),
            series(delay, lambda row: f"{row['delay_ms']} ms", "rate", "p50_ms"),
        ),
        "delay-busy": lines(
            "time that the instance is busy", RATE, Axis("busy", lambda value: f"{value:.0%}"),
            series(delay, lambda row: f"{row['delay_ms']} ms", "rate", "busy"),
        ),
    }  # fmt: skip
    return {name: standalone(svg) for name, svg in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.batching", description=__doc__)
    parser.add_argument("--simulate", action="store_true", help="simulate again; half a minute")
    if parser.parse_args().simulate:
        results = {name: experiment() for name, experiment in EXPERIMENTS.items()}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    for name, svg in plots(saved()).items():
        (PLOTS / f"{name}.svg").write_text(svg)


if __name__ == "__main__":
    main()
