"""The event stream of the page, with a clock, a broker and connections that the test controls; and its rows: a page
that applies them has the state of the server, whichever events it missed."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.errors import Unavailable
from shmserve.gateway.limits.turns import JobTurns
from shmserve.gateway.page.feed import (
    BROKER_SHARE,
    CALLER_VIEWERS,
    KEPT_GONE,
    PERIOD_S,
    RECORDING_SHARE,
    SLICE,
    STALLED,
    VIEWERS,
    PageFeed,
    VersionRows,
    Viewer,
)
from shmserve.gateway.page.recorder import SERVER
from shmserve.gateway.page.requests import TRENDS, PageRequests
from shmserve.gateway.page.timeline import Timeline
from shmserve.gateway.upstream.documents import Route
from shmserve.protocol.actions import Action
from shmserve.protocol.rates import MEMORY_STEP
from shmserve.session.uploads import Body
from tests.support.clients.activity_documents import absent, counters, model
from tests.support.hypothesis_profiles import examples
from tests.support.manual_loop import ManualLoop

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
        self.since: list[int] = []
        link: Any = SimpleNamespace(
            bind=lambda: self.clock,
            session=SimpleNamespace(ask=self.ask),
            send_soon=lambda: None,
            turns=JobTurns(self.clock),  # type: ignore[arg-type]
        )
        self.feed = PageFeed(link, ["http://gpu1:8000"])
        self.feed.start()

    def ask(self, ticket: Any, what: str, now: float, body: Body | None = None) -> None:
        assert what == "activity"
        self.since.append(json.loads(body.take())["since"] if body is not None else 0)
        self.asked.append(self.clock.time())
        self.tickets.append(ticket)
        if self.error is not None:
            raise self.error
        if self.answers:
            self.answer()

    def answer(self) -> None:
        models = [{"reason": "", **model} for model in self.models]
        time_ns = int(self.clock.time() * 1e9)
        document = {"time_ns": time_ns, "took_ns": self.took_ns, "server": {"pid": 7}, "gpus": [], "models": models}
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


def test_the_broker_is_polled_until_the_gateway_stops() -> None:
    broker = Broker()
    broker.clock.advance(10.5 * PERIOD_S)
    broker.view().viewer.disconnected()
    broker.clock.advance(10 * PERIOD_S)
    assert len(broker.asked) == 21, "whether or not a page is open"
    broker.feed.stop()
    broker.clock.advance(10 * PERIOD_S)
    assert len(broker.asked) == 21
    assert not broker.clock.timers


def test_the_broker_is_not_polled_more_often_than_it_can_bear() -> None:
    broker = Broker()
    broker.took_ns = 100_000_000
    broker.clock.advance(200)
    assert len(broker.asked) == pytest.approx(200 * RECORDING_SHARE / 0.1 + 1, abs=1)
    broker.asked.clear()
    for _ in range(1000):
        connection = broker.view()
        broker.clock.advance(0.1)
        connection.viewer.disconnected()
    assert len(broker.asked) <= 100 * BROKER_SHARE / 0.1 + 1, "however often pages are opened"
    broker.view()
    broker.clock.advance(100)
    assert len(broker.asked) == pytest.approx(200 * BROKER_SHARE / 0.1, abs=2)


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


def test_the_first_event_has_the_whole_state_and_later_ones_only_changes() -> None:
    broker = Broker()
    broker.set(a=1, b=2)
    early = broker.view(roles=["page", "infer"])
    broker.clock.advance(0)
    ((name, state),) = early.events
    assert (name, state["seq"], state["time_ns"], state["server"]) == ("state", 1, 100_000_000_000, {"pid": 7})
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


def test_rates_are_sent_and_recorded() -> None:
    broker = Broker()
    connection = broker.view()
    for number in range(4):
        counted = counters(success=5 * number, failed=number)
        broker.models = [model("m", counted=counted, queued=number), model("idle"), absent("other")]
        broker.clock.advance(0 if number == 0 else PERIOD_S)
    *_, (_, data) = connection.events
    ((name, version, rates),) = data["rates"]
    assert (name, version, rates["requests"], rates["failed"], rates["batch"]) == ("m", "1", 6, 1, 1)
    assert 0.002 < rates["p50"] < rates["p99"] < 0.0042
    assert (data["total"]["requests"], data["total"]["queue"]) == (6, 3)
    recorder = broker.feed.recorder
    server, busy, idle = (recorder.curves(key) for key in (SERVER, ("m", "1"), ("idle", "1")))
    assert server is not None
    assert busy is not None
    assert idle is not None
    assert server["fine"]["requests"][-4:] == busy["fine"]["requests"][-4:] == [None, 6, 6, 6]
    assert server["fine"]["queue"][-4:] == busy["fine"]["queue"][-4:] == [0, 1, 2, 3]
    assert (idle["fine"]["requests"][-3:], idle["fine"]["p99"][-1]) == ([0, 0, 0], None)
    assert recorder.curves(("other", "")) is None
    (trend,) = recorder.trends()
    assert (trend["name"], trend["requests"][-3:], trend["failed"][-3:]) == ("m", [6, 6, 6], [1, 1, 1])
    broker.error = Unavailable("no server")
    broker.clock.advance(5 * PERIOD_S)
    broker.error = None
    broker.clock.advance(PERIOD_S)
    kept = recorder.curves(SERVER)
    assert kept is not None
    assert kept["fine"]["requests"][-9:] == [6, 6, 6, *[None] * 6], "an outage is a gap"


def test_the_history_of_many_versions_is_written_in_slices_and_once_a_second() -> None:
    broker = Broker()
    for number in range(2):
        counted = counters(success=number)
        broker.models = [model(f"m{index}", counted=counted) for index in range(5 * TRENDS)]
        broker.clock.advance(PERIOD_S)
    link: Any = SimpleNamespace()
    page, slices, texts = PageRequests(link, broker.feed), [], []

    def work(work: Any, then: Any) -> None:
        slices.append(0)
        try:
            while True:
                next(work)
                slices[-1] += 1
        except StopIteration as end:
            then(end.value)

    exchange: Any = SimpleNamespace(
        head=SimpleNamespace(route=Route(Action.PAGE_HISTORY)),
        work=work,
        answer=lambda status, parts, *_, **__: texts.append(b"".join(parts)),
    )
    for _ in range(3):
        page.begin(exchange)
    assert slices == [5]
    first, *others = map(json.loads, texts)
    assert others == [first] * 2
    assert {trend["name"] for trend in first["trends"]} == {f"m{index}" for index in range(5 * TRENDS)}
    broker.clock.advance(PERIOD_S)
    page.begin(exchange)
    assert json.loads(texts[-1])["second"] == first["second"] + 1


def test_the_timeline_has_what_happened_before_and_since_a_page_opened() -> None:
    broker = Broker()
    instance = {"name": "m_0", "state": "ready", "memory_bytes": 0, "restarts": 0}
    changes: list[dict[str, Any]] = [
        {"state": "LOADING"},
        {"state": "READY"},
        {"state": "READY", "last_failed_change": {"time": 1, "reason": "no file"}},
        {"state": "READY", "instances": [instance]},
        {"state": "READY", "instances": [instance | {"restarts": 1, "quarantined": True, "reason": "crashed"}]},
        {"state": "READY", "reason": "unloaded"},
    ]
    early = broker.view()
    for change in changes:
        broker.models = [{"name": "m", "version": "1", **change}]
        broker.clock.advance(PERIOD_S)
    sent = [event["text"] for _, data in early.events for event in data["events"]]
    late = broker.view()
    ((_, state),) = late.events
    assert sent == [event["text"] for event in state["events"]]
    assert sent == [
        "READY",
        "the last change failed: no file",
        "m_0 was restarted",
        "m_0 is quarantined: crashed",
        "NOT LOADED",
    ]
    assert [event.get("bad", False) for event in state["events"]] == [False, True, True, True, False]
    assert {(event["model"], event["version"]) for event in state["events"]} == {("m", "1")}


def test_a_page_that_opens_while_a_state_is_taken_gets_each_event_once() -> None:
    broker = Broker()
    for state in ("LOADING", "READY"):
        broker.models = [{"name": f"m{n}", "version": "1", "state": state} for n in range(2 * SLICE)]
        if state == "LOADING":
            broker.clock.advance(PERIOD_S)
            broker.answers = False
            broker.clock.advance(PERIOD_S)
    broker.answer()  # takes the first slice
    page = broker.view()
    broker.clock.run()
    assert [name for name, _ in page.events] == ["state", "change"]
    models = [event["model"] for _, data in page.events for event in data["events"]]
    assert sorted(models) == sorted(model["name"] for model in broker.models)


def test_a_lost_server_is_reported_until_it_returns() -> None:
    broker = Broker()
    broker.set(a=1)
    early = broker.view()
    broker.clock.advance(PERIOD_S)
    assert broker.since == [0, 100_000_000_000], "only what has changed since the last document"
    early.events.pop()
    broker.error = Unavailable("no server")
    broker.clock.advance(3 * PERIOD_S)
    late = broker.view()
    assert early.events[1:] == late.events == [("down", {"error": "no server"})]
    broker.error = None
    broker.clock.advance(PERIOD_S)
    assert broker.since[-1] == 0, "everything"
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


Document = dict[str, Any]


def entry(name: str, version: str = "1", **more: Any) -> Document:
    return {"name": name, "version": version, "state": "READY", "reason": "", **more}


def instance(**more: Any) -> Document:
    return {"name": "m_0", "state": "ready", "pid": 7, "memory_bytes": 10 * MEMORY_STEP, "cpu_seconds": 1.5, **more}


def update(rows: VersionRows, *models: Document, seconds: float = 1.0, names: Iterable[str] | None = None) -> None:
    for _ in rows.update(copy.deepcopy(list(models)), seconds, names):
        pass


def since(rows: VersionRows, number: int) -> tuple[list[Document], list[list[str]]]:
    changed, gone = rows.since(number)
    return json.loads(changed), json.loads(gone)


def test_a_row_omits_empty_values() -> None:
    rows = VersionRows(Timeline())
    counters = {"success": 3, "failed": 0, "reasons": {}, "request_times": {17: 3}}
    update(rows, entry("m", default=True, queued=0, counters=counters, instances=[instance(restarts=0)]))
    ((row,), gone) = since(rows, 0)
    (process,) = row.pop("instances")
    counted = {"success": 3, "request_times": {"17": 3}}
    assert row == {"name": "m", "version": "1", "state": "READY", "default": True, "counters": counted}
    assert (process, gone) == (instance(), [])


def test_an_idle_process_changes_nothing() -> None:
    rows = VersionRows(Timeline())
    update(rows, entry("m", instances=[instance()]))
    update(rows, entry("m", instances=[instance(cpu_seconds=2.5, memory_bytes=11 * MEMORY_STEP - 1)]))
    assert since(rows, 1) == ([], [])
    update(rows, entry("m", queued=1, instances=[instance(cpu_seconds=3.5)]))
    (row,), _ = since(rows, 2)
    assert row["instances"][0]["cpu_seconds"] == 3.5, "a row that is sent has the current time"


def test_figures_of_language_models_are_of_the_last_interval() -> None:
    """A model that has become idle is sent once more."""
    rows = VersionRows(Timeline())
    for tokens in (0, 50, 50, 50):
        update(rows, entry("m", language={"generated_tokens": tokens, "slots": 4}))
    sent = [{row["name"]: row["figures"] for row in since(rows, number)[0]} for number in (0, 2, 3)]
    idle = {"slots": 4, "generated_tokens": 50, "prompt_tokens_per_s": 0, "generated_tokens_per_s": 0}
    assert sent == [{"m": idle}, {"m": idle}, {}]
    update(rows, entry("m", language={"generated_tokens": 90, "slots": 4}), seconds=2.0)
    assert since(rows, 4)[0][0]["figures"]["generated_tokens_per_s"] == 20


def test_other_work_runs_between_slices() -> None:
    models = [entry(f"m{number}") for number in range(4 * SLICE)]
    assert sum(1 for _ in VersionRows(Timeline()).update(models, 1.0)) == 4


def test_the_number_of_remembered_removals_is_bounded() -> None:
    rows = VersionRows(Timeline())
    update(rows, *[entry(f"m{number}") for number in range(KEPT_GONE + 1)])
    update(rows, entry("m0"))
    assert (rows.complete_since, len(since(rows, 1)[1])) == (1, KEPT_GONE)
    update(rows)
    assert rows.complete_since == 2, "a viewer with event 1 may have a version that is not listed as removed"
    assert len(since(rows, 2)[1]) == 1


KEYS = st.sampled_from([("a", "1"), ("a", "2"), ("b", "1"), ("c", "")])
MODELS = st.dictionaries(KEYS, st.integers(0, 2), max_size=4)


@given(st.lists(st.tuples(MODELS, st.sets(st.integers(0, 2))), max_size=12), st.booleans())
@settings(max_examples=examples(150))
def test_viewers_catch_up_after_missed_events(
    events: list[tuple[dict[tuple[str, str], int], set[int]]], partial: bool
) -> None:
    """Three viewers; each event reaches only some of them. `partial`: the broker sends only models that changed."""
    known: dict[tuple[str, str], int] = {}
    rows = VersionRows(Timeline())
    seen: list[dict[tuple[str, str], Document]] = [{}, {}, {}]
    numbers = [0, 0, 0]
    for state, reached in events:
        names = {key[0] for key in {*state, *known} if state.get(key) != known.get(key)} if partial else None
        chosen = [(key, queued) for key, queued in sorted(state.items()) if names is None or key[0] in names]
        update(rows, *[entry(*key, queued=queued) for key, queued in chosen], names=names)
        known = state
        for viewer in reached:
            changed, gone = since(rows, 0 if numbers[viewer] < rows.complete_since else numbers[viewer])
            if numbers[viewer] < rows.complete_since:
                seen[viewer] = {}
            for key in gone:
                seen[viewer].pop((key[0], key[1]), None)
            for row in changed:
                seen[viewer][row["name"], row.get("version", "")] = row
            numbers[viewer] = rows.number
            assert {key: row.get("queued", 0) for key, row in seen[viewer].items()} == state
