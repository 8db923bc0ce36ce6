"""Overload of a real server: answers within the deadline, compared with first-come queueing without deadlines.

The model sleeps 2 ms plus 1 ms per row, in batches of 8, so its capacity hardly depends on the machine, and the
simulator can use the same service times. Other costs (messages, scheduling, late processes) are included in the
capacity measured with 32 requests that are always in flight. Capacity is measured before each turn, because the load
from other processes varies.
"""

from __future__ import annotations

from functools import partial
from statistics import median

from bench.lib import models
from bench.lib.clock import alternate
from bench.lib.setting import Setting, serving
from bench.lib.table import Row
from shmserve.core.policy import BatchPolicy, ModelPolicy, TensorSpec
from shmserve.sim import Affine, Load, Plan, Poisson, first_come, simulate
from shmserve.sim.plan import simple_model
from shmserve.tools.load import plan as load
from shmserve.tools.load.analysis.latencies import count_above
from shmserve.tools.load.measure import measure
from shmserve.tools.load.record import Point

MS = 1_000_000
BATCH = 8
SERVICE = Affine(2 * MS, MS)
DEADLINE_MS = 100
FACTORS = (0.5, 0.8, 1.0, 1.2, 1.5, 2.0)
FLIGHT = 32

WAITS = """\
import select

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        select.select([], [], [], 0.002 + 0.001 * sum(len(x) for x in arrays))
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x)]) for x in arrays]
"""


def overload(setting: Setting) -> list[Row]:
    """A real server at 0.5 to 2 times its capacity: answers within 100 ms, compared with a first-come queue."""
    repository = setting.repository("overload")
    tensors = {"x": ("FP32", [16])}, {"y": ("FP32", [16])}
    models.write(repository, "waits", models.Model("python", *tensors, BATCH, True), {"model.py": WAITS})
    seconds = max(2.0, setting.seconds)
    with serving(repository) as server:
        offered(server.lane, load.ClosedLoop(FLIGHT), 1.0)  # the server learns the duration of a batch
        capacities: list[float] = []
        ways = [(factor, timed) for factor in FACTORS for timed in (True, False)]
        result = alternate(setting.rounds, *(partial(_share, server.lane, capacities, seconds, *way) for way in ways))
    shares = dict(zip(ways, result, strict=True))
    return [_row(factor, capacities, shares[factor, True], shares[factor, False], seconds) for factor in FACTORS]


def _share(url: str, capacities: list[float], seconds: float, factor: float, timed: bool) -> float:
    """Goodput as a share of the capacity measured just before."""
    capacities.append(offered(url, load.ClosedLoop(FLIGHT), seconds / 2).throughput.mean)
    point = offered(url, load.OpenLoop(factor * capacities[-1], seed=len(capacities)), seconds, timed)
    late = count_above(point.latency.histogram, DEADLINE_MS * MS)
    return point.throughput.mean * (1 - late / max(1, point.latency.count)) / capacities[-1]


def offered(url: str, offer: load.Load, seconds: float, timed: bool = False) -> Point:
    """Two windows of a load, from its first request on. `timed`: requests have the deadline."""
    windows = load.MeasureSettings(
        warmup_ns=1, window_ns=round(seconds / 2 * 1e9), min_windows=2, max_windows=2, min_responses=1
    )
    deadline = DEADLINE_MS * MS if timed else 0
    endpoint = load.Endpoint(url=url)
    run = measure(
        load.LoadPlan(model="waits", endpoint=endpoint, loads=(offer,), deadline_ns=deadline, settings=windows)
    )
    (point,) = run.points
    faults = [text for text in point.errors if not text.startswith("DEADLINE_EXCEEDED")]
    if faults:
        raise RuntimeError(f"requests failed that should not: {faults[:3]}")
    return point


def _row(factor: float, capacities: list[float], ours: list[float], plain: list[float], seconds: float) -> Row:
    predicted = simulated(factor, seconds)
    beside = (
        f"{min(ours):.2f} to {max(ours):.2f}; first come first served {median(plain):.2f} ({min(plain):.2f} to "
        f"{max(plain):.2f}); simulated {predicted[0]:.2f} and {predicted[1]:.2f}; capacity {min(capacities):,.0f} to "
        f"{max(capacities):,.0f}/s"
    )
    bound = 0.9 if factor > 1 else None
    return Row(f"goodput at {factor:g} x capacity", median(ours), "of capacity", at_least=bound, beside=beside)


def simulated(factor: float, seconds: float) -> tuple[float, float]:
    """Simulated goodput of the core and of a first-come queue, as shares of the capacity."""
    tensors = (TensorSpec("x", "FP32", (16,)),), (TensorSpec("y", "FP32", (16,)),)
    capacity = BATCH * 1e9 / (2 * MS + BATCH * MS)
    offer = Load("m", Poisson(capacity * factor), timeout_ns=DEADLINE_MS * MS)
    plan = Plan((simple_model(ModelPolicy("m", 1, BATCH, *tensors, BatchPolicy()), 1, SERVICE),), (offer,), seconds)
    ours, plain = simulate(plan).models["m"], first_come(offer, SERVICE, BATCH, 1, seconds, plan.seed)
    return ours.goodput / capacity, plain.goodput / capacity
