"""The answer to `activity`, compared with what the test made the core do."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import msgspec
import pytest
from msgspec.structs import replace

from shmserve import histogram
from shmserve.broker.admin.activity import SHOWN_CLIENTS, ActivityReport
from shmserve.broker.admin.queries import Control, ControlSettings
from shmserve.broker.admin.report import document
from shmserve.core.events import Compiled, SetTraffic, Unload
from shmserve.core.owners.activity import SHOWN_CALLERS
from shmserve.core.policy import ModelPolicy, TensorSpec
from shmserve.errors import InvalidRequest
from shmserve.protocol.messages import Ask, Fail
from shmserve.protocol.roles import ALL_ROLES, FORWARD, INFER, OBSERVE, OPERATE
from shmserve.system import procfs
from tests.support.broker.metrics import MS, infer, policy
from tests.support.core.policies import step
from tests.support.core.world import World

GPUS = [{"number": 0, "uuid": "GPU-aa11", "utilization": 0.5}]


def control_of(world: World, memory: Iterable[int] = (), strict: bool = True) -> Control:
    catalog = cast("Any", SimpleNamespace(repositories=SimpleNamespace(names=("m", "not loaded"))))
    settings = ControlSettings("test", "1", strict)
    control = Control(
        world.core, catalog, settings, lambda peer: os.getpid(), lambda pid: (1 + len([*memory])) << 20, dict
    )
    state, about = world.core.state, control.about
    report = ActivityReport(
        state, control.index, control.marks, about, lambda: GPUS, lambda pid: 5 * pid, dict, lambda: None
    )
    control.add({"activity": lambda ask: report.answer(ask.body)})
    return control


def ask(control: Control, what: str = "activity", roles: int = OPERATE, since: int = 0, shared: Any = None) -> Any:
    asked = Ask(1, what, body=msgspec.json.encode({"since": since}) if since else b"")
    body = b"".join(message.body for message in control.answer(asked, roles, {} if shared is None else shared))  # type: ignore[union-attr]
    return msgspec.json.decode(body)


def test_models_and_what_their_instances_run() -> None:
    world = World()
    world.deploy(policy())
    client = world.connect("c")
    world.turn([infer(client, 1)])
    world.turn([infer(client, 2, rows=2), infer(client, 3, rows=3)])
    found = ask(control_of(world))
    loaded, absent = found["models"]
    assert (absent["name"], absent["version"], "counters" in absent) == ("not loaded", "", False)
    assert (loaded["queued"], loaded["in_flight"], loaded["max_batch"]) == (2, 1, 8)
    (instance,) = loaded["instances"]
    assert (instance["batch_rows"], instance["waiting_rows"], instance["in_flight"]) == (1, 5, 1)
    assert (instance["memory_bytes"], instance["gpu_memory_bytes"], "last_words" in instance) == (1 << 20, 0, False)
    for waits, took in ((3, 2), (5, 5)):
        world.now += waits * MS
        world.finish_running(took=took * MS)
        world.settle()
    counters = ask(control_of(world))["models"][0]["counters"]
    assert counters == ask(control_of(world))["models"][0]["counters"], "a query changes no statistics"
    expected = {"success": 3, "failed": 0, "rows": 6, "batches": 2, "batch_rows": {"1": 1, "5": 1}}
    expected |= {"request_ns": 19 * MS, "queue_ns": 7 * MS, "batch_ns": 7 * MS}
    assert counters.items() > expected.items()
    assert sum(counters["reasons"].values()) == 2
    times = {int(bucket): count for bucket, count in counters["request_times"].items()}
    assert times == {(3 * MS).bit_length(): 1, (8 * MS).bit_length(): 2}
    assert all(histogram.edge(bucket - 1) < 8 * MS for bucket in times)


def test_models_that_changed_since_a_document_complete_it() -> None:
    """After each change, a caller that gets only changed models knows what one that gets all of them does."""
    world, memory = World(), list[int]()
    for name in ("m", "idle", "other"):
        world.deploy(policy(name))
    client = world.connect("c")
    control = control_of(world, memory=memory)

    def entries(found: Any) -> dict[tuple[str, str], Any]:
        for entry in found["models"]:
            for instance in entry.get("instances", ()):
                del instance["cpu_seconds"], instance["retry_seconds"]  # of the time when it is asked
        return {(entry["name"], entry["version"]): entry for entry in found["models"]}

    def fail() -> None:
        world.turn([infer(client, 2)])
        world.finish(error=("MODEL_FAILED", "no"))

    def unload() -> None:
        world.turn([(0, Unload("other"))])
        world.settle()

    def crash() -> None:
        world.crash(world.worker("m_0"))
        world.settle()

    first = ask(control)
    known, time_ns = entries(first), first["time_ns"]
    changes: list[tuple[Callable[[], Any], set[str] | None]] = [
        (lambda: None, {"m", "idle", "other", "not loaded"}),  # nobody has asked for changes before
        (lambda: None, set()),
        (lambda: world.turn([infer(client, 1)]), {"m"}),
        (lambda: None, {"m"}),  # it runs
        (lambda: world.finish(took=MS), {"m"}),
        (lambda: None, set()),
        (fail, {"m"}),
        (lambda: world.turn([(0, SetTraffic("other", {1: 1}, {"prod": 1}, {}))]), {"other"}),
        (lambda: control.on_disk({world.core.state.ready["idle"].source}), {"m", "idle", "other"}),
        (lambda: memory.append(1), {"m", "idle", "other"}),
        (unload, {"other"}),
        (lambda: world.deploy(policy("new")), {"new"}),
        (lambda: world.deploy(replace(policy("idle"), version=2)), {"idle"}),
        (crash, {"m"}),
        (lambda: None, {"m"}),  # it has a time until it restarts
        (lambda: world.core.state.models.pop("new"), None),  # forgotten: all models again
    ]
    for number, (change, expected) in enumerate(changes):
        change()
        shared: Any = {}
        found = ask(control, since=time_ns, shared=shared)
        assert found.get("changed") == (sorted(expected) if expected is not None else None), number
        time_ns = found["time_ns"]
        names = expected if expected is not None else {name for name, _ in known}
        known = {key: entry for key, entry in known.items() if key[0] not in names} | entries(found)
        assert known == entries(ask(control, shared=shared)), number
    (failed,) = control.answer(Ask(1, "activity", body=b"[]"), OPERATE, {})
    assert isinstance(failed, Fail)
    assert failed.code == InvalidRequest.code


def test_the_first_version_has_the_traffic_of_its_model() -> None:
    world = World()
    for model in (policy(), replace(policy(), version=2), policy("other")):
        world.deploy(model)
    control = control_of(world)
    assert not any("traffic" in entry for entry in ask(control)["models"])
    world.turn([(0, SetTraffic("m", {2: 10}, {"prod": 1, "next": 3}, {3: 5}))])
    found = {(entry["name"], entry["version"]): entry for entry in ask(control)["models"]}
    assert found["m", "1"]["traffic"] == {
        "model": "m", "shares": {"2": 10}, "aliases": {"next": 3, "prod": 1}, "shadow": {"3": 5}, "compared": [],
        "now": {"1": 90.0, "2": 10.0},
    }  # fmt: skip
    assert (found["m", "1"]["share"], found["m", "2"]["share"]) == (90, 10)
    assert [key for key, entry in found.items() if "traffic" in entry] == [("m", "1")]


def test_the_server_and_its_busiest_clients_are_listed() -> None:
    world = World()
    world.deploy(policy())
    clients = [world.connect(f"c{number}") for number in range(SHOWN_CLIENTS + 5)]
    busy = clients[::-1][:3]
    for count, client in enumerate(busy, 1):
        world.turn([infer(client, number) for number in range(1, count + 1)])
    control = control_of(world)
    found = ask(control)
    assert found["gpus"] == GPUS
    server = found["server"]
    assert (server["name"], server["pid"], server["ready"]) == ("test", os.getpid(), True)
    assert 0 < server["cpu_seconds"] <= procfs.usage(os.getpid()).cpu_seconds
    assert 0 <= server["uptime_seconds"] < 1e9
    assert 0 < server["machine_memory_used_bytes"] <= server["machine_memory_bytes"]
    assert server["connections"] == SHOWN_CLIENTS + 5
    assert (server["in_flight"], len(found["clients"])) == (6, SHOWN_CLIENTS)
    assert [(one["name"], one["in_flight"]) for one in found["clients"][:4]] == [
        *((client.name, count) for count, client in reversed(list(enumerate(busy, 1)))),
        (found["clients"][3]["name"], 0),
    ]
    # R8: users are named to operators only.
    assert all(one["user"] for one in found["clients"])
    for roles in (OBSERVE, INFER | OBSERVE):
        assert ask(control, roles=roles)["clients"] == [one | {"user": ""} for one in found["clients"]]


def test_the_cost_is_what_the_broker_has_computed_and_not_what_it_has_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the history would have gaps on a busy machine."""
    control = control_of(World())
    monkeypatch.setattr(time, "monotonic_ns", itertools.count(0, 10**12).__next__)
    assert 0 < ask(control)["took_ns"] < 10**11


def test_the_callers_of_a_gateway_with_the_most_requests_are_listed() -> None:
    world = World()
    world.deploy(policy())
    gateway = world.connect("gateway of 7", roles=ALL_ROLES | FORWARD)
    number = 0
    for count in range(1, SHOWN_CALLERS + 4):
        for _ in range(count):
            number += 1
            sent = infer(gateway, number)
            sent[1].payer = f"token c{count}"
            world.turn([sent])
    refused = infer(gateway, number + 1, model="not loaded")
    refused[1].payer = "token refused"
    world.turn([refused])
    found = ask(control_of(world))["clients"]
    assert found[0]["in_flight"] == number
    assert [(one["number"], one["user"], one["in_flight"], one["queued"]) for one in found[1:]] == [
        (count, f"token c{count}", count, count) for count in range(SHOWN_CALLERS + 3, 3, -1)
    ]


def test_the_steps_of_an_ensemble_are_counted_with_their_failures() -> None:
    world = World()
    world.deploy(policy())
    world.deploy(ModelPolicy("e", 1, 8, (TensorSpec("x", "FP32", (1,)),), (TensorSpec("y", "FP32", (1,)),),
                             steps=(step("m", "x", "middle"), step("m", "middle", "y"))))  # fmt: skip
    client = world.connect("c")
    version = world.core.state.ready["e"]

    def counts() -> list[tuple[int, int, int]]:
        steps = document(version, None, {}, "", ())["graph"]["steps"]
        return [(one["count"], one["failed"], one["infer_ns"]) for one in steps]

    assert counts() == [(0, 0, 0), (0, 0, 0)], "counted from now on"
    for number, errors in ((1, (None, None)), (2, (None, ("MODEL_FAILED", "no")))):
        world.turn([infer(client, number, "e")])
        for error in errors:
            world.finish(took=2 * MS, error=error)
    assert [count[:2] for count in counts()] == [(2, 0), (2, 1)]
    assert counts()[0][2] == 4 * MS


@pytest.mark.parametrize("strict", [True, False])
def test_readiness_of_the_server_waits_only_for_the_first_load_of_a_model(strict: bool) -> None:
    """Otherwise a load balancer would take the server out while a model changes or finishes its requests."""
    world = World()
    control = control_of(world, strict=strict)
    world.deploy(policy(), load=False)
    assert not control.server_ready()
    world.worker("m_0").outbox.append(Compiled(policy()))
    world.settle()
    assert control.server_ready()
    world.deploy(replace(policy(), version=2), load=False)
    client = world.connect("c")
    for events, expected in (
        ([], ["READY", "LOADING"]),
        ([client.infer(1), (0, Unload("m"))], ["UNLOADING", "UNAVAILABLE"]),
    ):
        world.turn(events)
        assert [one.state.name for one in world.core.state.models["m"].versions.values()] == expected
        assert control.server_ready()
    world.finish_running()
    assert control.server_ready()


def test_an_internal_error_in_a_query_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    control = control_of(World())
    control.add({"activity": Mock(side_effect=KeyError("a mistake"))})
    (failed,) = control.answer(Ask(7, "activity"), OPERATE, {})
    assert failed == Fail(7, "INTERNAL", "'activity' failed: internal error; the server's log has the details")
    assert "a mistake" in caplog.text
