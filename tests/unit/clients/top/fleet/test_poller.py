"""Servers that are read in threads: rates, errors, and a server that does not answer."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from shmserve.clients.top.fleet.poller import Fleet, Snapshot
from shmserve.errors import ConnectionLost
from tests.support.clients.activity_documents import counters, document, model
from tests.unit.clients.top.fleet.scripted import PATIENCE_S, Document, ScriptedSource

OFTEN_S = 0.001
NEVER_S = 1e6


def busy(number: int) -> Document:
    """100 requests per second, of 4 ms."""
    return document(2 * number, model("m", counted=counters(200 * number, request_times={"22": 200 * number})))


def failing(number: int) -> Document:
    raise ConnectionLost("no server at b (refused)")


def await_(fleet: Fleet, holds: Callable[[], bool]) -> None:
    with fleet._news:
        assert fleet._news.wait_for(holds, PATIENCE_S)


def by_name(fleet: Fleet) -> dict[str, Snapshot]:
    return {snapshot.name: snapshot for snapshot in fleet.snapshots}


def test_rates_and_histograms_of_an_interval() -> None:
    with Fleet({"a": ScriptedSource("http://a", busy)}, OFTEN_S) as fleet:
        fleet.wait(PATIENCE_S)
        snapshot = by_name(fleet)["a"]
    assert snapshot.view is not None
    assert snapshot.view.interval == 2
    assert snapshot.view.models[0]["requests_per_s"] == 100
    assert snapshot.times == {("m", "1"): {22: 200}}
    assert (snapshot.problem, snapshot.where) == ("", "http://a")


def test_a_silent_server_does_not_delay_the_others() -> None:
    silent = ScriptedSource("b", busy, held=True)
    with Fleet({"a": ScriptedSource("a", busy), "b": silent}, OFTEN_S) as fleet:
        assert silent.reading.wait(PATIENCE_S)
        await_(fleet, lambda: by_name(fleet)["a"].settled)
        found = by_name(fleet)["b"]
        assert (found.view, found.problem) == (None, "")
        assert found.asked is not None, "for how long it has been silent is known"
        silent.release()
        await_(fleet, lambda: by_name(fleet)["b"].settled)
        assert by_name(fleet)["b"].view is not None


def test_a_server_that_fails_is_tried_again() -> None:
    """It keeps its last view, and rates restart with the first two answers after the failure."""

    def sometimes(number: int) -> Document:
        return failing(number) if number == 3 else busy(number)

    source = ScriptedSource("a", sometimes, held=True)
    seen: list[Snapshot] = []
    with Fleet({"a": source}, OFTEN_S) as fleet:
        poller = fleet._pollers[0]
        told = poller._notify

        def note() -> None:
            seen.append(poller.snapshot)
            told()

        poller._notify = note
        source.release()
        await_(fleet, lambda: len(seen) >= 5)
    first = next(place for place, snapshot in enumerate(seen) if snapshot.problem)
    broken, back, after = seen[first : first + 3]
    assert broken.problem == "no server at b (refused)"
    assert broken.view is not None
    assert broken.times == {}
    assert (back.problem, back.view and back.view.interval) == ("", None), "no rates over the outage"
    assert after.view is not None
    assert after.view.interval == 2


@pytest.mark.parametrize("wrong", [{"server": []}, {"models": [{"name": 1}]}, {"time_ns": "now"}, {"gpus": 7}])
def test_an_invalid_response_is_reported_for_its_server(wrong: Document) -> None:
    """The thread continues: another program may listen there temporarily."""

    def odd(number: int) -> Document:
        return busy(number) | (wrong if number == 2 else {})

    source = ScriptedSource("a", odd)
    with Fleet({"a": source}, NEVER_S) as fleet:
        await_(fleet, lambda: source.reads == 1)
        fleet.refresh()
        await_(fleet, lambda: "its answer cannot be understood" in by_name(fleet)["a"].problem)
        fleet.refresh()
        await_(fleet, lambda: not by_name(fleet)["a"].problem)


def test_wait_returns_once_every_server_has_answered_or_failed() -> None:
    with Fleet({"a": ScriptedSource("a", busy), "b": ScriptedSource("b", failing)}, OFTEN_S) as fleet:
        fleet.wait(PATIENCE_S)
        assert by_name(fleet)["b"].problem == "no server at b (refused)"
        assert by_name(fleet)["b"].view is None


def test_refresh_reads_at_once() -> None:
    source = ScriptedSource("a", failing)
    with Fleet({"a": source}, NEVER_S) as fleet:
        await_(fleet, lambda: source.reads == 1)
        for count in (2, 3):
            fleet.refresh()
            await_(fleet, lambda count=count: source.reads >= count)  # type: ignore[misc]


@pytest.mark.parametrize("held", [True, False])
def test_closing_the_fleet_ends_its_sources_and_threads(held: bool) -> None:
    before = set(threading.enumerate())
    source = ScriptedSource("a", busy, held)
    with Fleet({"a": source}, NEVER_S):
        assert source.reading.wait(PATIENCE_S)
        (own,) = set(threading.enumerate()) - before
    assert source.closed
    own.join(PATIENCE_S)
    assert not own.is_alive()
