"""The fleet simulator: its queues compared with the core and with theory, the balancers' information, and the cost of
failures.

All randomness comes from a seed, so no result depends on the machine.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from shmserve.core.policy import BatchPolicy, ModelPolicy, TensorSpec
from shmserve.errors import InvalidRequest
from shmserve.sim import Affine, Constant, Lognormal, SimModel
from shmserve.sim.plan import simple_model
from shmserve.tools.plan import Autoscale, FleetPlan, FleetResult, Outage, Surge, simulate_fleet
from shmserve.tools.plan.balancing import Balancer, Ring
from shmserve.tools.plan.measured import read_measured
from tests import ROOT
from tests.support.cases import cases

MS = 1_000_000
SECOND = 1_000_000_000
NETWORK_NS = 250_000
WRONG: list[Any] = [{}, [], {"points": [{"server": {"batches": 1}}]}]
"""Documents without service times."""
ENGINES = pytest.mark.parametrize("fast", [True, False], ids=["queues", "core"])


def model(instances: int, service: Any, batch: int = 1) -> SimModel:
    tensors = (TensorSpec("x", "FP32", (16,)),), (TensorSpec("y", "FP32", (16,)),)
    policy = ModelPolicy("m", 1, batch, *tensors, BatchPolicy() if batch > 1 else None)
    return simple_model(policy, instances, service)


EIGHT = model(8, Constant(12 * MS))


def plan(**given: Any) -> FleetPlan:
    four = model(4, Constant(10 * MS))
    usual: dict[str, Any] = {"model": four, "servers": 10, "rate": 2800.0, "requests": 2000, "fast": True}
    return FleetPlan(**usual | given)


def accounted(result: FleetResult) -> int:
    return result.answered + sum(result.failed.values())


@cases(
    ({"model": EIGHT, "rate": 53_000.0, "policy": "random"}, 0.02),
    ({"model": model(4, Affine(10 * MS, 2 * MS), 8), "rate": 110_000.0, "policy": "two-choices"}, 0.02),
    ({"model": model(8, Lognormal(12 * MS, 0.5)), "rate": 45_000.0, "policy": "least"}, 0.06),
    ({"model": EIGHT, "rate": 45_000.0, "policy": "bounded-hash", "keys": 20_000, "cached": 500}, 0.06),
    ({"model": EIGHT, "rate": 90_000.0, "policy": "random", "timeout_ns": 60 * MS}, 0.03),
    ids=["single", "batches", "lognormal", "cache", "overload"],
)
def test_queues_have_the_latencies_of_the_core(given: dict[str, Any], p99_within: float) -> None:
    core, queues = [simulate_fleet(plan(servers=100, requests=8000, fast=fast, **given)) for fast in (False, True)]
    assert queues.latency.quantile(0.5) == pytest.approx(core.latency.quantile(0.5), rel=0.03)
    assert queues.latency.quantile(0.99) == pytest.approx(core.latency.quantile(0.99), rel=p99_within)
    assert queues.good == pytest.approx(core.good, rel=0.02)
    assert queues.hits == pytest.approx(core.hits, rel=0.02)


def test_batches_may_end_before_the_broker_has_handled_the_report_of_the_one_before() -> None:
    result = simulate_fleet(plan(model=model(1, Constant(MS // 20)), servers=2, rate=100_000.0, requests=4000))
    assert result.answered == result.sent == 4000


@pytest.mark.parametrize("point", [0, 1], ids=["4/s", "10/s"])
def test_a_plan_has_the_latencies_of_a_real_run(point: int) -> None:
    """`recorded_run.json`: `shmserve bench --rate 4,10 --window 42s --windows 3:3 --save` of a Python model that sleeps
    for 200 ms, plus 50 ms for each row, on a busy machine with two cores; the fields that are used here. The p50 of
    the run is known to 10 %."""
    run = json.loads((ROOT / "tests" / "sim" / "recorded_run.json").read_text())
    measured = read_measured(run)
    real = run["points"][point]
    found = simulate_fleet(
        plan(model=model(1, measured.service, measured.max_batch), servers=1, rate=real["load"]["rate"], requests=5000,
             network_ns=20_000)
    ).latency  # fmt: skip
    percentiles = real["latency"]["percentiles"]
    high = "p99" if "p99" in percentiles else "p95"
    assert found.quantile(0.5) == pytest.approx(percentiles["p50"], rel=0.15)
    assert found.quantile(float(high[1:]) / 100) == pytest.approx(percentiles[high], rel=0.25)


@ENGINES
def test_same_seed_same_result(fast: bool) -> None:
    given = {"fast": fast, "mtbf_s": 2.0, "repair_ns": 100 * MS, "detect_ns": 50 * MS, "requests": 1500}
    one, two, other = [simulate_fleet(plan(seed=seed, **given)).as_json(1.0) for seed in (1, 1, 2)]
    assert one == two
    assert one != other


def balancers(policy: str, servers: int, **given: Any) -> tuple[Balancer, Ring]:
    ring = Ring()
    balancer = Balancer(plan(policy=policy, keys=100, **given), 0, ring)
    for server in range(servers):
        ring.add(server, server)
        balancer.add(server)
    return balancer, ring


def test_the_least_policy_chooses_the_least_loaded_server() -> None:
    balancer, _ = balancers("least", 20)
    random = Random(1)
    for _ in range(3000):
        found = balancer.choose(-1)
        assert balancer.load[found] == min(balancer.load)
        balancer.count(found, 1)
        if random.random() < 0.9:
            loaded = random.choice([server for server in range(20) if balancer.load[server]])
            balancer.count(loaded, -1)
    balancer.remove(7)
    assert 7 not in {balancer.choose(-1) for _ in range(500)}


def test_hashing_moves_only_the_keys_of_a_removed_server() -> None:
    balancer, ring = balancers("hash", 20)
    before = {key: balancer.choose(key) for key in range(4000)}
    counts = [list(before.values()).count(server) for server in range(20)]
    assert 100 < min(counts) <= max(counts) < 320
    balancer.remove(3)
    ring.remove(3)
    after = {key: balancer.choose(key) for key in range(4000)}
    assert all(after[key] == server for key, server in before.items() if server != 3)
    assert len({after[key] for key, server in before.items() if server == 3}) > 10
    ring.add(20, 3)  # it returns as a new server with the same name
    balancer.add(20)
    assert all(balancer.choose(key) == (20 if server == 3 else server) for key, server in before.items())


def test_bounded_hashing_keeps_the_load_within_its_bound() -> None:
    balancer, _ = balancers("bounded-hash", 20, bound=1.5)
    for number in range(1000):
        found = balancer.choose(number % 3)  # three keys for 20 servers
        balancer.count(found, 1)
        assert max(balancer.load) <= 1.5 * (number + 1) / 20 + 1


def test_a_retry_goes_to_another_server() -> None:
    for policy in ("random", "round-robin", "least", "hash", "bounded-hash"):
        balancer, _ = balancers(policy, 20)
        for key in range(200):
            first = balancer.choose(key)
            assert balancer.choose(key, first) != first, policy
    alone, _ = balancers("least", 1)
    assert alone.choose(0, 0) == 0


def test_outdated_reports_cause_herding() -> None:
    """Balancers with the same outdated report send to the same servers; two random choices avoid that."""
    given = {"servers": 100, "rate": 26_000.0, "balancers": 20, "report_ns": 50 * MS, "requests": 15_000}
    p99 = {name: simulate_fleet(plan(policy=name, **given)).latency.quantile(0.99) for name in ("least", "two-choices")}
    fresh = simulate_fleet(plan(policy="least", **given | {"balancers": 1, "report_ns": 0}))
    assert p99["least"] > 1.3 * p99["two-choices"] > 1.3 * fresh.latency.quantile(0.99)


def test_key_affinity_increases_cache_hits() -> None:
    """A key's responses are cached on one server instead of on all."""
    given = {"keys": 5000, "cached": 300, "requests": 20_000, "rate": 2000.0}
    hits = {name: simulate_fleet(plan(policy=name, **given)).hits for name in ("hash", "bounded-hash", "random")}
    assert hits["hash"] > 1.4 * hits["random"]
    assert hits["hash"] > hits["bounded-hash"] > 1.2 * hits["random"]


ZONE = Outage(200 * MS, 300 * MS, zone=1)


@ENGINES
def test_requests_avoid_a_failed_zone_after_detection(fast: bool) -> None:
    """Requests in the zone are lost. Later requests to it are redirected, until balancers exclude the zone."""
    given = {"outages": (ZONE,), "detect_ns": 100 * MS, "connect_ns": 20 * MS, "rate": 2000.0, "fast": fast}
    result = simulate_fleet(plan(**given))
    assert accounted(result) == result.sent == 2000
    assert set(result.failed) <= {"LOST", "UNREACHABLE"}
    assert 0 < result.failed["LOST"] < 60
    assert result.retried > 20
    assert [window.servers for window in result.windows if window.start_ns in (0, 400 * MS, 600 * MS)] == [10, 7, 10]
    assert result.recovered_s is not None
    assert 0 < result.recovered_s < 0.45
    again = simulate_fleet(plan(**given, retry_lost=True))
    assert again.failed.get("LOST", 0) == 0
    assert again.good > result.good


def test_requests_fail_while_all_servers_are_down() -> None:
    result = simulate_fleet(plan(outages=(Outage(100 * MS, servers=10),), detect_ns=50 * MS, connect_ns=10 * MS))
    assert accounted(result) == result.sent
    assert result.failed["UNREACHABLE"] > 1000
    assert result.recovered_s is None


def test_retries_hide_continual_server_failures() -> None:
    given = {"mtbf_s": 0.5, "repair_ns": 80 * MS, "detect_ns": 30 * MS, "connect_ns": 5 * MS, "requests": 5000}
    result = simulate_fleet(plan(**given, retry_lost=True, retries=8))
    assert accounted(result) == result.sent
    assert result.retried > 50
    assert result.answered > 0.99 * result.sent


def test_the_autoscaler_reacts_after_its_delays() -> None:
    """The load doubles at 1 s. The next decision adds servers, which are ready after `start`. When the load halves
    again, they stay for `down`."""
    scale = Autoscale(10, 40, 1.0, every_ns=200 * MS, start_ns=1000 * MS, down_ns=1500 * MS)
    surge = Surge(2.5, 1000 * MS, 1500 * MS)
    result = simulate_fleet(plan(requests=0, seconds=8.0, surges=(surge,), autoscale=scale, windows=40))
    servers = [window.servers for window in result.windows]
    assert servers[:10] == [10] * 10  # until 2 s: a decision at 1.2 s, and a second to start
    assert result.most_servers > 17
    assert servers[15] > 17
    assert servers[-1] < result.most_servers
    assert accounted(result) == result.sent
    fixed = simulate_fleet(plan(requests=0, seconds=8.0, surges=(surge,)))
    assert fixed.instance_ns == 10 * 4 * 8 * SECOND
    assert fixed.instance_ns < result.instance_ns < 40 * 4 * 8 * SECOND
    assert result.latency.quantile(0.99) < fixed.latency.quantile(0.99)


def test_invalid_plans_are_refused() -> None:
    for given, text in (
        ({"policy": "hash"}, "needs keys"),
        ({"policy": "best"}, "not a policy"),
        ({"requests": 0}, "needs an end"),
        ({"outages": (Outage(1, zone=3),)}, "zone 3 fails"),
        ({"autoscale": Autoscale(20, 30)}, "not within 20 to 30"),
    ):
        with pytest.raises(InvalidRequest, match=text):
            simulate_fleet(plan(**given))


def batch(size: int, count: int, infer_ns: int) -> dict[str, Any]:
    parts = {"compute_input": 1000 * count, "compute_infer": infer_ns * count, "compute_output": 1000 * count}
    return {"batch_size": size, **{name: {"count": count, "ns": ns} for name, ns in parts.items()}}


def test_service_times_are_read_from_statistics() -> None:
    entry = {"name": "mlp", "version": "1", "batch_stats": [batch(1, 10, 5 * MS), batch(8, 3, 9 * MS)]}
    found = read_measured({"model_stats": [entry, entry | {"name": "cnn", "batch_stats": []}]}, "mlp")
    assert found.service.entries == ((1, 5 * MS + 2000.0), (8, 9 * MS + 2000.0))
    assert found.max_batch == 8
    with pytest.raises(InvalidRequest, match="the models are cnn, mlp"):
        read_measured({"model_stats": [entry, entry | {"name": "cnn"}]})
    with pytest.raises(InvalidRequest, match="send requests first"):
        read_measured({"model_stats": [entry | {"batch_stats": []}]})


def test_service_times_are_read_from_reports() -> None:
    parts = {"queue": 9e6, "gather": 1e5, "compute": 5e6, "scatter": 2e5}
    server = {"requests": 40, "failed": 0, "batches": 10, "rows": 40, "parts": parts}
    run = read_measured({"points": [{"server": server}, {"server": None}]})
    assert run.service.entries == ((4, 5.3e6),)
    assert run.max_batch == 4  # at least: the run does not say how large its batches were
    sized = server | {"batch_sizes": {"1": 8, "16": 2}}  # the mean is 4, but most rows are in batches of 16
    sizes = read_measured({"points": [{"server": sized}, {"server": server}]})
    assert (sizes.service.entries, sizes.max_batch) == (((4, 5.3e6), (13, 5.3e6)), 16)
    chosen = {"instances": 2, "threads": 0, "batch": 8, "delay_us": 500, "multiple": 0, "batch_cost": 0}
    times = [(2, 1.0, 4.0), (2, 8.0, 6.0), (1, 1.0, 3.0)]
    samples = [
        {"instances": count, "threads": None, "rows": rows, "length": 1, "measured_ms": ms} for count, rows, ms in times
    ]
    tuned = read_measured({"model": "mlp", "chosen": chosen, "present": chosen, "service_times": samples})
    assert (tuned.instances, tuned.max_batch, tuned.delay_ns) == (2, 8, 500_000)
    assert tuned.service.entries == ((1, 4e6), (8, 6e6))
    for wrong in WRONG:
        with pytest.raises(InvalidRequest):
            read_measured(wrong)
