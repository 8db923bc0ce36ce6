"""`python -m bench.batching [--simulate]`: draws the plots from the saved results, or simulates again first."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, TypedDict

from bench.fleet.plots import series
from bench.lib.charts import standalone
from shmserve.core.policy import BatchPolicy, InstanceSpec, ModelPolicy, TensorSpec
from shmserve.sim import Affine, Load, Plan, Poisson, SimModel, simulate
from shmserve.tools.charts import Axis, lines

BATCH_NS, ROW_NS = 2_000_000, 250_000
SIZES = (1, 4, 16, 32)
RATES = (50, 100, 200, 300, 400, 600, 800, 1200, 1600, 2000, 2400)
DELAYS_MS = (0, 2, 5, 10)
SLOW_RATES = (50, 100, 200, 300, 400, 600, 800, 1200, 1600)
MAX_LOAD = 0.97
"""Above this share of the capacity, latency depends on the length of the simulation."""


class SimulatedRow(TypedDict):
    """One simulation."""

    max_batch: int
    delay_ms: int
    rate: int
    p50_ms: float
    p99_ms: float
    mean_batch: float
    busy: float


def capacity(max_batch: int) -> float:
    """Requests per second if all batches are full."""
    return max_batch * 1e9 / (BATCH_NS + max_batch * ROW_NS)


def measured(max_batch: int, delay_ms: int, rate: int, seconds: float = 20) -> SimulatedRow:
    """Simulates requests of one row that arrive at random times."""
    x, y = TensorSpec("x", "FP32", (16,)), TensorSpec("y", "FP32", (16,))
    policy = ModelPolicy("m", 1, max_batch, (x,), (y,), BatchPolicy(delay_ns=delay_ms * 1_000_000))
    model = SimModel(policy, (InstanceSpec("m_0"),), Affine(BATCH_NS, ROW_NS))
    result = simulate(Plan((model,), (Load("m", Poisson(rate)),), seconds=seconds, seed=1)).models["m"]
    return {
        "max_batch": max_batch,
        "delay_ms": delay_ms,
        "rate": rate,
        "p50_ms": round(result.latency.quantile(0.5) / 1e6, 3),
        "p99_ms": round(result.latency.quantile(0.99) / 1e6, 3),
        "mean_batch": round(result.mean_batch, 2),
        "busy": round(result.utilization, 4),
    }


def by_size() -> list[SimulatedRow]:
    """Largest batches of several sizes, without a delay."""
    return [measured(size, 0, rate) for size in SIZES for rate in RATES if rate <= MAX_LOAD * capacity(size)]


def by_delay() -> list[SimulatedRow]:
    """Queue delays, with batches of up to 16 rows."""
    return [measured(16, delay, rate) for delay in DELAYS_MS for rate in SLOW_RATES]


EXPERIMENTS = {"size": by_size, "delay": by_delay}
RESULTS = Path(__file__).with_name("results.json")
PLOTS = Path(__file__).parents[2] / "docs" / "figures"
RATE = Axis("requests a second", lambda value: f"{value:,.0f}", log=True)


def saved() -> dict[str, list[dict[str, Any]]]:
    results: dict[str, list[dict[str, Any]]] = json.loads(RESULTS.read_text())
    return results


def plots(results: dict[str, list[dict[str, Any]]]) -> dict[str, str]:
    """File name -> SVG."""
    size, delay = results["size"], results["delay"]
    figures = {
        "batch-size-p99": lines(
            "p99 by rate",
            RATE,
            Axis("p99 in ms", log=True),
            series(size, lambda row: f"up to {row['max_batch']}", "rate", "p99_ms"),
        ),
        "batch-size-mean": lines(
            "rows in a batch",
            RATE,
            Axis("mean rows in a batch"),
            series(size, lambda row: f"up to {row['max_batch']}", "rate", "mean_batch"),
        ),
        "delay-p50": lines(
            "p50 by queue delay",
            RATE,
            Axis("p50 in ms"),
            series(delay, lambda row: f"{row['delay_ms']} ms", "rate", "p50_ms"),
        ),
        "delay-busy": lines(
            "time that the instance is busy",
            RATE,
            Axis("busy", lambda value: f"{value:.0%}"),
            series(delay, lambda row: f"{row['delay_ms']} ms", "rate", "busy"),
        ),
    }
    return {name: standalone(svg) for name, svg in figures.items()}


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
