"""Overload of a real server: answers within the deadline, compared with first-come queueing without deadlines.

The model sleeps 2 ms plus 1 ms per row, in batches of 8, so its capacity hardly depends on the machine, and the
simulator can use the same service times. Other costs (messages, scheduling, late processes) are included in the
capacity measured with 32 requests that are always in flight. Capacity is measured before each turn, because the load
from other processes varies.

Invariant: latency counts from the intended time of sending, not the actual one.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from random import Random
from statistics import median
from typing import Any

from bench.lib import models
from bench.lib.child import Answer, Child, Handler
from bench.lib.clock import alternate
from bench.lib.setting import Setting, serving
from bench.lib.table import Row
from shmserve.core.policy import BatchPolicy, ModelPolicy, TensorSpec
from shmserve.sim import Affine, Load, Plan, Poisson, first_come, simulate
from shmserve.sim.plan import simple_model

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
        given = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        select.select([], [], [], 0.002 + 0.001 * sum(len(x) for x in given))
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x)]) for x in given]
"""


def overload(setting: Setting) -> list[Row]:
    """A real server at 0.5 to 2 times its capacity: answers within 100 ms, compared with a first-come queue."""
    repository = setting.repository("overload")
    tensors = {"x": ("FP32", [16])}, {"y": ("FP32", [16])}
    models.write(repository, "waits", models.Model("python", *tensors, BATCH, True), {"model.py": WAITS})
    seconds = max(2.0, setting.seconds)
    with serving(repository) as server, Child("bench.suites.overload:caller", url=server.lane) as caller:
        caller.ask(rate=0.0, seconds=1.0)  # the server learns the duration of a batch
        capacities: list[float] = []
        ways = [(factor, timed) for factor in FACTORS for timed in (True, False)]
        found = alternate(setting.rounds, *(partial(_share, caller, capacities, seconds, *way) for way in ways))
    shares = dict(zip(ways, found, strict=True))
    return [_row(factor, capacities, shares[factor, True], shares[factor, False], seconds) for factor in FACTORS]


def _share(caller: Child, capacities: list[float], seconds: float, factor: float, timed: bool) -> float:
    """Goodput as a share of the capacity measured just before."""
    capacities.append(_answers(caller, rate=0.0, seconds=seconds / 2))
    return _answers(caller, rate=factor * capacities[-1], seconds=seconds, timed=timed) / capacities[-1]


def _answers(caller: Child, **order: Any) -> float:
    found = caller.ask(**order)
    if found["faults"]:
        raise RuntimeError(f"requests failed that should not: {found['faults']}")
    return float(found["per_s"])


def _row(factor: float, capacities: list[float], mine: list[float], plain: list[float], seconds: float) -> Row:
    told = simulated(factor, seconds)
    beside = (
        f"{min(mine):.2f} to {max(mine):.2f}; first come first served {median(plain):.2f} ({min(plain):.2f} to "
        f"{max(plain):.2f}); simulated {told[0]:.2f} and {told[1]:.2f}; capacity {min(capacities):,.0f} to "
        f"{max(capacities):,.0f}/s"
    )
    bound = 0.9 if factor > 1 else None
    return Row(f"goodput at {factor:g} x capacity", median(mine), "of capacity", at_least=bound, beside=beside)


def simulated(factor: float, seconds: float) -> tuple[float, float]:
    """Simulated goodput of the core and of a first-come queue, as shares of the capacity."""
    tensors = (TensorSpec("x", "FP32", (16,)),), (TensorSpec("y", "FP32", (16,)),)
    capacity = BATCH * 1e9 / (2 * MS + BATCH * MS)
    load = Load("m", Poisson(capacity * factor), timeout_ns=DEADLINE_MS * MS)
    plan = Plan((simple_model(ModelPolicy("m", 1, BATCH, *tensors, BatchPolicy()), 1, SERVICE),), (load,), seconds)
    mine, plain = simulate(plan).models["m"], first_come(load, SERVICE, BATCH, 1, seconds, plan.seed)
    return mine.goodput / capacity, plain.goodput / capacity


# ------------------------------------------------------------------------------------------------ the client


def caller(url: str) -> Handler:
    """Order: `rate` requests per second at random times, with deadlines if `timed`; rate 0: always 32 in flight."""
    rounds = Random(20)

    def handle(rate: float, seconds: float, timed: bool = False) -> Answer:
        return asyncio.run(_offer(url, rate, seconds, timed, Random(rounds.random())))

    return handle


async def _offer(url: str, rate: float, seconds: float, timed: bool, draws: Random) -> Answer:
    import numpy as np

    from shmserve import AsyncClient

    async with AsyncClient(url) as client:
        call = partial(client.submit, "waits", {"x": np.ones((1, 16), np.float32)})
        await call()
        offer = _Offer(call, seconds, draws)
        return await (offer.at_random(rate, timed) if rate else offer.full())


class _Offer:
    """One load, from its first request until none is in flight."""

    def __init__(self, call: Any, seconds: float, draws: Random) -> None:
        self._call = call
        self._seconds = seconds
        self._draws = draws
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self._out: set[Any] = set()
        self._counts: Counter[str] = Counter()
        self._faults: list[str] = []

    async def full(self) -> Answer:
        end = self._loop.time() + self._seconds
        for _ in range(FLIGHT):
            self._one(0.0, end, None)
        await self._over.wait()
        return self._answer("answered")

    def _one(self, intended: float, end: float, timeout: float | None) -> None:
        future = self._call(timeout=timeout)
        self._out.add(future)
        future.add_done_callback(partial(self._done, intended, end))

    def _done(self, intended: float, end: float, future: Any) -> None:
        self._out.discard(future)
        now = self._loop.time()
        if future.cancelled():
            self._counts["given up"] += 1
        elif future.exception() is not None:
            code = getattr(future.exception(), "code", "")
            self._counts[code] += 1
            if code != "DEADLINE_EXCEEDED":
                self._faults.append(f"{type(future.exception()).__name__}: {future.exception()}"[:200])
        elif intended:
            self._counts["in time" if now - intended <= DEADLINE_MS / 1e3 else "late"] += 1
        elif now < end:
            self._counts["answered"] += 1
            self._one(intended, end, None)
        if not self._out and now >= end:
            self._over.set()

    async def at_random(self, rate: float, timed: bool) -> Answer:
        start = self._loop.time() + 0.01
        end = start + self._seconds
        self._send(start, end, rate, timed)
        await self._over.wait()
        return self._answer("in time")

    def _send(self, at: float, end: float, rate: float, timed: bool) -> None:
        """Send all requests that are due, then schedule the next, until the end."""
        now = self._loop.time()
        while at <= now and at < end:
            # A request sent late has less time left, whatever the cause of the delay.
            self._one(at, end, max(0.001, at + DEADLINE_MS / 1e3 - now) if timed else None)
            at += self._draws.expovariate(rate)
        if at < end:
            self._loop.call_at(at, self._send, at, end, rate, timed)
        else:
            self._loop.call_at(end + 2 * DEADLINE_MS / 1e3, self._give_up)

    def _give_up(self) -> None:
        """Cancel the requests that are still in flight, since they are late."""
        for future in list(self._out):
            future.cancel()
        if not self._out:
            self._over.set()

    def _answer(self, counted: str) -> Answer:
        return {"per_s": self._counts[counted] / self._seconds, "faults": self._faults[:3], **self._counts}
