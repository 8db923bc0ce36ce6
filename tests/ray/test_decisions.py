"""Decisions of the application: the replica for a request, and the number of replicas. These tests need no cluster."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from shmserve.ray.autoscaling import QueueTimePolicy, between, decide, free_bytes, totals
from tests.support.cases import cases

pytest.importorskip("starlette", reason="Ray is not installed; `make test-fleet` installs it")
pytest.importorskip("ray", reason="Ray is not installed; `make test-fleet` installs it")

from shmserve.errors import DeadlineExceeded
from shmserve.gateway.http.routes import resolve
from shmserve.ray.handle import as_serve_error
from shmserve.ray.ingress import CallTarget, grpc_target, http_target
from shmserve.ray.routing import UNREPORTED_S, Placements, of_sequence
from tests.support.gateway.rpc import infer_request


class Id(NamedTuple):
    unique_id: str


def replica(name: str, room: float = math.inf, awake: tuple[str, ...] = (), **more: Any) -> Any:
    return SimpleNamespace(
        replica_id=Id(name),
        routing_stats={
            "awake": awake,
            "asleep": more.get("asleep", ()),
            "loading": more.get("loading", ()),
            "room": room,
        },
        multiplexed_model_ids=more.get("loaded", awake),
    )


def names(replicas: list[Any]) -> list[str]:
    return [one.replica_id.unique_id for one in replicas]


@pytest.mark.parametrize("kind", [TimeoutError, asyncio.TimeoutError])
def test_a_timeout_is_a_serve_error(kind: type[Exception]) -> None:
    """They are different classes before Python 3.11."""
    assert type(as_serve_error(kind())) is DeadlineExceeded


def test_a_sequence_moves_only_if_its_replica_is_removed() -> None:
    replicas = [replica(name) for name in "abc"]
    sequences = [f"m:{number}" for number in range(300)]
    before = {one: of_sequence(replicas, one).replica_id.unique_id for one in sequences}
    after = {one: of_sequence(replicas[:2], one).replica_id.unique_id for one in sequences}
    assert {one for one in sequences if before[one] != after[one]} == {one for one in sequences if before[one] == "c"}
    assert all(60 < list(before.values()).count(name) < 140 for name in "abc")


@cases(
    (replica("a"), replica("b", 0.0, ("m",)), "b"),  # awake there
    (replica("a"), replica("b", 0.0, loaded=("m",)), "b"),  # loading there
    (replica("a", 20.0), replica("b", 10.0, asleep=("m",), loaded=("m",)), "a"),  # the most free memory
    (replica("a", awake=("x",)), replica("b"), "b"),  # without a budget, the fewest models
)
def test_the_replica_for_a_model(first: Any, second: Any, chosen: str) -> None:
    assert names(Placements().choose([first, second], "m")) == [chosen]


def test_models_requested_together_are_spread_over_replicas() -> None:
    """The second request for a model goes to the same replica."""
    placements, replicas = Placements(), [replica("a", 30.0), replica("b", 20.0), replica("c", 10.0)]
    chosen = [names(placements.choose(replicas, model))[0] for model in ("m1", "m2", "m1", "m3")]
    assert chosen == ["a", "b", "a", "c"]
    replicas[0] = replica("a", 5.0, ("m1",))
    replicas[1] = replica("b", 15.0, ("m2",))
    assert names(placements.choose(replicas, "m4")) == ["b"]


def test_a_report_older_than_a_placement_is_ignored() -> None:
    """This includes a report that arrives later, and one that Ray sends again. A report counts once it shows the
    model."""
    placements = Placements(lambda: 0.0)
    assert names(placements.choose([replica("a", 20.0), replica("b", 30.0)], "m1")) == ["b"]
    before = [replica("a", 20.0), replica("b", 30.0, loaded=("m1",))]
    assert names(placements.choose(before, "m2")) == ["a"]
    now = [replica("a", 20.0), replica("b", 25.0, loading=("m1",), loaded=("m1",))]
    assert names(placements.choose(now, "m3")) == ["b"]


def test_a_placement_that_is_never_reported_expires() -> None:
    now = 0.0
    placements, replicas = Placements(lambda: now), [replica("a", 20.0), replica("b", 30.0)]
    assert names(placements.choose(replicas, "broken")) == ["b"]
    assert names(placements.choose(replicas, "m1")) == ["a"]
    now = UNREPORTED_S + 1.0
    assert names(placements.choose(replicas, "m2")) == ["b"]


def activity(time_s: float, finished: int, queue_s: float, batch_s: float, queued: int = 0) -> dict[str, Any]:
    counters = {"success": finished, "failed": 0, "queue_ns": int(queue_s * 1e9), "batch_ns": int(batch_s * 1e9)}
    entry = {"counters": counters, "queued": queued, "instances": [{}, {}], "ensemble": False}
    ensemble = entry | {"ensemble": True}
    return {"time_ns": int(time_s * 1e9), "models": [entry, ensemble, {"name": "never loaded"}]}


@cases(
    (activity(2.0, 100, 5.0, 1.0), 50.0, 0.5),
    (activity(2.0, 100, 1.0, 1.0, queued=20), 200.0, 0.5),  # 100 a second, so 20 wait for 0.2 s
    (activity(2.0, 0, 0.0, 0.0, queued=3), 1000.0, 0.0),
    (activity(2.0, 0, 0.0, 0.0), 0.0, 0.0),
)
def test_queue_time_and_utilization_between_two_reports(later: dict[str, Any], queue_ms: float, busy: float) -> None:
    measured = between(totals(activity(1.0, 0, 0.0, 0.0)), totals(later))
    assert measured == {"queue_ms": pytest.approx(queue_ms), "busy": pytest.approx(busy)}


@cases(
    (2, [90.0, 30.0], [1.0, 1.0], 3),
    (2, [50.0, 50.0], [1.0, 1.0], 2),
    (2, [1.0, 1.0], [0.3, 0.4], 1),
    (2, [1.0, 1.0], [0.5, 0.4], 2),  # one would be busy for 90 %
    (2, [30.0, 30.0], [0.1, 0.1], 2),  # more than half of the limit
    (1, [0.0], [0.0], 1),
    (3, [], [], 3),
)
def test_the_queue_time_policy_decides_the_number_of_replicas(
    replicas: int, queues: list[float], busy: list[float], wanted: int
) -> None:
    assert decide(replicas, queues, busy, 50.0) == wanted
    metrics = {"queue_ms": dict(enumerate(queues)), "busy": dict(enumerate(busy))}
    context = SimpleNamespace(target_num_replicas=replicas, aggregated_metrics=metrics)
    assert QueueTimePolicy(queue_ms=50.0)(context) == (wanted, {})


def test_free_memory_is_that_of_the_tightest_budget() -> None:
    text = """
shmserve_memory_budget_bytes{place="host"} 100
shmserve_memory_budget_bytes{place="gpu0"} 50
shmserve_model_memory_bytes{model="a",version="1",place="host"} 30
shmserve_model_memory_bytes{model="a",version="1",place="gpu0"} 10
shmserve_model_memory_bytes{model="b",version="1",place="host"} 40
"""
    assert free_bytes(text) == 30.0
    assert free_bytes("") == math.inf


FORM = b'--a\r\nContent-Disposition: form-data; name="model"\r\n\r\nspeech\r\n--a--\r\n'


@cases(
    ("/v2/models/m/infer", {}, b'{"inputs": []}', CallTarget("m")),
    ("/v2/models/m/infer", {"x-sequence-id": "7"}, b"{}", CallTarget("m", "7")),
    ("/v2/models/m/versions/2/infer", {}, b'{"parameters": {"sequence_id": 9}}', CallTarget("m", "9")),
    ("/v2/models/m/infer", {}, b'{"parameters": {"sequence_id": 0}}', CallTarget("m")),
    ("/v2/models/m/infer", {}, b'{"parameters": {"sequence_id": "a', CallTarget("m")),
    ("/v2/models/m/infer", {"inference-header-content-length": "2"}, b'{}"sequence_id"', CallTarget("m")),
    ("/v2/models/m/infer", {"inference-header-content-length": "9" * 5000}, b"{}", CallTarget("m")),
    ("/v2/models/m/infer", {"content-encoding": "gzip"}, b"...", CallTarget("m", opaque=True)),
    ("/v1/chat/completions", {}, b'{"model": "chat"}', CallTarget("chat")),
    ("/v1/audio/transcriptions", {}, FORM, CallTarget("speech")),
    ("/v1/audio/transcriptions", {}, FORM[:-9], CallTarget()),
)
def test_target_of_http_requests(path: str, fields: dict[str, str], body: bytes, target: CallTarget) -> None:
    route: Any = resolve("POST", path)
    assert http_target(route, fields, body) == target


@pytest.mark.parametrize("sequence", [0, 5, "five"])
def test_target_of_grpc_requests(sequence: int | str) -> None:
    x = np.zeros((1, 1), np.float32)
    request = infer_request("m", {"x": ("FP32", x, x.tobytes())}, parameters={"sequence_id": sequence})
    assert grpc_target("ModelInfer", request.SerializeToString()) == CallTarget("m", str(sequence or ""))
