"""The experiments: what is simulated, and which numbers are kept. Servers have four GPUs with one instance each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shmserve.core.policy import ModelPolicy, TensorSpec
from shmserve.sim import Constant, Lognormal
from shmserve.sim.plan import simple_model
from shmserve.sim.results import Histogram
from shmserve.sim.service import Service
from shmserve.tools.plan import Autoscale, FleetPlan, FleetResult, Outage, Surge, simulate_fleet
from shmserve.tools.plan.results import merge

Row = dict[str, Any]
MS = 1_000_000
SECOND = 1_000_000_000
GPUS = (100, 1_000, 10_000)
PER_SERVER = 4
SHORT_MS, LONG_MS = 12, 1000
"""Request durations. The long one leaves time for failures with the same number of requests."""


def fleet(gpus: int, load: float, service: Service, mean_ms: float, **more: Any) -> FleetResult:
    tensors = (TensorSpec("x", "FP32", (16,)),), (TensorSpec("y", "FP32", (16,)),)
    model = simple_model(ModelPolicy("m", 1, 1, *tensors), PER_SERVER, service)
    rate = load * gpus * 1000 / mean_ms
    return simulate_fleet(FleetPlan(model=model, servers=gpus // PER_SERVER, rate=rate, fast=True, **more))


def short(gpus: int, load: float, per_gpu: int, **more: Any) -> FleetResult:
    """Runs short requests of varying duration: the mean is 5 % above the median."""
    service = Lognormal(round(SHORT_MS / 1.046 * MS), 0.3)
    return fleet(gpus, load, service, SHORT_MS, requests=per_gpu * gpus, **more)


def numbers(result: FleetResult, **more: Any) -> Row:
    latency = result.latency
    return more | {
        "p50_ms": round(latency.quantile(0.5) / MS, 3),
        "p99_ms": round(latency.quantile(0.99) / MS, 3),
        "in_time": round(result.good / result.sent, 5),
        "use": round(result.utilization, 4),
        "most_use": round(result.busy[-1], 4) if result.busy else None,
        "hits": round(result.hits / result.sent, 4),
    }


def load() -> list[Row]:
    """Policies at several loads, with one balancer that sees all requests in flight."""
    return [
        numbers(short(1000, load, 50, policy=policy), policy=policy, load=load)
        for policy in ("random", "two-choices", "least")
        for load in (0.5, 0.6, 0.7, 0.8, 0.9)
    ]


def size() -> list[Row]:
    """Policies at several fleet sizes. Each GPU gets the same number of requests, so that queues have the same time to
    grow; small fleets are simulated several times."""
    rows = []
    for gpus in GPUS:
        for policy in ("random", "two-choices", "least"):
            latency = Histogram()
            for seed in range(max(1, 1000 // gpus)):
                merge(latency, short(gpus, 0.9, 15, policy=policy, seed=seed).latency)
            p50, p99 = [round(latency.quantile(share) / MS, 3) for share in (0.5, 0.99)]
            rows.append({"gpus": gpus, "policy": policy, "p50_ms": p50, "p99_ms": p99, "requests": latency.count})
    return rows


def reports() -> list[Row]:
    """Twenty balancers that know only the servers' last periodic reports, and what they have sent since."""
    return [
        numbers(
            short(gpus, 0.75, 40, policy=policy, balancers=20, report_ns=every * MS),
            gpus=gpus,
            policy=policy,
            every_ms=every,
        )
        for gpus in GPUS[:2]
        for policy in ("least", "two-choices")
        for every in (1, 5, 20, 50)
    ]


def balancers() -> list[Row]:
    """Balancers that know only the requests that they have sent."""
    return [
        numbers(short(gpus, 0.75, 30, policy="least", balancers=count), gpus=gpus, balancers=count)
        for gpus in GPUS[:2]
        for count in (1, 4, 16, 64, 256)
    ]


def zone() -> list[Row]:
    """One of three zones fails from 4 s to 10 s."""
    rows = []
    for load in (0.6, 0.75):
        for gpus in GPUS:
            result = fleet(
                gpus,
                load,
                Constant(LONG_MS * MS),
                LONG_MS,
                seconds=16.0,
                outages=(Outage(4 * SECOND, 6 * SECOND, 0),),
                detect_ns=SECOND,
                timeout_ns=2 * SECOND,
                windows=32,
            )
            rows.append(numbers(result, gpus=gpus, load=load, failed=result.failed, timeline=timeline(result)))
    return rows


def scaling() -> list[Row]:
    """The load doubles at 20 s, and the autoscaler follows."""
    rows = []
    for start_s in (10, 30, 60):
        scale = Autoscale(25, 75, 0.8, start_ns=start_s * SECOND)
        result = fleet(
            100,
            0.6,
            Constant(LONG_MS * MS),
            LONG_MS,
            seconds=120.0,
            surges=(Surge(2.0, 20 * SECOND),),
            autoscale=scale,
            timeout_ns=2 * SECOND,
            windows=60,
        )
        rows.append(numbers(result, start_s=start_s, failed=result.failed, timeline=timeline(result)))
    return rows


def caches() -> list[Row]:
    """20,000 different requests; each server caches 100 responses, and begins with none."""
    return [
        numbers(
            short(gpus, 0.6, 40, policy=policy, keys=20_000, skew=0.9, cached=100),
            gpus=gpus,
            policy=policy,
        )
        for gpus in GPUS[:2]
        for policy in ("two-choices", "hash", "bounded-hash")
    ]


def timeline(result: FleetResult) -> list[Row]:
    return [
        {
            "at_s": round(window.start_ns / SECOND, 3),
            "in_time": round(window.good / window.sent, 4),
            "p99_ms": round(window.latency.quantile(0.99) / MS, 2),
            "servers": window.servers,
        }
        for window in result.windows
        if window.sent
    ]


EXPERIMENTS: dict[str, Callable[[], list[Row]]] = {
    run.__name__: run for run in (load, size, reports, balancers, zone, scaling, caches)
}
