"""The simulator: the cost of a million requests, and goodput under overload, with and without the deadline rule.

Costs are processor time of this process; the simulated results do not depend on the machine.
"""

from __future__ import annotations

from time import process_time

from bench.lib.setting import Setting
from bench.lib.table import Row
from shmserve.core.policy import BatchPolicy, ModelPolicy, TensorSpec
from shmserve.sim import Affine, Load, Plan, Poisson, Result, first_come, simulate
from shmserve.sim.plan import simple_model

MS = 1_000_000
SERVICE = Affine(MS, MS // 2)
BATCH = 8
INSTANCES = 64
CAPACITY = BATCH * 1e9 / SERVICE.ns(BATCH, None)  # type: ignore[arg-type]  # deterministic
"""Requests per second of one instance with full batches."""
FACTORS = (0.5, 0.8, 1.0, 1.2, 1.5, 2.0, 3.0)
DEADLINE_MS = 100
SECONDS = 4.0


def plan(instances: int, factor: float, requests: int = 0, seconds: float = 0.0, deadline_ms: int = 0) -> Plan:
    tensors = (TensorSpec("x", "FP32", (16,)),), (TensorSpec("y", "FP32", (16,)),)
    policy = ModelPolicy("m", 1, BATCH, *tensors, BatchPolicy())
    load = Load("m", Poisson(CAPACITY * instances * factor), clients=16, timeout_ns=deadline_ms * MS)
    return Plan((simple_model(policy, instances, SERVICE),), (load,), seconds, requests, seed=1)


def curves(instances: int = 2) -> list[tuple[float, float, float]]:
    """Load, goodput of the core and goodput of a first-come queue, all as shares of the capacity."""
    results = []
    for factor in FACTORS:
        created = plan(instances, factor, seconds=SECONDS, deadline_ms=DEADLINE_MS)
        ours = simulate(created).models["m"]
        plain = first_come(created.loads[0], SERVICE, BATCH, instances, SECONDS, created.seed)
        results.append((factor, ours.goodput / CAPACITY / instances, plain.goodput / CAPACITY / instances))
    return results


def cost(requests: int) -> tuple[float, Result]:
    """Processor time, in seconds, for this many requests on 64 instances at 0.8 of their capacity."""
    begun = process_time()
    result = simulate(plan(INSTANCES, 0.8, requests))
    return process_time() - begun, result


def simulator(setting: Setting) -> list[Row]:
    """A million simulated requests on 64 instances; goodput under simulated overload with deadlines of 100 ms."""
    requests = 1_000_000 if setting.soak_seconds >= 60 else 50_000
    spent, result = cost(requests)
    beside = f"{requests:,} requests, {spent / requests * 1e6:.1f} us each; digest {result.digest}"
    failed = "" if not result.lost else f"{result.lost} lost"
    rows = [
        Row("a million requests simulated", spent * 1e6 / requests, "s", at_most=60.0, beside=beside, failed=failed)
    ]
    for factor, ours, plain in curves():
        bound = 0.9 if factor >= 1 else None
        name = f"simulated goodput at {factor} x capacity"
        rows.append(Row(name, ours, "of capacity", at_least=bound, beside=f"first come first served: {plain:.3f}"))
    return rows
