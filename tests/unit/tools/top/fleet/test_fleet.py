"""Servers that are read in threads, and rows of several servers, whose expected values are computed by hand."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shmserve.errors import ConnectionLost
from shmserve.protocol.rates import Row
from shmserve.tools.top.columns import select, sort
from shmserve.tools.top.fleet_poller import Poller, Pollers, ServerSnapshot, times_of
from shmserve.tools.top.fleet_totals import BY_SERVER, FLEET_MODELS, FLEET_TABLES, make_fleet_view
from shmserve.tools.top.plain import fleet_document, fleet_text, tables_of
from shmserve.tools.top.view import make_view
from tests.support.cases import cases
from tests.support.clients.activity_documents import absent, counters, document, instance, model
from tests.support.patience import PATIENCE_S
from tests.support.repo.golden import assert_golden
from tests.unit.tools.top.fleet.scripted import Document, ScriptedSource

OFTEN_S = 0.001
NEVER_S = 1e6


def busy(number: int) -> Document:
    """100 requests per second, of 4 ms."""
    return document(2 * number, model("m", counted=counters(200 * number, request_times={"22": 200 * number})))


def failing(number: int) -> Document:
    raise ConnectionLost("no server at b (refused)")


def by_name(fleet: Pollers) -> dict[str, Any]:
    return {snapshot.name: snapshot for snapshot in fleet.snapshots}


class Watched:
    def __init__(self, source: ScriptedSource, interval: float = OFTEN_S) -> None:
        self.seen: list[Any] = []
        self.changed = threading.Condition()
        self.poller = Poller("a", source, lambda: interval, self.note)

    def note(self) -> None:
        with self.changed:
            self.seen.append(self.poller.snapshot)
            self.changed.notify_all()

    def wait_for(self, count: int) -> list[Any]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.seen) >= count, PATIENCE_S)
            return self.seen

    def __enter__(self) -> Watched:
        self.poller.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.poller.close()
        self.poller.join(PATIENCE_S)


def test_a_silent_server_does_not_delay_the_others() -> None:
    """`wait` returns once every server has rates or a problem, as the third read of the first one shows."""
    often = threading.Event()

    def third(number: int) -> Document:
        if number == 3:
            often.set()
        return busy(number)

    silent = ScriptedSource("b", busy, held=True)
    sources = {"a": ScriptedSource("a", third), "b": silent, "c": ScriptedSource("c", failing)}
    with Pollers(sources, OFTEN_S) as fleet:
        assert silent.reading.wait(PATIENCE_S)
        assert often.wait(PATIENCE_S)
        snapshot = by_name(fleet)["a"]
        assert snapshot.settled
        assert (snapshot.view.interval, snapshot.view.models[0]["requests_per_s"]) == (2, 100)
        assert snapshot.times == {("m", 1): {22: 200}}
        assert (snapshot.problem, snapshot.where) == ("", "a")
        found = by_name(fleet)["b"]
        assert (found.view, found.problem) == (None, "")
        assert found.asked is not None, "for how long it has been silent is known"
        silent.release()
        fleet.wait(PATIENCE_S)
        assert by_name(fleet)["b"].view is not None
        assert (by_name(fleet)["c"].view, by_name(fleet)["c"].problem) == (None, "no server at b (refused)")


def test_a_server_that_fails_is_tried_again() -> None:
    """It keeps its last view, and rates restart with the first two answers after the failure."""
    source = ScriptedSource("a", lambda number: failing(number) if number == 3 else busy(number))
    with Watched(source) as watched:
        _, _, broken, back, after = watched.wait_for(5)[:5]
    assert broken.problem == "no server at b (refused)"
    assert (broken.view is None, broken.times) == (False, {})
    assert (back.problem, back.view and back.view.interval) == ("", None), "no rates over the outage"
    assert after.view.interval == 2


@pytest.mark.parametrize("wrong", [{"server": []}, {"models": [{"name": 1}]}, {"time_ns": "now"}, {"gpus": 7}])
def test_an_invalid_response_is_reported_for_its_server(wrong: Document) -> None:
    """The thread continues: another program may listen there temporarily."""

    source = ScriptedSource("a", lambda number: busy(number) | (wrong if number == 2 else {}))
    with Watched(source, NEVER_S) as watched:
        for count, problem in ((1, ""), (2, "its answer cannot be understood"), (3, "")):
            found = watched.wait_for(count)[-1].problem
            assert (found[: len(problem)], bool(found)) == (problem, bool(problem))
            watched.poller.refresh()  # reads at once, not after the interval


@pytest.mark.parametrize("held", [True, False])
def test_closing_the_fleet_ends_its_sources_and_threads(held: bool) -> None:
    before = set(threading.enumerate())
    source = ScriptedSource("a", busy, held)
    with Pollers({"a": source}, NEVER_S):
        assert source.reading.wait(PATIENCE_S)
        (own,) = set(threading.enumerate()) - before
    assert source.closed
    own.join(PATIENCE_S)
    assert not own.is_alive()


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


def chat(tokens: int, texts: int) -> tuple[Any, Any]:
    """A language model that has generated this many tokens in two seconds."""
    counts = [{"running": texts, "slots": 4, "generated_tokens": count} for count in (0, tokens)]
    first, second = (model("m", language=one) for one in counts)
    return first, second


def fleets() -> Iterator[str]:
    """Texts of known fleets, each below its name."""
    m = served("m", 10, FAST)
    failed = served("m", 0, 0, state="UNAVAILABLE", reason="no such file", instances=[])
    states = (
        snapshot("ready", m),
        snapshot("broken", failed, ready=False),
        snapshot("drained", m, ready=False, out_of_service=True),
        snapshot("gone", m, problem="no server at gone"),
        snapshot("slow", m, asked=NOW - 4),
        snapshot("brisk", m, asked=NOW - 0.1),
        ServerSnapshot("never", "http://never", problem="no server at never"),
        ServerSnapshot("new", "http://new", asked=NOW),
    )
    releases = [snapshot(name, m, version=version) for name, version in (("a", "1"), ("b", "1"), ("c", ["\x1b[2J"]))]
    for name, snapshots in (
        ("states of servers", states),
        ("releases that differ", (*releases, snapshot("d", m, version=None))),
        ("language models", (snapshot("a", chat(100, 1)), snapshot("b", chat(300, 4), served("other", 1, FAST)))),
        ("a model that is served by one of two", (snapshot("a", m), snapshot("b", failed))),
        ("a degraded model", (snapshot("a", served("m", 10, FAST, degraded=True)),)),
        ("a model that is not loaded", (snapshot("a", (absent("m"), absent("m"))),)),
    ):
        yield f"== {name}"
        yield from fleet_text(view_of(*snapshots), tables_of(None, FLEET_TABLES), "", None, None).splitlines()


def test_texts_of_known_fleets() -> None:
    """SHMSERVE_REWRITE=1 writes the expected texts."""
    assert_golden(Path(__file__).with_name("fleets.expected"), list(fleets()))


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
    servers = view_of(*[snapshot(name, served("m", 0, 0), version=name[0]) for name in ("1a", "1b", "2c")]).servers
    assert [(one["server"], one["answered_seconds"]) for one in servers if one["release_differs"]] == [("2c", 1.0)]
