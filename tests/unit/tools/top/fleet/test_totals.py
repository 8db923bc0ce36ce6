"""Rows of several servers: expected values are computed by hand."""

from __future__ import annotations

from typing import Any

import pytest

from shmserve.protocol.rates import Row
from shmserve.tools.top.columns import select, sort
from shmserve.tools.top.fleet_poller import ServerSnapshot, times_of
from shmserve.tools.top.fleet_totals import BY_SERVER, FLEET_MODELS, FLEET_TABLES, make_fleet_view
from shmserve.tools.top.plain import fleet_document, fleet_summary, fleet_text, tables_of
from shmserve.tools.top.texts import line_text
from shmserve.tools.top.view import make_view
from tests.support.cases import cases
from tests.support.clients.activity_documents import absent, counters, document, instance, model

NOW = 1000.0
INTERVAL_S = 2.0
FAST, SLOW = 20, 30
"""Buckets of the histogram."""


def served(name: str, count: int, bucket: int, version: str = "1", **more: Any) -> tuple[Any, Any]:
    """A model without requests, and with this many two seconds later."""
    times: dict[str, Any] = {"request_times": {str(bucket): count}} if count else {}
    return model(name, version, counters()), model(name, version, counters(count, **times), **more)


def snapshot(
    name: str, *models: tuple[Any, Any], problem: str = "", asked: float | None = None, **facts: Any
) -> ServerSnapshot:
    before = document(0, *[first for first, _ in models])
    after = document(2, *[second for _, second in models], gpus=facts.pop("gpus", []))
    after["server"] |= facts
    view = make_view(before, after)
    return ServerSnapshot(name, f"http://{name}", view, times_of(view), problem, NOW - 1, asked)


def view_of(*snapshots: ServerSnapshot) -> Any:
    return make_fleet_view(snapshots, NOW, INTERVAL_S)


def row(rows: list[Row], **wanted: Any) -> Row:
    (found,) = [one for one in rows if wanted.items() <= one.items()]
    return found


def test_models_are_summed_and_percentiles_merged() -> None:
    """300 fast requests and 100 slow ones: the median is fast, p99 slow. Their means of p99 would be neither."""
    two = [instance("m_0_0"), instance("m_0_1", state="backoff")]
    view = view_of(
        snapshot("a", served("m", 300, FAST, queued=2)),
        snapshot("b", served("m", 100, SLOW, queued=3, in_flight=1, instances=two)),
    )
    found = row(view.models, model="m")
    assert found["requests_per_s"] == 200
    assert (found["queued"], found["in_flight"]) == (5, 1)
    assert (found["servers"], found["versions"], found["instances"]) == ("2/2", "1", "2/3")
    assert found["p50"] < 2**FAST / 1e9
    assert 2 ** (SLOW - 1) / 1e9 <= found["p99"] <= 2**SLOW / 1e9
    assert found["queue_seconds"] == pytest.approx(0.001)
    assert found["mean_batch"] == 1
    assert found["busy"] == pytest.approx((300 + 100) * 0.003 / 2 / 2)
    assert view.total["requests_per_s"] == 200
    assert (view.total["p50"], view.total["p99"]) == (found["p50"], found["p99"])
    assert [one["server"] for one in sort(BY_SERVER, view.by_server, "requests_per_s")] == ["a", "b"]
    assert row(view.servers, server="b")["p99"] == row(view.by_server, server="b")["p99"]
    slow = counters(100, queue_ns=100 * 9_000_000)
    view = view_of(snapshot("a", served("m", 300, FAST)), snapshot("b", (model("m"), model("m", counted=slow))))
    mean = pytest.approx((300 * 0.001 + 100 * 0.009) / 400)
    assert row(view.models, model="m")["queue_seconds"] == view.total["queue_seconds"] == mean, "weighted by requests"


def test_figures_of_language_models_are_summed() -> None:
    def chat(tokens: int, texts: int) -> tuple[Any, Any]:
        counts = [{"running": texts, "slots": 4, "generated_tokens": count} for count in (0, tokens)]
        first, second = (model("m", language=one) for one in counts)
        return first, second

    view = view_of(snapshot("a", chat(100, 1)), snapshot("b", chat(300, 4), served("other", 1, FAST)))
    found = row(view.models, model="m")
    assert (found["texts"], found["slots"], found["generated_tokens_per_s"]) == (5, 8, 200)
    assert row(view.models, model="other")["generated_tokens_per_s"] is None
    assert "tok/s 200" in line_text(fleet_summary(view, 200)[1])


@cases(
    (["1"], ["1"], "READY", "1", "2/2"),
    (["1", "2"], ["1", "2"], "READY", "1 2", "2/2"),
    (["1"], ["1", "2"], "VERSIONS DIFFER", "1 on 2, 2 on 1", "2/2"),
    ([], ["1"], "READY", "1", "1/1"),
)
def test_versions_of_a_model(there: list[str], here: list[str], state: str, versions: str, servers: str) -> None:
    view = view_of(
        snapshot("a", *[served("m", 0, 0, version) for version in there], served("o", 0, 0)),
        snapshot("b", *[served("m", 0, 0, version) for version in here]),
    )
    found = row(view.models, model="m")
    assert (found["state"], found["versions"], found["servers"]) == (state, versions, servers)


def test_a_model_that_is_not_served_everywhere() -> None:
    broken = served("m", 0, 0, state="UNAVAILABLE", reason="no such file", instances=[])
    view = view_of(snapshot("a", served("m", 10, FAST)), snapshot("b", broken))
    found = row(view.models, model="m")
    assert (found["state"], found["servers"], found["reason"]) == ("PARTLY", "1/2", "b: no such file")
    assert row(view_of(snapshot("b", broken)).models, model="m")["state"] == "UNAVAILABLE"
    degraded = served("m", 10, FAST, degraded=True)
    assert row(view_of(snapshot("a", degraded)).models, model="m")["state"] == "DEGRADED"
    unloaded = view_of(snapshot("a", (absent("m"), absent("m"))))
    assert row(unloaded.models, model="m")["state"] == "not loaded"
    assert row(unloaded.servers, server="a")["models"] == "0/0"


def test_states_of_servers() -> None:
    failed = served("m", 0, 0, state="UNAVAILABLE", reason="no such file", instances=[])
    view = view_of(
        snapshot("ready", served("m", 10, FAST)),
        snapshot("broken", failed, ready=False),
        snapshot("drained", served("m", 10, FAST), ready=False, out_of_service=True),
        snapshot("gone", served("m", 10, FAST), problem="no server at gone"),
        snapshot("slow", served("m", 10, FAST), asked=NOW - 4),
        snapshot("brisk", served("m", 10, FAST), asked=NOW - 0.1),
        ServerSnapshot("never", "http://never", problem="no server at never"),
        ServerSnapshot("new", "http://new", asked=NOW),
    )
    states = {one["server"]: (one["state"], one["reason"]) for one in view.servers}
    assert states == {
        "ready": ("READY", ""), "brisk": ("READY", ""), "broken": ("NOT READY", "m: no such file"),
        "drained": ("DRAINING", ""), "gone": ("UNREACHABLE", "no server at gone"),
        "slow": ("NO ANSWER", "no answer for 4 s"), "never": ("UNREACHABLE", "no server at never"),
        "new": ("CONNECTING", ""),
    }  # fmt: skip
    gone = row(view.servers, server="gone")
    assert (gone["requests_per_s"], gone["release"], gone["answered_seconds"]) == (None, "1.2.3", 1.0)
    assert "gone" not in {one["server"] for one in view.by_server}, "its last numbers are not those of now"
    assert view.total["requests_per_s"] == 4 * 5
    assert view.total["states"] == {
        "READY": 2, "DRAINING": 1, "NOT READY": 1, "NO ANSWER": 1, "UNREACHABLE": 2, "CONNECTING": 1
    }  # fmt: skip
    assert "8 servers   2 READY   1 DRAINING" in line_text(fleet_summary(view, 200)[0])


def test_a_server_with_another_release() -> None:
    view = view_of(*[snapshot(name, served("m", 0, 0), version=name[0]) for name in ("1a", "1b", "2c")])
    assert [one["server"] for one in view.servers if one["release_differs"]] == ["2c"]
    assert "releases differ: 1 on 2, 2 on 1" in line_text(fleet_summary(view, 200)[0])
    odd = view_of(snapshot("a", served("m", 0, 0), version=["\x1b[2J"]), snapshot("b", served("m", 0, 0), version=None))
    assert [one["release"] for one in odd.servers] == ["['\\x1b[2J']", None]
    alike = view_of(snapshot("a", served("m", 0, 0)))
    assert "all 1.2.3" in line_text(fleet_summary(alike, 200)[0])


def test_server_names_remain_distinguishable_in_narrow_tables() -> None:
    """On 80 columns; GPU columns take no space without GPUs."""
    names = ("127.0.0.1:33757", "127.0.0.1:33758")
    view = view_of(*[snapshot(name, served("m", 10, FAST)) for name in names])
    for table in tables_of(None, FLEET_TABLES):
        text = fleet_text(view, [table], "", None, 80)
        assert all(name in text for name in names) is (table is not FLEET_MODELS)
    assert "gpu" not in fleet_text(view, tables_of(None, FLEET_TABLES)[:1], "", None, 300)


def test_text_and_documents() -> None:
    view = view_of(snapshot("a", served("m", 10, FAST)), snapshot("b", served("m", 10, FAST), served("n", 30, FAST)))
    for width in (40, 80, 200, None):
        text = fleet_text(view, tables_of(None, FLEET_TABLES), "", None, width)
        assert all(len(line) <= (width or 1000) for line in text.splitlines())
        assert text.count("\n\n") == len(FLEET_TABLES)
    document = fleet_document(view, tables_of(None, FLEET_TABLES), "", "requests_per_s")
    assert set(document) == {"total", "servers", "models", "by_server", "unknown"}
    assert [one["model"] for one in document["models"]] == ["n", "m"]
    (only,) = fleet_document(view, tables_of("servers", FLEET_TABLES), "b", None)["servers"]
    assert (only["server"], only["url"]) == ("b", "http://b")
    assert select(FLEET_MODELS, view.models, "n")[0]["model"] == "n"
