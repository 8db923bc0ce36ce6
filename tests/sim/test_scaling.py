"""Simulations of autoscaled versions: enough instances soon, and no oscillation."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from msgspec.structs import replace

from shmserve.core.policy import InstanceSpec, ScaledGroup, ScalingPolicy
from shmserve.sim.load import Closed, Load, Poisson, Replay
from shmserve.sim.plan import MS, Plan, SimModel
from shmserve.sim.results import SECOND, ModelResult
from shmserve.sim.run import simulate
from shmserve.sim.service import Constant, Lognormal, Service
from tests.sim.plans import policy

UP_MS, DOWN_S = 50, 10


def scaled(service: Service, least: int = 1, most: int = 8, start: int = 1, load: Service | None = None) -> SimModel:
    specs = tuple(InstanceSpec(f"m_{index}") for index in range(most))
    scaling = ScalingPolicy((ScaledGroup("m", least, most, specs),), UP_MS * MS, DOWN_S * SECOND)
    known = replace(policy(max_batch=1), execution_limit_ns=None)
    return SimModel(known, specs[:start], service, load or Constant(200 * MS), scaling=scaling)


def steps(*phases: tuple[float, float], seed: int = 1) -> Replay:
    """Random arrivals for consecutive phases (seconds, rate)."""
    random, arrivals, begins = Random(seed), [], 0.0
    for seconds, rate in phases:
        at = begins
        while rate and (at := at + random.expovariate(rate)) < begins + seconds:
            arrivals.append((round(at * SECOND), 1))
        begins += seconds
    return Replay(tuple(arrivals))


def run(model: SimModel, load: Load, seconds: float) -> ModelResult:
    result = simulate(Plan((model,), (load,), seconds=seconds, check_every=20))
    assert not result.lost
    found = result.models["m"]
    assert found.answered == found.sent
    return found


def size_at(found: ModelResult, seconds: float) -> int:
    return [count for at, count in found.sizes if at <= seconds][-1]


def changes_between(found: ModelResult, begin: float, end: float) -> int:
    return sum(begin < at <= end for at, _ in found.sizes)


@pytest.mark.parametrize("seed", range(3))
def test_instances_follow_a_step_of_the_load_up_and_down(seed: int) -> None:
    """A request takes 100 ms: 3 per second need one instance, 35 per second four or more."""
    load = Load("m", steps((60, 3), (120, 35), (180, 3), seed=seed), clients=4)
    found = run(scaled(Lognormal(100 * MS, 0.3)), load, 360)
    assert size_at(found, 60) <= 2
    during = size_at(found, 90)
    assert 4 <= during <= 7
    assert changes_between(found, 90, 180) <= 2, f"it oscillates: {found.sizes}"
    assert size_at(found, 359) <= 2
    after = [count for at, count in found.sizes if at > 185]
    assert after == sorted(after, reverse=True), f"it oscillates: {found.sizes}"


def test_a_steady_load_causes_no_oscillation() -> None:
    """About two instances' worth of work. The number of instances settles, however long the load lasts."""
    found = run(scaled(Lognormal(100 * MS, 0.5), start=4), Load("m", Poisson(18.0), clients=4), 600)
    assert changes_between(found, 200, 600) <= 4, found.sizes
    assert 2 <= size_at(found, 599) <= 5


@pytest.mark.parametrize(
    ("callers", "start", "took_ms", "seconds"), [(1, 6, 200, 200), (3, 6, 200, 200), (1, 3, 2, 40)]
)
def test_closed_loop_callers_get_one_instance_each(callers: int, start: int, took_ms: int, seconds: int) -> None:
    model = scaled(Constant(took_ms * MS), start=start)
    found = run(model, Load("m", Closed(callers), clients=callers), seconds)
    assert size_at(found, seconds - 1) == callers
    assert changes_between(found, 0.6 * seconds, seconds) == 0, found.sizes


def test_slow_loads_add_one_instance_at_a_time_up_to_the_maximum() -> None:
    """Far too much work, and an instance takes 5 s to load: instances are added one at a time, up to the maximum."""
    found = run(
        scaled(Constant(100 * MS), least=2, most=4, start=2, load=Constant(5 * SECOND)),
        Load("m", steps((20, 45.0)), clients=4),
        20,
    )
    sizes = [count for _, count in found.sizes]
    assert (max(sizes), min(sizes)) == (4, 2)
    grown = [at for (at, count), (_, before) in zip(found.sizes[1:], found.sizes, strict=False) if count > before]
    assert all(later - earlier >= 5 for earlier, later in pairwise(grown)), found.sizes


def test_short_bursts_do_not_change_the_number_of_instances() -> None:
    arrivals = tuple((second * SECOND, 1) for second in range(0, 60, 5) for _ in range(6))
    found = run(scaled(Constant(50 * MS)), Load("m", Replay(arrivals), clients=2), 60)
    assert found.sizes == [(0.0, 1)]
