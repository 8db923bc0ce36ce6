"""Servers that are read in threads: rates, errors, and a server that does not answer."""

from __future__ import annotations

import threading

import pytest

from shmserve.errors import ConnectionLost
from shmserve.tools.top.fleet_poller import Poller, Pollers, ServerSnapshot
from tests.support.clients.activity_documents import counters, document, model
from tests.support.patience import PATIENCE_S
from tests.unit.tools.top.fleet.scripted import Document, ScriptedSource

OFTEN_S = 0.001
NEVER_S = 1e6


def busy(number: int) -> Document:
    """100 requests per second, of 4 ms."""
    return document(2 * number, model("m", counted=counters(200 * number, request_times={"22": 200 * number})))


def failing(number: int) -> Document:
    raise ConnectionLost("no server at b (refused)")


def by_name(fleet: Pollers) -> dict[str, ServerSnapshot]:
    return {snapshot.name: snapshot for snapshot in fleet.snapshots}


class Watched:
    def __init__(self, source: ScriptedSource, interval: float = OFTEN_S) -> None:
        self.seen: list[ServerSnapshot] = []
        self.changed = threading.Condition()
        self.poller = Poller("a", source, lambda: interval, self.note)

    def note(self) -> None:
        with self.changed:
            self.seen.append(self.poller.snapshot)
            self.changed.notify_all()

    def wait_for(self, count: int) -> list[ServerSnapshot]:
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
        assert snapshot.view is not None
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
    assert broken.view is not None
    assert broken.times == {}
    assert (back.problem, back.view and back.view.interval) == ("", None), "no rates over the outage"
    assert after.view is not None
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
