"""The event stream of the page, with a clock, a broker and connections that the test controls."""

from __future__ import annotations

import json
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from shmserve.errors import Unavailable
from shmserve.gateway.limits.turns import JobTurns
from shmserve.gateway.page.feed import BROKER_SHARE, CALLER_VIEWERS, PERIOD_S, SLICE, STALLED, VIEWERS, PageFeed, Viewer
from tests.support.gateway.manual_loop import ManualLoop

Event = tuple[str, dict[str, Any]]


class Broker:
    """Answers the queries of the feed, or keeps them in `tickets`."""

    def __init__(self) -> None:
        self.clock = ManualLoop()
        self.clock.advance(100.0)
        self.answers = True
        self.error: Unavailable | None = None
        self.took_ns = 0
        self.models: list[dict[str, Any]] = []
        self.tickets: list[Any] = []
        self.asked: list[float] = []
        link: Any = SimpleNamespace(
            bind=lambda: self.clock, session=SimpleNamespace(ask=self.ask), send_soon=lambda: None,
            turns=JobTurns(self.clock),  # type: ignore[arg-type]
        )  # fmt: skip
        self.feed = PageFeed(link, ["http://gpu1:8000"])

    def ask(self, ticket: Any, what: str, now: float) -> None:
        assert what == "activity"
        self.asked.append(self.clock.time())
        self.tickets.append(ticket)
        if self.error is not None:
            raise self.error
        if self.answers:
            self.answer()

    def answer(self) -> None:
        models = [{"reason": "", **model} for model in self.models]
        document = {"time_ns": 5, "took_ns": self.took_ns, "server": {"pid": 7}, "gpus": [], "models": models}
        self.tickets.pop().settle(document | {"clients": []})

    def set(self, **queued: int) -> None:
        """Sets the models and their numbers of queued requests."""
        self.models = [{"name": name, "version": "1", "queued": count} for name, count in queued.items()]

    def view(self, caller: str = "", roles: Iterable[str] = ("page",)) -> Connection:
        self.feed.make_room(caller)
        connection = Connection()
        exchange: Any = connection
        connection.viewer = Viewer(self.feed, exchange, caller, roles)
        self.feed.add(connection.viewer)
        return connection


class Connection:
    viewer: Viewer

    def __init__(self) -> None:
        self.writable = True
        self.events: list[Event] = []
        self.ended = False
        self.aborted = 0

    def send_event(self, data: bytes) -> None:
        assert self.writable
        name, text, *rest = data.decode().split("\n")
        assert rest == ["", ""]
        assert name.startswith("event: ")
        assert text.startswith("data: ")
        self.events.append((name[7:], json.loads(text[6:])))

    def end_events(self) -> None:
        self.ended = True

    def abort(self) -> None:
        self.aborted += 1
        self.viewer.disconnected()

    def take(self) -> list[tuple[str, dict[str, int]]]:
        """The events since the last call, with the queued requests."""
        events, self.events = self.events, []
        return [(name, {row["name"]: row.get("queued", 0) for row in data["models"]}) for name, data in events]


def test_the_broker_is_polled_only_while_a_page_is_open() -> None:
    broker = Broker()
    broker.clock.advance(60)
    first, second = broker.view(), broker.view()
    for closed, count in ((None, 11), (first, 21), (second, 21)):
        if closed is not None:
            closed.viewer.disconnected()
        broker.clock.advance(10.5 * PERIOD_S if closed is None else 10 * PERIOD_S)
        assert len(broker.asked) == count


def test_the_broker_is_not_polled_more_often_than_it_can_bear() -> None:
    broker = Broker()
    for _ in range(100):
        connection = broker.view()
        broker.clock.advance(PERIOD_S / 10)
        connection.viewer.disconnected()
    assert len(broker.asked) == 10, "even if a page is reopened"
    expensive = Broker()
    expensive.took_ns = 200_000_000
    expensive.view()
    expensive.clock.advance(100)
    assert len(expensive.asked) == pytest.approx(100 * BROKER_SHARE / 0.2, abs=1)


def test_one_query_is_in_flight_at_a_time() -> None:
    broker = Broker()
    broker.answers = False
    connection = broker.view()
    broker.clock.advance(10)
    assert len(broker.asked) == 1
    connection.viewer.disconnected()
    connection = broker.view()
    broker.set(m=1)
    broker.answer()
    broker.clock.run()
    assert connection.take() == [("state", {"m": 1})]
    assert len(broker.asked) == 1


def test_a_page_opened_while_rows_are_compared_for_a_closed_one() -> None:
    broker = Broker()
    broker.answers = False
    first = broker.view()
    broker.clock.advance(0)
    broker.set(**{f"m{number}": 1 for number in range(3 * SLICE)})
    broker.answer()
    first.viewer.disconnected()
    second = broker.view()
    broker.clock.run()
    assert first.events == second.events == [], "some of the rows were compared before it came"
    broker.answers = True
    broker.clock.advance(PERIOD_S)
    ((name, rows),) = second.take()
    assert (name, len(rows)) == ("state", 3 * SLICE)


def test_the_first_event_has_the_whole_state_and_later_ones_only_changes() -> None:
    broker = Broker()
    broker.set(a=1, b=2)
    early = broker.view(roles=["page", "infer"])
    broker.clock.advance(0)
    ((name, state),) = early.events
    assert (name, state["seq"], state["time_ns"], state["server"]) == ("state", 1, 5, {"pid": 7})
    assert (state["roles"], state["servers"]) == (["infer", "page"], ["http://gpu1:8000"])
    broker.set(a=1, b=3)
    broker.clock.advance(PERIOD_S)
    late = broker.view()
    broker.set(a=1, c=1)
    broker.clock.advance(PERIOD_S)
    assert early.take() == [("state", {"a": 1, "b": 2}), ("change", {"b": 3}), ("change", {"c": 1})]
    assert late.events[-1][1]["gone"] == [["b", "1"]]
    assert late.take() == [("state", {"a": 1, "b": 3}), ("change", {"c": 1})]
    broker.clock.advance(PERIOD_S)
    assert early.take() == late.take() == [("change", {})]


def test_a_slow_reader_gets_missed_changes_and_does_not_delay_others() -> None:
    broker = Broker()
    broker.set(a=0, b=0)
    slow, quick = broker.view(), broker.view()
    broker.clock.advance(0)
    slow.take(), quick.take()
    slow.writable = False
    for number in range(1, STALLED + 1):
        broker.set(a=number, b=0)
        broker.clock.advance(PERIOD_S)
        assert quick.take() == [("change", {"a": number})]
    slow.writable = True
    broker.clock.advance(PERIOD_S)
    assert slow.take() == [("change", {"a": STALLED})]
    slow.writable = False
    broker.clock.advance(STALLED * PERIOD_S)
    assert slow.aborted == 0
    broker.clock.advance(PERIOD_S)
    assert slow.aborted == 1
    assert len(quick.take()) == STALLED + 2
    quick.viewer.disconnected()
    broker.clock.advance(60)
    assert len(broker.asked) == 2 * STALLED + 3


def test_a_lost_server_is_reported_until_it_returns() -> None:
    broker = Broker()
    broker.set(a=1)
    early = broker.view()
    broker.clock.advance(0)
    broker.error = Unavailable("no server")
    broker.clock.advance(3 * PERIOD_S)
    late = broker.view()
    assert early.events[1:] == late.events == [("down", {"error": "no server"})]
    broker.error = None
    broker.clock.advance(PERIOD_S)
    for connection in (early, late):
        name, state = connection.events[-1]
        assert (name, [row["name"] for row in state["models"]]) == ("state", ["a"])


def test_an_unexpected_answer_ends_no_stream(caplog: pytest.LogCaptureFixture) -> None:
    broker = Broker()
    broker.models = [{"name": "a"}]
    connection = broker.view()
    broker.clock.advance(0)
    ((name, data),) = connection.events
    assert (name, "see its log" in data["error"]) == ("down", True)
    assert "KeyError" in caplog.text
    broker.set(a=1)
    broker.clock.advance(PERIOD_S)
    assert connection.events[-1][0] == "state"


def test_the_number_of_streams_is_limited() -> None:
    broker = Broker()
    others = [broker.view("192.0.2.1") for _ in range(CALLER_VIEWERS)]
    with pytest.raises(Unavailable, match=f"{CALLER_VIEWERS} pages of this caller"):
        broker.view("192.0.2.1")
    broker.view("192.0.2.2")
    own = [broker.view() for _ in range(VIEWERS - CALLER_VIEWERS - 1)]
    with pytest.raises(Unavailable, match=f"{VIEWERS} pages are open"):
        broker.view()
    own[0].viewer.disconnected()
    others[0].viewer.disconnected()
    broker.view("192.0.2.1")
    with pytest.raises(Unavailable, match="of this caller"):
        broker.view("192.0.2.1")


def test_a_caller_with_all_streams_does_not_lock_out_others() -> None:
    broker = Broker()
    own = [broker.view() for _ in range(VIEWERS)]
    mine = [broker.view("token alice"), broker.view("token bob")]
    assert [connection.ended for connection in own[:3]] == [True, True, False], "the oldest of the caller with most end"
    assert not any(connection.ended for connection in (*own[2:], *mine))
    with pytest.raises(Unavailable, match="pages are open at this gateway"):
        broker.view()


def test_all_streams_end_when_access_may_have_changed() -> None:
    broker = Broker()
    connections = [broker.view() for _ in range(3)]
    broker.clock.advance(0)
    broker.feed.end()
    assert all(connection.ended for connection in connections)
    broker.clock.advance(60)
    assert len(broker.asked) == 1
