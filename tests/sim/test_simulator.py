"""The simulator compared with independent results: formulas of queueing theory, conservation laws, a plain queue."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from shmserve.core.limits import Limits
from shmserve.core.policy import PaddingPolicy, StepPolicy
from shmserve.errors import InvalidRequest, Unavailable
from shmserve.sim import (
    Affine,
    Closed,
    Constant,
    Faults,
    Load,
    Plan,
    Poisson,
    Regular,
    Replay,
    Result,
    SimModel,
    first_come,
    simulate,
)
from shmserve.sim.plan import simple_model
from shmserve.sim.results import Histogram
from shmserve.sim.service import PerElement
from tests.sim.plans import MS, calling, policy, served, some_plan, tensor
from tests.support.cases import cases
from tests.support.hypothesis_profiles import examples

SEEDS = int(os.environ.get("SHMSERVE_SIM_SEEDS", "20"))


def at_once(*parts: object, **given: object) -> Plan:
    """A plan in which messages and turns take no time."""
    made: Plan = Plan(*parts, **given)  # type: ignore[arg-type]
    return replace(made, link_ns=0, turn_ns=0, message_ns=0)


def accounted(result: Result) -> None:
    assert result.lost == 0
    for model in result.models.values():
        assert model.sent == model.answered + sum(model.failed.values()) + model.abandoned, model.name


@pytest.mark.parametrize("load", [0.3, 0.5])
def test_waiting_times_of_the_simulator_match_the_m_d_1_formula(load: float) -> None:
    """M/D/1: the mean wait is load * D / (2 * (1 - load))."""
    single = served(policy(max_batch=1), 1, Constant(MS))
    result = simulate(at_once((single,), (Load("m", Poisson(1000 * load)),), requests=15_000, seed=3))
    model = result.models["m"]
    assert model.answered == 15_000
    wait = model.latency.mean - MS
    assert wait == pytest.approx(load * MS / (2 * (1 - load)), rel=0.05)
    assert model.utilization == pytest.approx(load, rel=0.03)


@pytest.mark.parametrize(("instances", "batch"), [(1, 1), (3, 1), (1, 8)])
def test_without_deadlines_the_simulator_equals_a_plain_queue(instances: int, batch: int) -> None:
    """Exact to the nanosecond if batches do not wait at workers: a batch is formed when an instance is idle."""
    known = policy(max_batch=batch)
    service = Affine(2 * MS, MS // 2)
    load = Load("m", Poisson(300.0 * instances * (3 if batch > 1 else 1)), rows=(1, min(batch, 2)))
    result = simulate(at_once((served(known, instances, service),), (load,), seconds=2.0, seed=7))
    plain = first_come(load, service, batch, instances, 2.0, 7)
    model = result.models["m"]
    assert model.sent == plain.sent > 500
    if instances == 1:
        assert (model.latency.counts, model.batches) == (plain.latency.counts, plain.batches)
        assert model.busy_ns == plain.busy_ns
    else:  # with several, a batch may wait at an instance that is not the first to finish
        assert model.latency.mean == pytest.approx(plain.latency.mean, rel=0.2)


def test_closed_loop_callers_obey_littles_law() -> None:
    """Callers = rate * (response time + think time)."""
    single = served(policy(max_batch=1), 2, Constant(4 * MS))
    result = simulate(at_once((single,), (Load("m", Closed(6, 5 * MS)),), seconds=5.0))
    model = result.models["m"]
    rate = model.answered / model.elapsed_s
    assert rate * (model.latency.mean + 5 * MS) / 1e9 == pytest.approx(6, rel=0.01)
    assert model.utilization == pytest.approx(rate * 0.004 / 2, rel=0.01)


def test_messages_and_turns_add_to_the_latency() -> None:
    """Request: a link, a turn, a link. Response: a link, a turn, a link."""
    single = served(policy(max_batch=1), 1, Constant(MS))
    plan = Plan((single,), (Load("m", Replay(((5, 1),))),), link_ns=1000, turn_ns=100, message_ns=10)
    assert simulate(plan).models["m"].latency.mean == MS + 4 * 1000 + 2 * 110


def test_deadlines_keep_the_goodput_at_twice_the_capacity() -> None:
    """Capacity is 800 a second: batches of 8 in 10 ms."""
    service = Affine(2 * MS, MS)
    load = Load("m", Poisson(1600), 8, timeout_ns=100 * MS)
    model = simulate(Plan((served(policy(), 1, service),), (load,), seconds=3.0, seed=2)).models["m"]
    plain = first_come(load, service, 8, 1, 3.0, 2)
    assert model.goodput >= 0.9 * 800
    assert plain.goodput <= 0.2 * 800


def test_results_depend_only_on_the_seed() -> None:
    plan = some_plan(3, 0.1)
    first, again, other = simulate(plan), simulate(plan), simulate(replace(plan, seed=4))
    assert first.as_json() == again.as_json()
    assert first.digest != other.digest


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_request_is_answered_exactly_once_despite_faults(seed: int) -> None:
    """The clients assert that no request is answered twice; the core's `check` runs after every turn."""
    result = simulate(some_plan(seed, 0.25))
    accounted(result)
    wrong = {"INVALID_REQUEST", "INTERNAL", "UNSUPPORTED", "NOT_FOUND", "PROTOCOL"}
    assert not wrong & {code for model in result.models.values() for code in model.failed}, result.log


def test_requests_that_crash_workers_are_isolated() -> None:
    load, faults = Load("m", Poisson(900), 4), Faults(poison_share=0.005)
    plan = Plan((served(policy(), 2),), (load,), seconds=2.0, seed=2, faults=faults, check_every=1)
    model = simulate(plan).models["m"]
    assert model.failed.keys() == {"POISONED"}
    assert model.failed["POISONED"] >= 3
    assert model.answered + model.failed["POISONED"] == model.sent
    assert model.deaths >= model.failed["POISONED"]


def test_a_hanging_worker_is_killed_at_the_execution_limit() -> None:
    single = served(policy(max_batch=1), 1, Constant(MS))
    plan = Plan((single,), (Load("m", Regular(10)),), requests=1, faults=Faults(hang_share=1.0))
    model = simulate(plan).models["m"]
    assert (model.failed, model.deaths) == ({"MODEL_FAILED": 1}, 1)
    assert model.busy_ns == pytest.approx(200 * MS, rel=0.01)


def test_a_model_that_never_becomes_ready_is_reported() -> None:
    late = replace(served(policy()), load=Constant(3600 * 1000 * MS))
    with pytest.raises(Unavailable, match="not ready after 600 s"):
        simulate(Plan((late,), (Load("m", Poisson(1)),), seconds=1.0))


@pytest.mark.parametrize("seed", range(0, SEEDS, 2))
def test_no_request_waits_past_its_deadline(seed: int) -> None:
    plan = some_plan(seed, 0.3, 0)
    loads = tuple(replace(load, timeout_ns=(3 + seed % 20) * MS) for load in plan.loads)
    result = simulate(replace(plan, loads=loads, link_ns=0, turn_ns=0, message_ns=0))
    accounted(result)
    assert all(model.overdue_ns == 0 for model in result.models.values())


def test_the_tokens_that_wait_are_limited() -> None:
    """Prompts of 4 tokens, of which the model computes 25 per second, arrive twice as fast. At most 10 wait or run."""
    known = replace(policy(max_batch=1, decoupled=True), prompt_inputs=("x",), queue_tokens=40)
    load = Load("m", Poisson(50), 1)
    result = simulate(Plan((served(known, 1, Constant(40 * MS)),), (load,), requests=1000, check_every=20))
    accounted(result)
    found = result.models["m"]
    assert found.failed.keys() == {"UNAVAILABLE"}
    assert found.answered > 450, "the model is always busy"
    assert 300 * MS < found.latency.largest <= 405 * MS


def test_an_ensemble_with_a_decoupled_step_sends_many_responses() -> None:
    many = replace(served(policy("many", 4, decoupled=True)), responses=(0, 9))
    steps = StepPolicy("many", 0, (("x", "x"),), (("y", "t"),)), StepPolicy("next", 0, (("x", "t"),), (("y", "y"),))
    models = many, served(policy("next", 4), 2), SimModel(policy("both", 4, steps=steps))
    result = simulate(Plan(models, (Load("both", Poisson(50), window=2),), requests=100, check_every=1))
    accounted(result)
    assert result.models["both"].answered == 100
    assert result.models["both"].parts > 300
    assert result.models["next"].batches


def test_latency_of_a_model_includes_its_calls() -> None:
    """Requests are sent one after the other: each takes its own time plus that of both calls."""
    models = (
        replace(served(policy("m"), 1, Constant(MS)), calls=("n", "k")),
        served(policy("n"), 1, Constant(3 * MS)),
        served(policy("k"), 1, Constant(5 * MS)),
    )
    result = simulate(at_once(models, (Load("m", Regular(50)),), requests=20, check_every=1))
    accounted(result)
    assert result.models["m"].answered == 20
    assert result.models["m"].latency.mean == pytest.approx(9 * MS)
    assert sum(result.models["k"].batches.values()) == 20


@pytest.mark.parametrize("seed", [*range(min(SEEDS, 6)), 234])
def test_no_request_is_lost_with_circular_calls(seed: int) -> None:
    result = simulate(some_plan(seed, 0.3, kind=calling))
    accounted(result)


def test_padded_requests_of_different_lengths_share_batches() -> None:
    """A batch takes 1 ms plus 5 us per element."""
    found = {}
    for padding in (None, PaddingPolicy((("x", (0,)),), batch_cost=200)):
        known = replace(policy(max_batch=32, inputs=(tensor("x", (-1,)),)), padding=padding)
        load = Load("m", Closed(32), lengths=(8, 128))
        plan = Plan((simple_model(known, 1, PerElement(MS, 5000)),), (load,), 1.0, check_every=7)
        found[padding is not None] = simulate(plan).models["m"]
    plain, padded = found[False], found[True]
    assert plain.mean_batch < 1.1
    assert plain.elements == 0
    assert padded.mean_batch > 8
    assert padded.goodput > 2 * plain.goodput
    assert padded.busy_ns == sum(padded.batches.values()) * MS + padded.elements * 5000
    assert 0 < padded.padded_elements < 0.25 * padded.elements


def test_a_cache_answers_repeated_requests() -> None:
    cached = served(policy("m", cached=True), 1, Constant(MS))
    load = Load("m", Regular(100), distinct=10)
    result = simulate(Plan((cached,), (load,), requests=200, limits=Limits(cache_bytes=1 << 20), check_every=1))
    accounted(result)
    assert (result.cache_hits, result.cache_misses) == (190, 10)
    assert sum(result.models["m"].batches.values()) == 10


@cases(
    Plan((served(policy()),), (Load("m", Poisson(1)),)),
    Plan((served(policy()),), (Load("other", Poisson(1)),), seconds=1.0),
    ids=["no end", "no such model"],
)
def test_an_invalid_plan_is_refused(plan: Plan) -> None:
    with pytest.raises(InvalidRequest):
        simulate(plan)


@settings(max_examples=examples(50))
@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=200), st.sampled_from([0.01, 0.5, 0.9, 1.0]))
def test_quantiles_of_the_histogram_match_numpy(times: list[int], share: float) -> None:
    histogram = Histogram()
    for ns in times:
        histogram.add(ns)
    exact = int(np.quantile(np.array(times), share, method="inverted_cdf"))
    assert exact <= histogram.quantile(share) <= exact + exact // 64 + 1
    assert histogram.mean == pytest.approx(np.mean(times))
    assert histogram.largest == max(times)
