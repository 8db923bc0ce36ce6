"""The effect of batching on a model whose batches take 2 ms plus 0.25 ms per row, at rates up to its limit."""

from __future__ import annotations

from typing import TypedDict

from shmserve.core.policy import BatchPolicy, InstanceSpec, ModelPolicy, TensorSpec
from shmserve.sim import Affine, Load, Plan, Poisson, SimModel, simulate

BATCH_NS, ROW_NS = 2_000_000, 250_000
SIZES = (1, 4, 16, 32)
RATES = (50, 100, 200, 300, 400, 600, 800, 1200, 1600, 2000, 2400)
DELAYS_MS = (0, 2, 5, 10)
SLOW_RATES = (50, 100, 200, 300, 400, 600, 800, 1200, 1600)
MOST_LOAD = 0.97
"""Above this share of the capacity, latency depends on the length of the simulation."""


class Row(TypedDict):
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


def measured(max_batch: int, delay_ms: int, rate: int, seconds: float = 20) -> Row:
    """Simulates requests of one row that arrive at random times."""
    x, y = TensorSpec("x", "FP32", (16,)), TensorSpec("y", "FP32", (16,))
    policy = ModelPolicy("m", 1, max_batch, (x,), (y,), BatchPolicy(delay_ns=delay_ms * 1_000_000))
    model = SimModel(policy, (InstanceSpec("m_0"),), Affine(BATCH_NS, ROW_NS))
    found = simulate(Plan((model,), (Load("m", Poisson(rate)),), seconds=seconds, seed=1)).models["m"]
    return {
        "max_batch": max_batch,
        "delay_ms": delay_ms,
        "rate": rate,
        "p50_ms": round(found.latency.quantile(0.5) / 1e6, 3),
        "p99_ms": round(found.latency.quantile(0.99) / 1e6, 3),
        "mean_batch": round(found.mean_batch, 2),
        "busy": round(found.utilisation, 4),
    }


def by_size() -> list[Row]:
    """Largest batches of several sizes, without a delay."""
    return [measured(size, 0, rate) for size in SIZES for rate in RATES if rate <= MOST_LOAD * capacity(size)]


def by_delay() -> list[Row]:
    """Queue delays, with batches of up to 16 rows."""
    return [measured(16, delay, rate) for delay in DELAYS_MS for rate in SLOW_RATES]


EXPERIMENTS = {"size": by_size, "delay": by_delay}
