"""The metrics, read by Prometheus's own parser and compared with the core's requests and with the kernel's counters."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families as parsed

from shmserve.broker.admin.queries import METRICS_PERIOD_S, METRICS_SHARE, MetricsPage
from shmserve.broker.observability import metric_definitions
from shmserve.broker.observability.logs import printable
from shmserve.broker.observability.metric_definitions import FAMILIES, RESERVED, Page
from shmserve.broker.observability.metrics import SHOWN_CLIENTS, MetricSettings
from shmserve.core import events
from shmserve.core.limits import Limits
from shmserve.core.owners.activity import SHOWN_CALLERS
from shmserve.protocol.messages import Ask, Options, Return
from shmserve.protocol.roles import ALL_ROLES, FORWARD
from shmserve.shm.arena import Arena
from shmserve.shm.extents import memfd
from tests import ROOT
from tests.support.broker.metrics import MS, Seen, finish, infer, metrics, metrics_text, policy
from tests.support.core.fakes.client import FakeClient
from tests.support.core.policies import scaling_of
from tests.support.core.world import World
from tests.support.hypothesis_profiles import examples

PAGE = ROOT / "docs" / "metrics.md"
MODEL = {"model": "m", "version": "1"}


@settings(max_examples=examples(30))
@given(st.text(), st.text())
def test_any_label_value_is_escaped(client: str, model: str) -> None:
    page = Page()
    page.add("shmserve_client_requests", 1, metric_definitions.labels(("client", "name"), (client, model)))
    text = page.text()
    (sample,) = [sample for metric in parsed(text) for sample in metric.samples]
    assert sample.labels == {"client": printable(client), "name": printable(model)}
    assert len(text.splitlines()) == 3


def test_r11_names_in_metrics() -> None:
    world, names = World(), ['a"} 1\nforged 1', "a\\", "\x1b[2J", "é\u2028模", '",model="b']
    for name in names:
        world.deploy(policy(name))
        world.turn([infer(world.connect(name), 1, name)])
        finish(world)
    seen = metrics(world)
    assert {seen("nv_inference_count", model=printable(name), version="1") for name in names} == {1}
    assert all(line.isprintable() for line in seen.text.split("\n"))


def test_names_of_metrics() -> None:
    names = [family.name for family in FAMILIES]
    assert len(names) == len(set(names))
    assert not set(names) & set(RESERVED)
    assert all(f"`{name}`" in PAGE.read_text() for name in RESERVED)
    for family in FAMILIES:
        assert family.kind in ("counter", "gauge", "histogram", "summary")
        assert re.fullmatch(r"(nv|shmserve|process)_[a-z_]+", family.name)
        assert family.name.startswith("nv_") or (family.kind == "counter") == family.name.endswith("_total")
        assert not re.search(r"[\n\\]", family.help), "it is a line of text"


def test_requests_and_batches() -> None:
    world, arena = World(), Arena(0, memfd.create, limit_bytes=1 << 20)
    block = arena.allocate(5000)
    empty = metrics(world, arena)
    assert (empty("shmserve_ready"), empty("shmserve_held_bytes")) == (1, 0)
    assert not empty.all("nv_inference_count")
    assert 5000 <= empty("shmserve_broker_arena_used_bytes") < 5000 + 64
    assert empty("shmserve_broker_arena_committed_bytes") == empty("shmserve_broker_arena_limit_bytes") == 1 << 20
    del block
    world.deploy(policy())
    client = world.connect("c")
    world.turn([infer(client, 1)])
    world.turn([infer(client, 2, rows=2), infer(client, 3, rows=3)])
    before = metrics(world)
    assert before("nv_inference_pending_request_count", **MODEL) == 2
    assert before("shmserve_requests_in_flight") == 3
    assert not before.all("shmserve_request_duration_seconds_bucket")
    world.now += 3 * MS
    finish(world, took=2 * MS)
    world.now += 5 * MS
    finish(world, took=5 * MS)
    seen = metrics(world)
    counts = {"request_success": 3, "count": 6, "exec_count": 2, "pending_request_count": 0}
    counts |= {"request_duration_us": 3000 + 2 * 8000, "queue_duration_us": 1000 + 2 * 3000}
    counts |= {"compute_infer_duration_us": 2000 + 2 * 5000}
    assert {name: seen(f"nv_inference_{name}", **MODEL) for name in counts} == counts
    assert list(seen.all("nv_inference_request_failure", **MODEL).values()) == [0] * 4
    assert sum(seen.all("shmserve_batches_total", **MODEL).values()) == 2
    expected: dict[str, list[float]] = {
        "shmserve_request_duration_seconds": [0.003, 0.008, 0.008],
        "shmserve_queue_duration_seconds": [0.001, 0.003, 0.003],
        "shmserve_batch_duration_seconds": [0.002, 0.005],
        "shmserve_batch_rows": [1, 5],
    }
    for name, durations in expected.items():
        assert seen(f"{name}_count", **MODEL) == len(durations)
        assert seen(f"{name}_sum", **MODEL) == pytest.approx(sum(durations))
        buckets = {float(dict(labels)["le"]): value for labels, value in seen.all(f"{name}_bucket", **MODEL).items()}
        assert len(buckets) == (5 if name == "shmserve_batch_rows" else 24)
        for edge, count in buckets.items():
            assert count == sum(duration <= edge for duration in durations), (name, edge)


def test_instances_have_one_sample_each_while_generations_change() -> None:
    world = World()
    world.deploy(policy(), instances=2)
    client = world.connect("c")
    world.turn([infer(client, 1), infer(client, 2)])
    world.loads_itself["m"] = False
    instances = next(iter(world.targets["m"].values())).instances
    world.turn([(0, events.Deploy("m", (events.Target(1, 1, instances),)))])
    loading = metrics(world)
    first = MODEL | {"model_instance": "m_0"}
    assert loading("shmserve_instance_state", **first, state="ready") == 1
    assert loading("shmserve_model_state", **MODEL, state="READY") == 1
    for worker in world.workers.values():
        if worker.name.endswith("~"):
            worker.outbox.append(events.Compiled(policy()))
    world.settle()
    finish(world)
    seen = metrics(world)
    assert seen("nv_inference_request_success", **MODEL) == 2
    assert seen("shmserve_model_loads_total", model="m", result="done") == 2
    world.crash(world.worker("m_0~"))
    after = metrics(world)
    assert after("shmserve_instance_restarts_total", **first) == 1
    assert list(after.all("shmserve_instance_state", **first).values()) == [1]
    # Models that an operator has unloaded are left out, so that an alert on UNAVAILABLE means a failure.
    world.deploy(policy("n"))
    world.turn([(0, events.Unload("m"))])
    seen = metrics(world)
    assert not seen.all("shmserve_model_state", model="m")
    assert seen("shmserve_model_state", model="n", version="1", state="READY") == 1


def instances(seen: Seen, *states: str) -> list[float]:
    return [seen("shmserve_model_instances", **MODEL, state=state) for state in states]


def test_lost_and_quarantined_instances_are_counted() -> None:
    world = World(Limits(crashes=2))
    world.deploy(policy(), 2)

    def shapes() -> list[float]:
        return instances(metrics(world), "ready", "lost", "quarantined")

    world.crash(world.worker("m_0"))
    assert shapes() == [1, 1, 0]
    world.turn([infer(world.connect("c"), 1)])
    world.worker("m_1").finish(world.now)
    world.settle()
    world.advance(world.now)
    assert shapes() == [2, 0, 0]
    world.crash(world.worker("m_0"))
    assert shapes() == [1, 0, 1]
    world.advance(world.now + 1000 * MS)
    assert shapes() == [1, 0, 1], "it has a process, and has not answered yet"


def test_a_version_that_is_scaled() -> None:
    world = World(Limits(execution_ns=0))
    world.deploy(policy(most=1))
    with pytest.raises(KeyError):
        metrics(world)("shmserve_model_scale_total", **MODEL, direction="up")
    world.scalings["m"] = scaling_of("m", "1-3", down="2s")
    world.deploy(policy(most=1))
    client = world.connect("c")
    world.turn([infer(client, number) for number in range(1, 9)])
    world.loads_itself["m"] = False
    world.advance(world.now + 1000 * MS)
    seen = metrics(world)
    assert [seen(f"shmserve_model_instances_{end}", **MODEL) for end in ("min", "max")] == [1, 3]
    assert [seen("shmserve_model_scale_total", **MODEL, direction=way) for way in ("up", "down")] == [1, 0]
    assert instances(seen, "loading", "ready") == [1, 1]
    world.turn([(world.worker("m_1").peer, events.Compiled(policy(most=1)))])
    world.finish_all()
    world.advance(world.now + 10_000 * MS)
    seen = metrics(world)
    assert (instances(seen, "ready"), seen("shmserve_model_scale_total", **MODEL, direction="down")) == ([1], 1)


def test_a_version_that_sleeps() -> None:
    world = World(Limits(idle_unload_ns=60_000 * MS))
    world.deploy(policy(), 2)
    assert metrics(world)("shmserve_model_awake", **MODEL) == 1
    world.advance(world.now + 60_000 * MS)
    seen = metrics(world)
    assert seen("shmserve_model_awake", **MODEL) == 0
    assert seen("shmserve_model_state", **MODEL, state="READY") == 1
    assert instances(seen, "asleep") == [2]
    world.loads_itself["m"] = False
    world.turn([infer(world.connect("c"), 1)])
    assert instances(metrics(world), "asleep") == [2], "they are loading"
    world.now += 250 * MS
    world.turn([(worker.peer, events.Compiled(policy())) for worker in world.workers.values()])
    seen = metrics(world)
    assert seen("shmserve_model_awake", **MODEL) == 1
    assert instances(seen, "ready") == [2]
    assert seen("shmserve_model_wakes_total", **MODEL, result="done") == 1
    assert seen("shmserve_model_wake_seconds_sum", **MODEL) == 0.25


def test_memory_held_by_clients() -> None:
    world = World(Limits(client_requests=50))
    world.deploy(policy(), large="y")
    clients = [world.connect(f"c{index}") for index in range(SHOWN_CLIENTS + 5)]
    for index, client in enumerate(clients):
        for number in range(index):
            world.turn([infer(client, number + 1)])
            finish(world)
    seen = metrics(world)
    held = seen.all("shmserve_client_held_bytes")
    assert len(held) == SHOWN_CLIENTS + 1
    shown = {dict(labels)["name"] for labels in held} - {""}
    assert shown == {f"c{index}" for index in range(5, SHOWN_CLIENTS + 5)}
    assert seen("shmserve_client_held_bytes", client=str(clients[9].peer), name="c9") == 9 * 4
    assert seen("shmserve_client_held_bytes", client="other", name="") == (1 + 2 + 3 + 4) * 4
    assert sum(held.values()) == seen("shmserve_held_bytes")
    assert seen("shmserve_clients", plane="lane") == len(clients)
    assert seen("shmserve_segments", owner="worker") == 1
    (arena,) = seen.all("shmserve_instance_arena_bytes").values()
    assert arena == seen("shmserve_segment_bytes", owner="worker") > 0
    client = clients[3]
    world.turn([(client.peer, Return(tuple(client.holds)))])
    assert metrics(world)("shmserve_client_held_bytes", client="other", name="") == (1 + 2 + 4) * 4


def test_the_largest_callers_of_gateways_have_series_without_their_names() -> None:
    world = World()
    world.deploy(policy(most=1))
    gateways = [world.connect(name, roles=ALL_ROLES | FORWARD) for name in ("one", "two")]
    plain = world.connect("names callers, but shares what its user has")

    def sends(client: FakeClient, number: int, payer: str) -> None:
        sent = infer(client, number)
        sent[1].payer = payer
        world.turn([sent])

    for number, client in enumerate((*gateways, plain), 1):
        sends(client, number, "192.0.2.1")
    world.now += 5 * MS
    finish(world)
    seen = metrics(world)
    assert "192.0.2.1" not in seen.text
    names = ("requests_in_flight", "requests_queued", "requests_total", "request_seconds_total")
    assert [seen(f"shmserve_caller_{name}", caller="1") for name in names] == [1, 0, 1, 0.005]
    assert [seen(f"shmserve_caller_{name}", caller="2") for name in names] == [1, 1, 0, 0]
    for number in range(SHOWN_CALLERS + 5):
        sends(gateways[0], 10 + number, f"token {number}")
    assert len(metrics(world).all("shmserve_caller_requests_total")) == SHOWN_CALLERS


SUMMARIES = tuple(
    f"nv_inference_{what}_summary_us"
    for what in ("request", "queue", "compute_input", "compute_infer", "compute_output")
)
FIRST = "nv_inference_first_response_histogram_ms"


def test_summaries_cover_the_last_minute() -> None:
    """Summaries of the last minute, compared with the durations of the simulated requests; sum and count cover all
    time."""
    world = World(Limits(summaries=True))
    world.deploy(policy())
    client = world.connect("c")
    shown = MetricSettings(counter_latencies=False, summary_quantiles=(0.5, 1.0), cpu=False)
    assert "NaN" in metrics_text(world, shown), "nothing was counted"
    off = World()
    off.deploy(policy())
    text = metrics(off).text
    assert not any(name in text for name in (*SUMMARIES, FIRST))
    assert "nv_cpu_utilization" in text
    for number in range(1, 101):
        world.turn([infer(client, number)])
        world.now += number * MS
        finish(world, took=number * MS)
    seen = metrics(world, shown=shown)
    name = "nv_inference_compute_infer_summary_us"
    assert seen(name, **MODEL, quantile="0.5") == pytest.approx(50_000, rel=0.017)
    assert seen(name, **MODEL, quantile="1") == pytest.approx(100_000, rel=0.017)
    assert seen(f"{name}_count", **MODEL) == 100
    assert seen(f"{name}_sum", **MODEL) == 5050 * 1000
    assert seen("nv_inference_request_summary_us", **MODEL, quantile="0.5") == pytest.approx(50_000, rel=0.017)
    assert not seen.all("nv_inference_request_duration_us"), "counters were turned off"
    assert "nv_cpu" not in seen.text
    world.now += 75_000 * MS
    world.turn([])
    later = metrics_text(world, shown)
    assert f'{name}{{model="m",version="1",quantile="0.5"}} NaN' in later
    assert f'{name}_count{{model="m",version="1"}} 100' in later


def test_summaries_of_the_cache() -> None:
    world = World(Limits(summaries=True, cache_bytes=1 << 20))
    world.deploy(policy())
    world.deploy(replace(policy("n"), cached=True))
    world.core.state.cache.clock = itertools.count(0, 1000 * MS).__next__
    client, cached = world.connect("c"), {"model": "n", "version": "1"}
    for number, name in enumerate("mnnnnn", 1):
        world.turn([infer(client, number, name)])
        if number <= 2:
            finish(world)
    seen = metrics(world, shown=MetricSettings(summary_quantiles=(0.5,), cpu=False))
    for name, kept, took in (("hit", 4, 1_000_000), ("miss", 1, 2_000_000)):
        summary = f"nv_cache_{name}_summary_per_model"
        assert seen(f"{summary}_count", **cached) == kept
        assert seen(f"{summary}_sum", **cached) == seen(f"nv_cache_{name}_duration_per_model", **cached) == kept * took
        assert seen(summary, **cached, quantile="0.5") == pytest.approx(took, rel=0.017)
        assert not seen.all(f"{summary}_count", **MODEL)
    assert not seen.all("nv_inference_request_summary_us_count", **cached)


def buckets_of(seen: Seen, name: str, **labels: str) -> dict[float, float]:
    return {float(dict(one)["le"]): count for one, count in seen.all(f"{name}_bucket", **labels).items()}


def test_times_to_the_first_response() -> None:
    """Uses the buckets of the model, or Triton's."""
    world = World(Limits(first_responses=True))
    world.deploy(policy())
    world.deploy(replace(policy("n"), first_response_ms=(4.0, 1.0)))
    client = world.connect("c")
    for number, (name, wait) in enumerate((("m", 100), ("m", 101), ("m", 9000), ("n", 1), ("n", 5)), 1):
        world.turn([infer(client, number, name)])
        world.now += wait * MS
        finish(world)
    seen = metrics(world)
    assert buckets_of(seen, FIRST, **MODEL) == {100: 1, 500: 2, 2000: 2, 5000: 2, math.inf: 3}
    assert (seen(f"{FIRST}_sum", **MODEL), seen(f"{FIRST}_count", **MODEL)) == (9201, 3)
    assert buckets_of(seen, FIRST, model="n") == {1: 1, 4: 1, math.inf: 2}


def test_times_between_responses() -> None:
    """For decoupled models only, with the same switch; cumulative, in power-of-two buckets."""
    world = World(Limits(first_responses=True))
    world.deploy(policy())
    world.deploy(replace(policy("s"), decoupled=True))
    client, worker = world.connect("c"), world.worker("s_0")
    world.turn([client.infer(1, "s", options=Options(window=9))])
    (request,) = worker.streams
    for wait in (1, 2, 40, 700, 20_000):
        worker.part(request)
        world.now += wait * MS
        world.turn(world.heard(worker))
    shown = MetricSettings(histogram_latencies=True)
    seen = metrics(world, shown=shown)
    name = "shmserve_inference_between_responses_histogram_ms"
    buckets = buckets_of(seen, name, model="s", version="1")
    assert min(buckets) == pytest.approx(1.05, rel=0.01)
    assert sorted(buckets)[-2] == pytest.approx(17180, rel=0.01)
    for edge, count in buckets.items():
        assert count == sum(wait <= edge for wait in (2, 40, 700, 20_000)), edge
    assert [seen(f"{name}_{what}", model="s", version="1") for what in ("sum", "count")] == [20_742, 4]
    assert not seen.all(f"{name}_count", **MODEL)
    assert f"{name}_count" not in metrics_text(world, MetricSettings())


def built(took_s: float, limited: bool = True) -> tuple[SimpleNamespace, Callable[[], int]]:
    """A clock on which only building a page takes time, and a query of the page."""
    clock, pages = SimpleNamespace(now=0.0), itertools.count(1)

    def build() -> str:
        clock.now += took_s
        return str(next(pages))

    page = MetricsPage([build], limited, lambda: clock.now)
    return clock, lambda: int(bytes(page.answer(Ask(1, "metrics", "", 0))).strip(b'"'))


def test_a_page_is_fresh_until_the_share_is_used_up() -> None:
    """A page that takes long is kept for longer."""
    clock, ask = built(took_s=0.01)
    few = round(METRICS_SHARE * METRICS_PERIOD_S / 0.01)
    assert [ask() for _ in range(few + 2)] == [*range(1, few + 1), few, few]
    clock.now = METRICS_PERIOD_S
    assert ask() == few + 1
    clock, ask = built(took_s=1.0)
    for now, page in ((0.0, 1), (1.0, 1), (19.9, 1), (1.0 / METRICS_SHARE, 2)):
        clock.now = max(clock.now, now)
        assert ask() == page
    _, ask = built(took_s=1.0, limited=False)
    assert [ask() for _ in range(3)] == [1, 2, 3]
