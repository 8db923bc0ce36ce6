"""Runs for tests of reports and comparisons."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shmserve.tools.load.analysis.confidence import interval
from shmserve.tools.load.analysis.latencies import LatencyHistogram
from shmserve.tools.load.plan import SECOND, ClosedLoop, Load, LoadPlan
from shmserve.tools.load.record import (
    Cost,
    EchoResult,
    Interval,
    Latencies,
    LoadWindow,
    MachineUsage,
    Point,
    SavedRun,
    ServerSide,
)


def window(number: int, good: int, p50: float = 1e6, p99: float = 2e6) -> LoadWindow:
    percentiles = {"p50": p50, "p99": p99}
    return LoadWindow(
        start_ns=number * SECOND, length_ns=SECOND, good=good, failed=0, mean_ns=p50, percentiles=percentiles
    )


def latencies(values: Sequence[int]) -> Latencies:
    histogram = LatencyHistogram()
    histogram.add(np.array(values, np.int64))
    low, high = histogram.extremes
    found = {name: Interval(value, value * 0.9, value * 1.1) for name, value in histogram.percentiles().items()}
    return Latencies(
        count=histogram.count, mean=histogram.mean, low=low, high=high, percentiles=found, histogram=histogram.encoded()
    )


def point(load: Load, windows: Sequence[LoadWindow], values: Sequence[int] = (), failed: int = 0) -> Point:
    """`values`: the latencies; by default, values with the percentiles of the first window."""
    if not values:
        p50, p99 = (int(windows[0].percentiles[name]) for name in ("p50", "p99"))
        values = (p50,) * 1960 + (p99,) * 40
    return Point(
        load=load,
        windows=tuple(windows),
        used=(0, len(windows)),
        stable=True,
        note="",
        throughput=interval([one.per_s for one in windows], 0.95),
        rows=2,
        latency=latencies(values),
        failed=failed,
        server=ServerSide(
            requests=10, failed=0, batches=4, rows=20, batch_sizes={"2": 1, "8": 3}, reasons={"full": 3, "delay": 1},
            parts={"queue": 100_000.0, "gather": 5_000.0, "compute": 600_000.0, "scatter": 4_000.0},
        ),
        usage=MachineUsage(machine=1.5, server={"broker": 0.5}, gpus={"GPU 0": 0.25}),
        cost=Cost(processes=1, cores=0.2, busiest=0.2, request_ns=20_000.0),
    )  # fmt: skip


def run(*points: Point) -> SavedRun:
    return SavedRun(
        created="2026-01-01T00:00:00+00:00",
        plan=LoadPlan(model="m"),
        server={"name": "shmserve", "version": "1"},
        machine={"cores": "2", "kernel": "Linux 6.1"},
        points=points,
        echo=EchoResult(protocol="http", per_s=40_000.0, request_ns=10_000.0, p50_ns=500_000.0),
    )


def steady(concurrency: int, per_s: Sequence[int], p50: float = 1e6, failed: int = 0) -> Point:
    """The percentiles of its windows vary by a thousandth."""
    windows = [window(at, good, p50 + at % 2 * 1e3, 2e6 + at % 2 * 1e3) for at, good in enumerate(per_s)]
    return point(ClosedLoop(concurrency), windows, failed=failed)
