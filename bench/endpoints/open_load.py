"""The tail of latency at 70 % of the load that both servers can carry, over HTTP.

First, the capacity of each server is measured: its rate with many requests in flight. Then both get the same Poisson
arrivals at 70 % of the lower capacity, in turn. A latency counts from when its request was due.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from statistics import median

from bench.endpoints.servers import Serving
from bench.lib.clock import in_turn
from bench.lib.table import Row, micros
from shmserve.tools.load.analysis.latencies import percentile_of
from shmserve.tools.load.measure import measure
from shmserve.tools.load.plan import ClosedLoop, Endpoint, Load, LoadPlan, MeasureSettings, OpenLoop
from shmserve.tools.load.record import Point

OPEN_LOAD = "mlp, p99 at 70 % load"
FLIGHT = 64
SHARE = 0.7
GOAL = 0.8


def compared_tails(model: str, servers: Sequence[Serving], seconds: float, rounds: int) -> Row:
    """The p99 of the first server, relative to that of the second."""

    def at_load(server: Serving, seeds: Iterator[int]) -> Point:
        return _offered(server, model, OpenLoop(rate, seed=next(seeds)), 2 * seconds)

    full = {server.name: partial(_offered, server, model, ClosedLoop(FLIGHT), seconds) for server in servers}
    capacity = {
        name: median(point.throughput.mean for point in points) for name, points in in_turn(rounds, full).items()
    }
    rate = SHARE * min(capacity.values())
    offered = in_turn(rounds, {server.name: partial(at_load, server, count()) for server in servers})
    tails = {name: [_latency_us(point, 99) for point in points] for name, points in offered.items()}
    ours, theirs = (median(tails[server.name]) for server in servers)
    parts = [
        f"{name} p50 {micros(median(_latency_us(point, 50) for point in points))}, "
        f"p99 {micros(median(tails[name]))} ({micros(min(tails[name]))} to {micros(max(tails[name]))}), "
        f"capacity {capacity[name]:,.0f}/s"
        for name, points in offered.items()
    ]
    late = max(point.cost.send_delay_p99_ns for points in offered.values() for point in points) / 1e3
    beside = "; ".join([f"{rate:,.0f}/s", *parts, f"p99 of the delay of sending at most {micros(late)}"])
    return Row(OPEN_LOAD, ours / theirs, "of Triton", at_most=GOAL, beside=beside)


def _latency_us(point: Point, percentile: float) -> float:
    return percentile_of(point.latency.histogram, percentile) / 1e3


def _offered(server: Serving, model: str, load: Load, seconds: float) -> Point:
    window = round(seconds / 2 * 1e9)
    settings = MeasureSettings(warmup_ns=window // 2, window_ns=window, min_windows=2, max_windows=2)
    endpoint = Endpoint(url=f"http://{server.http}")
    (point,) = measure(LoadPlan(model=model, endpoint=endpoint, loads=(load,), settings=settings)).points
    if point.failed:
        raise RuntimeError(f"{point.failed} requests to {server.name} failed: {list(point.errors)[:3]}")
    return point
