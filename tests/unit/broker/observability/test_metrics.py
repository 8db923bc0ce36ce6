"""The metrics, read by Prometheus's own parser and compared with the core's requests and with the kernel's counters."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families as parsed

from shmserve.broker.observability import metric_definitions
from shmserve.broker.observability.logs import printable
from shmserve.broker.observability.metric_definitions import FAMILIES, RESERVED, Page
from shmserve.broker.observability.metrics import SHOWN_CLIENTS
from shmserve.core import events
from shmserve.core.limits import Limits
from shmserve.core.owners.activity import SHOWN_CALLERS
from shmserve.protocol.messages import Return
from shmserve.protocol.roles import ALL_ROLES, FORWARD
from shmserve.shm.arena import Arena
from shmserve.shm.extents import memfd
from shmserve.system import procfs
from tests import ROOT
from tests.support.broker.metrics import MS, finish, infer, metrics, policy
from tests.support.core.fakes.client import FakeClient
from tests.support.core.policies import scaling_of
from tests.support.core.world import World
from tests.support.hypothesis_profiles import examples

PAGE = ROOT / "docs" / "metrics.md"


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
        assert not re.search(r"[\n\\|]", family.help), "these stand in a line of text and a row of a table"


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
    assert before("nv_inference_pending_request_count", model="m", version="1") == 2
    assert before("shmserve_requests_in_flight") == 3
    assert not before.all("shmserve_request_duration_seconds_bucket")
    world.now += 3 * MS
    finish(world, took=2 * MS)
    world.now += 5 * MS
    finish(world, took=5 * MS)
    seen = metrics(world)
    model = {"model": "m", "version": "1"}
    counts = {"request_success": 3, "count": 6, "exec_count": 2, "pending_request_count": 0}
    counts |= {"request_duration_us": 3000 + 2 * 8000, "queue_duration_us": 1000 + 2 * 3000}
    counts |= {"compute_infer_duration_us": 2000 + 2 * 5000}
    assert {name: seen(f"nv_inference_{name}", **model) for name in counts} == counts
    assert set(seen.all("nv_inference_request_failure", **model).values()) == {0}
    assert len(seen.all("nv_inference_request_failure", **model)) == 4
    assert sum(seen.all("shmserve_batches_total", **model).values()) == 2
    expected: dict[str, list[float]] = {
        "shmserve_request_duration_seconds": [0.003, 0.008, 0.008],
        "shmserve_queue_duration_seconds": [0.001, 0.003, 0.003],
        "shmserve_batch_duration_seconds": [0.002, 0.005],
        "shmserve_batch_rows": [1, 5],
    }
    for name, durations in expected.items():
        assert seen(f"{name}_count", **model) == len(durations)
        assert seen(f"{name}_sum", **model) == pytest.approx(sum(durations))
        buckets = {float(dict(labels)["le"]): value for labels, value in seen.all(f"{name}_bucket", **model).items()}
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
    assert loading("shmserve_instance_state", model="m", version="1", model_instance="m_0", state="ready") == 1
    assert loading("shmserve_model_state", model="m", version="1", state="READY") == 1
    for worker in world.workers.values():
        if worker.name.endswith("~"):
            worker.outbox.append(events.Compiled(policy()))
    world.settle()
    finish(world)
    seen = metrics(world)
    assert seen("nv_inference_request_success", model="m", version="1") == 2
    assert seen("shmserve_model_loads_total", model="m", result="done") == 2
    world.crash(world.worker("m_0~"))
    after = metrics(world)
    assert after("shmserve_instance_restarts_total", model="m", version="1", model_instance="m_0") == 1
    states = after.all("shmserve_instance_state", model="m", version="1", model_instance="m_0")
    assert list(states.values()) == [1]
    # Models that an operator has unloaded are left out, so that an alert on UNAVAILABLE means a failure.
    world.deploy(policy("n"))
    world.turn([(0, events.Unload("m"))])
    seen = metrics(world)
    assert not seen.all("shmserve_model_state", model="m")
    assert seen("shmserve_model_state", model="n", version="1", state="READY") == 1


def test_lost_and_quarantined_instances_are_counted() -> None:
    world = World(Limits(crashes=2))
    world.deploy(policy(), 2)

    def shapes() -> list[float]:
        seen = metrics(world)
        named = {"model": "m", "version": "1"}
        return [seen("shmserve_model_instances", **named, state=state) for state in ("ready", "lost", "quarantined")]

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
    named = {"model": "m", "version": "1"}
    world.deploy(policy(most=1))
    with pytest.raises(KeyError):
        metrics(world)("shmserve_model_scale_total", **named, direction="up")
    world.scalings["m"] = scaling_of("m", "1-3", down="2s")
    world.deploy(policy(most=1))
    client = world.connect("c")
    world.turn([infer(client, number) for number in range(1, 9)])
    world.loads_itself["m"] = False
    world.advance(world.now + 1000 * MS)
    seen = metrics(world)
    assert [seen(f"shmserve_model_instances_{end}", **named) for end in ("min", "max")] == [1, 3]
    assert [seen("shmserve_model_scale_total", **named, direction=way) for way in ("up", "down")] == [1, 0]
    assert [seen("shmserve_model_instances", **named, state=state) for state in ("loading", "ready")] == [1, 1]
    world.turn([(world.worker("m_1").peer, events.Compiled(policy(most=1)))])
    world.finish_all()
    world.advance(world.now + 10_000 * MS)
    seen = metrics(world)
    assert seen("shmserve_model_instances", **named, state="ready") == 1
    assert seen("shmserve_model_scale_total", **named, direction="down") == 1


def test_a_version_that_sleeps() -> None:
    world = World(Limits(idle_unload_ns=60_000 * MS))
    world.deploy(policy(), 2)
    named = {"model": "m", "version": "1"}
    assert metrics(world)("shmserve_model_awake", **named) == 1
    world.advance(world.now + 60_000 * MS)
    seen = metrics(world)
    assert seen("shmserve_model_awake", **named) == 0
    assert seen("shmserve_model_state", **named, state="READY") == 1
    assert seen("shmserve_model_instances", **named, state="asleep") == 2
    client = world.connect("c")
    world.loads_itself["m"] = False
    world.turn([infer(client, 1)])
    assert metrics(world)("shmserve_model_instances", **named, state="asleep") == 2, "they are loading"
    world.now += 250 * MS
    world.turn([(worker.peer, events.Compiled(policy())) for worker in world.workers.values()])
    seen = metrics(world)
    assert seen("shmserve_model_awake", **named) == 1
    assert seen("shmserve_model_instances", **named, state="ready") == 2
    assert seen("shmserve_model_wakes_total", **named, result="done") == 1
    assert seen("shmserve_model_wake_seconds_sum", **named) == 0.25


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


def test_resource_usage_of_a_process() -> None:
    own = procfs.usage(os.getpid())
    times = os.times()
    assert own.cpu_seconds == pytest.approx(times.user + times.system, abs=0.1)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert own.resident_bytes == pytest.approx(resident, rel=0.05)
    assert procfs.usage(-1) == procfs.NO_USAGE
    assert procfs.descriptors() == len(os.listdir("/proc/self/fd")) - 1
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    assert 0 < own.started <= uptime


def test_the_memory_and_the_cores_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    total, used = procfs.memory()
    assert total == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < used < total
    assert 0 <= procfs.Cores().share() <= 1
    looks = iter([(100, 1000), (100, 1001), (150, 1100), (450, 1200)])
    monkeypatch.setattr(procfs, "_times", lambda: next(looks))
    cores = procfs.Cores()
    assert [cores.share() for _ in range(3)] == [0.0, 0.5, 1.0], "what is too short is not divided by"
