"""Leases in the simulator: their benefit for a client that sends one request at a time, and their cost for others."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from shmserve.core.limits import Limits
from shmserve.shm import lease_log
from shmserve.sim import Closed, Constant, Faults, Load, Plan, Poisson, Result, SimModel, simulate
from shmserve.sim.processes import sim_lease
from shmserve.sim.processes.clients import LoadSource
from shmserve.sim.results import ModelResult
from shmserve.sim.run import Simulation
from tests.sim.plans import MS, policy, served

US = 1000
LINK, TURN, MESSAGE = 20 * US, 20 * US, 4 * US
"""The costs of a plan without its own."""
WITHOUT = Limits(leases=0)


def both(model: SimModel, *loads: Load, **more: Any) -> tuple[Result, Result]:
    """The results with and without leases."""
    plan = Plan((model,), loads, check_every=50, **more)
    return simulate(plan), simulate(replace(plan, limits=WITHOUT))


def test_lease_logs_have_the_length_of_real_ones() -> None:
    assert sim_lease.RECORDS == lease_log.RECORDS


def test_a_lease_saves_a_single_client_two_messages_and_two_turns() -> None:
    model = served(policy(max_batch=1), 1, Constant(200 * US))
    lent, plain = both(model, Load("m", Closed(1)), requests=2000)
    assert plain.models["m"].latency.quantile(0.5) == pytest.approx(
        200 * US + 4 * LINK + 2 * (TURN + MESSAGE), rel=0.02
    )
    assert lent.models["m"].latency.quantile(0.5) == pytest.approx(200 * US + 2 * LINK, rel=0.02)
    assert lent.models["m"].answered == plain.models["m"].answered == 2000
    assert lent.models["m"].batches == plain.models["m"].batches == {1: 2000}
    assert lent.turns < 100 < 4000 <= plain.turns


@pytest.mark.parametrize(("instances", "batch"), [(1, 1), (2, 1), (2, 8), (3, 4)])
@pytest.mark.parametrize("others", [Poisson(150.0), Closed(1, 40 * MS), Closed(2)], ids=["poisson", "one", "two"])
def test_leases_do_not_slow_down_other_clients(instances: int, batch: int, others: Poisson | Closed) -> None:
    """Others also use the model of the caller with leases, in a second load."""
    model = served(policy(max_batch=batch), instances, Constant(2 * MS))
    loads = Load("m", Closed(1)), Load("m", others, clients=2)
    plan = Plan((model,), loads, seconds=5.0, seed=5, check_every=100)
    _, (caller, lent) = of_each_load(plan)
    _, (caller_without, without) = of_each_load(replace(plan, limits=WITHOUT))
    assert lent.answered >= 0.97 * without.answered
    assert lent.latency.mean <= 1.05 * without.latency.mean + 4 * LINK + 2 * TURN
    assert caller.answered >= 0.97 * caller_without.answered


def of_each_load(plan: Plan) -> tuple[Simulation, list[ModelResult]]:
    """The results of each load, which a simulation otherwise sums."""
    simulation = Simulation(plan)
    simulation.deploy()
    make, found = simulation._make_sources, []  # noqa: SLF001 - results are summed otherwise

    def separately() -> list[LoadSource]:
        sources = make()
        for source in sources:
            source.result = ModelResult(source.load.model)
            found.append(source.result)
        return sources

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulation, "_make_sources", separately)
        simulation.run()
    return simulation, found


@pytest.mark.parametrize("retry", [True, False])
@pytest.mark.parametrize("instances", [1, 2])
def test_no_leased_request_is_lost_when_workers_die_or_hang(retry: bool, instances: int) -> None:
    faults = Faults(death_every_s=0.2, crash_share=0.004, hang_share=0.001, failure_share=0.01, client_every_s=0.5)
    model = served(policy(retry=retry), instances, Constant(MS))
    loads = Load("m", Closed(1)), Load("m", Closed(1, 30 * MS))
    for seed in range(3):
        plan = Plan((model,), loads, seconds=2.0, seed=seed, faults=faults, check_every=1, reload_every_s=0.7)
        result = simulate(plan)
        found = result.models["m"]
        assert result.lost == 0
        assert found.sent == found.answered + sum(found.failed.values()) + found.abandoned
        assert found.failed.keys() <= {"MODEL_FAILED", "UNAVAILABLE"}
        assert found.answered > 500
