"""Clients that break the protocol or abuse it: each is disconnected or loses its call, and no other call is affected.

The work of one turn of the event loop, counted in frames and fields, is bounded. test_conformance.py has the rules of
the RFC.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import hpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.errors import InvalidRequest
from shmserve.gateway.http2 import limits
from shmserve.gateway.http2.interface import Awaits, TransportStream
from shmserve.gateway.http2.protocol import Http2
from shmserve.gateway.limits.backlog import CONNECTION_WORK, REQUEST_WORK, TURN_WORK
from shmserve.protocol.grpc.codes import Code, RpcError
from tests.support.cases import cases
from tests.support.gateway.grpc_calls import Case
from tests.support.gateway.http2_caller import Caller, Echo, Host, Unfinished
from tests.support.gateway.http2_frames import (
    CALM,
    COMPRESSION,
    DATA,
    FLOW,
    GOAWAY,
    HEAD,
    HEADERS,
    HELLO,
    OPEN,
    PING,
    PREFACE,
    PRIORITY,
    RST,
    SETTINGS,
    WINDOW,
    block,
    frame,
    message,
    number,
    unary,
)
from tests.support.gateway.http_connection import receive
from tests.support.hypothesis_profiles import examples


def test_resets_after_the_deadline_of_their_calls_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RESETS", 10)
    streams = range(1, 101, 2)
    caller = Caller(Host(Unfinished), opening=HELLO)
    caller.raw([frame(HEAD, 5, at, block(("grpc-timeout", "1S"))) for at in streams])
    caller.host.time += 0.95
    assert caller.errors(*[frame(RST, 0, at, number(8)) for at in streams]) == []
    assert not caller.core.streams.open


@pytest.mark.parametrize(("count", "error"), [(20, COMPRESSION), (16_000, CALM)])
def test_an_hpack_bomb_is_refused(count: int, error: int) -> None:
    """One large header is stored in the table, and then referenced thousands of times with one byte each."""
    caller = Caller(opening=b"")
    large = hpack.Encoder().encode([(":method", "POST"), (":path", "/a"), ("x", "y" * 3900)])
    assert caller.errors(HELLO, frame(HEAD, 5, 1, large)) == []
    assert caller.errors(frame(HEAD, 5, 3, b"\xbe" * count)) == [error]


def test_data_beyond_the_window_of_a_paused_stream_ends_its_call() -> None:
    caller = Caller(opening=HELLO + OPEN)
    caller.host.calls[0].stream.pause()
    frames = caller.raw([frame(DATA, 0, 1, bytes(1 << 20))] * 5)
    assert (RST, 0, 1, number(FLOW)) in frames
    assert caller.host.held == 0


def test_acknowledgements_that_a_client_does_not_read_are_counted() -> None:
    caller = Caller(Host(ping_strikes=0), opening=HELLO)
    caller.core.output.accepts = False
    assert caller.errors(*[frame(PING, 0, 0, bytes(8))] * 999) == []
    assert caller.errors(*[frame(SETTINGS, 0, 0)] * 2) == [CALM]


def test_responses_that_a_client_with_large_windows_does_not_read_are_counted() -> None:
    windows = b"\0\4" + number(1 << 30) + b"\0\5" + number((1 << 24) - 1)
    caller = Caller(Host(held_bytes=1 << 20), opening=PREFACE + frame(SETTINGS, 0, 0, windows))
    caller.raw([frame(WINDOW, 0, 0, number(1 << 30))])
    caller.core.output.accepts = False
    size = 100_000
    calls = [unary(stream, bytes(size)) for stream in range(1, 41, 2)]
    assert sum(len(payload) for kind, _, _, payload in caller.raw(calls) if kind == DATA) == 0
    assert caller.host.answers[14] > 0  # UNAVAILABLE: over the share of a connection
    queued = caller.host.answers[0]
    assert caller.host.held == queued * (size + 5) <= 1 << 20
    caller.core.streams.resumed()
    assert sum(len(payload) for kind, _, _, payload in caller.raw([]) if kind == DATA) == queued * (size + 5)
    assert caller.host.held == 0
    assert not caller.core.streams.open


def test_a_message_that_stalls_ends_its_call() -> None:
    caller = Caller()
    slow, steady, idle = caller.begin(), caller.begin(), caller.begin()
    caller.turn()
    caller.send(slow, message(bytes(10_000))[:50], end=False)
    caller.send(steady, message(bytes(10_000))[:50], end=False)
    for _ in range(6):
        if slow not in caller.ended:
            caller.send(slow, bytes(10), end=False)
        caller.send(steady, bytes(200), end=False)
        caller.look()
        caller.turn()
    assert caller.status(slow) == 4
    assert steady not in caller.ended
    assert idle not in caller.ended
    assert not caller.gone


def test_a_response_that_is_not_read_ends_its_call() -> None:
    caller = Caller(window=10)
    caller.acknowledge = False
    stream = caller.begin()
    caller.send(stream, message(bytes(1000)))
    caller.look(6)
    caller.turn()
    assert caller.reset[stream] == 8
    assert not caller.core.streams.open


PINGED = frame(PING, 0, 0, bytes(8))


@cases(
    (HELLO + OPEN, {}, 6, []),
    (HELLO, {}, 4, [CALM]),
    (HELLO, {"pings_without_calls": True}, 10, []),
    ids=["with a call", "without calls", "allowed without calls"],
)
def test_pings_at_the_interval(opening: bytes, settings: dict[str, bool], pings: int, error: list[int]) -> None:
    caller = Caller(Host(Unfinished, ping_interval_s=300.0, **settings), opening=opening)
    for _ in range(pings - 1):
        assert caller.errors(PINGED) == []
        caller.host.time += 301
    assert caller.errors(PINGED) == error


def test_pings_below_the_interval_are_counted_until_data_is_sent() -> None:
    caller = Caller(Host(Unfinished, ping_interval_s=300.0), opening=HELLO + OPEN)
    assert caller.errors(PINGED, PINGED, PINGED) == []
    caller.core.streams.sent_since_ping = True
    assert caller.errors(PINGED, PINGED, PINGED) == []
    assert caller.errors(PINGED) == [CALM]


def test_a_silent_client_gets_a_keepalive_ping() -> None:
    caller = Caller(Host(Unfinished, keepalive_s=10.0, keepalive_timeout_s=5.0))
    stream = caller.begin(end=True)
    caller.turn()
    caller.look(12)
    pings = [event for event in caller.raw([]) if event[0] == PING]
    assert len(pings) == 1
    caller.core.feed(frame(PING, 1, 0, pings[0][3]))
    caller.look(12)
    assert not caller.core.done
    assert len([event for event in caller.raw([]) if event[0] == PING]) == 1
    caller.look(6)
    assert caller.core.streams.over
    assert caller.host.calls[0].events[-1] == "cancelled"
    assert stream not in caller.core.streams.open


EVERY = (1 << 31) - 1
"""The last stream of the first GOAWAY of a graceful end."""


def test_a_connection_without_calls_or_preface_is_closed() -> None:
    caller, mute = Caller(opening=b""), Caller(opening=b"")
    assert caller.goaways(HELLO) == []
    caller.look(30)
    assert caller.goaways(unary(1, b"x")) == []
    caller.look(40)
    assert caller.goaways() == []
    caller.look()
    assert caller.goaways() == [(EVERY, 0)]
    caller.look(2)
    assert caller.goaways() == [(1, 0)]
    mute.core.feed(PREFACE[:10])
    mute.look(5)
    assert [caller.core.done, mute.core.done] == [True, True]


def test_the_end_of_a_connection_loses_no_call() -> None:
    caller = Caller(Host(Unfinished), opening=HELLO + OPEN)
    caller.core.life.drain()
    goaway, ping, *_ = caller.raw([unary(3, b"in transit")])
    assert goaway == (GOAWAY, 0, 0, number(EVERY) + number(0))
    assert caller.host.calls[1].events == [b"in transit", "half closed"]
    assert caller.goaways(frame(PING, 1, 0, ping[3])) == [(3, 0)]
    caller.core.feed(frame(HEAD, 5, 5, block()))
    assert len(caller.host.calls) == 2
    assert not caller.core.done
    for call in caller.host.calls:
        call.stream.finish(0)
    assert caller.core.done


def test_a_connection_is_closed_at_its_maximum_age() -> None:
    caller = Caller(Host(Unfinished, age_s=10.0, age_grace_s=5.0), opening=HELLO + OPEN)
    caller.look(11)
    assert caller.goaways() == [(EVERY, 0)]
    caller.look(2)
    assert caller.goaways() == [(1, 0)]
    assert not caller.core.done
    caller.look(3)
    assert caller.goaways() == [(1, 0)]
    assert caller.core.streams.over
    assert caller.host.calls[0].events == ["cancelled"]


KINDS = st.one_of(st.integers(0, 9), st.integers(0, 255))
FRAMES = st.builds(frame, KINDS, st.one_of(st.sampled_from([0, 1, 4, 5, 8, 9, 13, 0x2C]), st.integers(0, 255)),
                   st.one_of(st.integers(0, 7), st.integers(0, (1 << 32) - 1)),
                   st.one_of(st.binary(max_size=40), st.just(block()), st.just(message(b"abc")),
                             st.just(bytes(4)), st.just(bytes(8)), st.just(number(1))))  # fmt: skip


@settings(max_examples=examples(150))
@given(st.lists(FRAMES, max_size=25), st.integers(1, 60), st.booleans())
def test_random_frames_raise_nothing_and_leave_nothing(frames: list[bytes], size: int, unfinished: bool) -> None:
    host = Host(Unfinished if unfinished else Echo)
    core = Http2(host, "caller", lambda: None)
    data = HELLO + OPEN + b"".join(frames)
    for at in range(0, len(data), size):
        core.feed(data[at : at + size])
    host.turn, host.time = 100, 1e6
    core.life.check_timeouts(4, 1, 40)
    core.streams.lost()
    assert host.held == 0
    assert not core.streams.open
    for call in host.calls:
        ends = [event for event in call.events if event in ("cancelled", "half closed")]
        assert len(ends) == 1 or ends == ["half closed", "cancelled"]


IDLE = frame(PRIORITY, 0, 1, bytes(5))
"""A frame without effect."""


def new_fields(count: int, at: int) -> bytes:
    more = [(f"x-{at}-{n}", str(n)) for n in range(count - len(HEADERS))]
    return frame(HEAD, 5, 2 * at + 1, block(*more))


def turns(caller: Caller) -> Iterator[None]:
    while caller.core.more:
        caller.host.loop.iterate()
        caller.core.feed(b"")
        yield


def test_a_turn_processes_a_bounded_number_of_frames() -> None:
    caller = Caller(opening=b"")
    caller.core.feed(HELLO + IDLE * 300)
    counts = [caller.core.streams.abuse.idle_frames]
    counts += [caller.core.streams.abuse.idle_frames for _ in turns(caller)]
    assert [count - limits.SETTINGS_WEIGHT for count in counts] == [CONNECTION_WORK - 1, 2 * CONNECTION_WORK - 1, 300]


def test_frames_that_touch_all_streams_count_by_their_number() -> None:
    streams = 800
    caller = Caller(Host(Echo), opening=b"")
    caller.raw([HELLO, frame(SETTINGS, 0, 0, b"\0\4" + number(0))])
    caller.raw([unary(2 * at + 1, b"x") for at in range(streams)])
    assert len(caller.core.output.unsent) == streams
    for touch in frame(WINDOW, 0, 0, number(1)), frame(SETTINGS, 0, 0, b"\0\4" + number(0)):
        caller.host.loop.run()
        before = caller.core.spent
        caller.core.feed(touch * 50)
        assert caller.core.more, "two of them take a turn"
        assert caller.core.spent - before <= CONNECTION_WORK + 2 * streams // limits.STREAMS_WORK
        caller.raw([b""])


def test_input_behind_a_backlog_is_processed_in_order() -> None:
    caller = Caller(opening=b"")
    caller.core.feed(HELLO + IDLE * 200 + unary(1, b"one")[:30])
    caller.feed(unary(1, b"one")[30:] + unary(3, b"two"))
    assert [call.events for call in caller.host.calls] == [[b"one", "half closed"], [b"two", "half closed"]]


def test_new_header_blocks_of_many_connections_share_a_turn() -> None:
    """No connection exceeds its own limit, but all of them together exceed that of a turn."""
    listener = Host(Unfinished)
    crowd = [listener.connect() for _ in range(100)]
    honest, _ = listener.connect()
    listener.loop.iterate()
    for connection, _ in crowd:
        receive(connection, HELLO)
        listener.loop.iterate()
    receive(honest, HELLO)
    listener.loop.run()

    def decoded() -> int:
        return sum(connection.spent for connection, _ in crowd)

    for at in range(3):
        before = decoded()
        for connection, _ in crowd:
            receive(connection, new_fields(60, at))
        assert decoded() - before <= TURN_WORK + CONNECTION_WORK
        receive(honest, unary(2 * at + 1, b"honest"))
        listener.loop.iterate()
        answers = [call for call in listener.calls if call.events == [b"honest", "half closed"]]
        assert len(answers) == at + 1, "in the next turn, before the connections with more work"
        while listener.loop.soon:
            before = decoded()
            listener.loop.iterate()
            assert decoded() - before <= TURN_WORK // 2 + CONNECTION_WORK
    assert all(transport.reads for _, transport in crowd)


def test_a_flood_is_not_processed_after_the_end_of_its_connection() -> None:
    listener = Host()
    connection, transport = listener.connect()
    receive(connection, HELLO + IDLE * 200 + frame(PING, 0, 1, bytes(8)))
    other, lost = listener.connect()
    receive(other, HELLO + IDLE * 200)
    other.connection_lost(None)
    listener.loop.run()
    assert transport.closed
    assert not lost.reads, "a lost transport is not resumed"


def test_many_new_fields_end_the_connection() -> None:
    caller = Caller(Host(Unfinished), opening=HELLO)
    per_block = 120 - limits.FIELDS
    enough = (limits.IDLE_FRAMES - limits.SETTINGS_WEIGHT) // per_block
    assert caller.errors(*[new_fields(120, at) for at in range(enough)]) == []
    assert caller.errors(new_fields(120, enough)) == [CALM]
    caller = Caller(Host(Unfinished), opening=HELLO)
    assert caller.errors(*[new_fields(40, at) for at in range(enough + 1)]) == []


@cases(
    lambda at: frame(HEAD, 4, 2 * at + 1, block()) + frame(WINDOW, 0, 2 * at + 1, number(0)),
    lambda at: frame(HEAD, 5, 2 * at + 1, block(("connection", "close"))),
    lambda at: frame(HEAD, 5, 2 * at + 1, block()) + frame(DATA, 0, 2 * at + 1, b"x"),
    lambda at: frame(HEAD, 4, 2 * at + 1, block()) + frame(RST, 0, 2 * at + 1, number(8)),
    ids=["a window of nothing", "malformed headers", "data after the end", "cancelled"],
)
def test_many_resets_end_the_connection(provoke: Callable[[int], bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RESETS", 50)
    caller = Caller(Host(Unfinished), opening=HELLO)
    assert caller.errors(*[provoke(at) for at in range(50)]) == []
    assert caller.errors(provoke(50)) == [CALM]
    caller = Caller(Host(Unfinished), opening=b"")
    caller.raw([HELLO, *[provoke(at) for at in range(50)]])
    caller.core.life.check_timeouts(4, 1, 40)
    assert caller.errors(provoke(50)) == []


def unknown(stream: TransportStream) -> Any:
    raise RpcError(Code.UNIMPLEMENTED, "there is no such method")


@cases(
    (unknown, HEADERS),
    (Echo, [*HEADERS[:4], ("content-type", "text/html")]),
    (Echo, [(":method", "GET"), *HEADERS[1:]]),
    ids=["no such method", "not gRPC", "not POST"],
)
def test_refused_calls_take_turns_and_end_it(application: Any, headers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MISTAKES", 100)
    caller = Caller(Host(application), opening=HELLO)
    calls = [frame(HEAD, 5, 2 * at + 1, hpack.Encoder().encode(headers)) for at in range(101)]
    caller.core.feed(b"".join(calls[:100]))
    counts = [caller.core.streams.abuse.mistakes, *(caller.core.streams.abuse.mistakes for _ in turns(caller))]
    assert 0 < max(after - before for before, after in pairwise(counts)) <= math.ceil(CONNECTION_WORK / REQUEST_WORK)
    assert counts[-1] == 100
    assert caller.errors() == []
    assert caller.errors(calls[100]) == [CALM]


def test_a_call_without_a_request_times_out() -> None:
    class Request(Unfinished):
        awaits = Awaits.REQUEST

        def message(self, data: Any) -> None:
            self.awaits = Awaits.NOTHING

    caller = Caller(Host(Request))
    silent, asked, closed = caller.begin(), caller.begin(), caller.begin(end=True)
    caller.send(asked, message(b"x"), end=False)
    caller.look(4)
    caller.turn()
    assert not caller.ended.get(silent, {}).get("grpc-status")
    caller.look(1)
    caller.turn()
    assert caller.status(silent) == 4
    assert "--limit http_read_secs" in caller.ended[silent]["grpc-message"]
    assert {asked, closed} <= set(caller.core.streams.open)


def test_an_idle_stream_times_out() -> None:
    caller = Caller(Host(Unfinished))
    caller.host.stream_turns = 10
    idle, used = caller.begin(), caller.begin()
    caller.turn()
    caller.look(6)
    caller.send(used, message(b"x"), end=False)
    for stream, turns in ((idle, 5), (used, 6)):
        assert stream in caller.core.streams.open
        caller.look(turns)
        caller.turn()
        assert caller.status(stream) == 4
        assert "--limit grpc_stream_idle_secs" in caller.ended[stream]["grpc-message"]


def test_many_streams_without_a_request_time_out_like_calls() -> None:
    """A client may open a few streams before it needs them, but not a thousand."""
    caller = Caller(Host(Unfinished))
    used = [caller.begin() for _ in range(3)]
    for stream in used:
        caller.send(stream, message(b"x"), end=False)
    silent = [caller.begin(("x", f"{n}" * 1000)) for n in range(limits.SILENT_STREAMS + 20)]
    caller.turn()
    assert caller.host.held >= 1000 * len(silent), "large headers count"
    caller.look(5)
    caller.turn()
    assert set(caller.core.streams.open) == {*used, *silent[: limits.SILENT_STREAMS]}
    assert caller.status(silent[-1]) == 4
    assert "--limit http_read_secs" in caller.ended[silent[-1]]["grpc-message"]
    caller.core.streams.lost()
    assert caller.host.held == 0


def test_the_deadline_of_a_call_depends_on_what_it_awaits() -> None:
    one, many = Case("ModelInfer"), Case("ModelStreamInfer")
    found = [one.call.awaits, many.call.awaits]
    one.ask()
    ticket = many.ask()
    found += [one.call.awaits, many.call.awaits]
    ticket.fail(InvalidRequest("no"))
    found.append(many.call.awaits)
    assert found == [Awaits.REQUEST, Awaits.NEXT_REQUEST, Awaits.NOTHING, Awaits.NOTHING, Awaits.NEXT_REQUEST]


def test_a_client_that_does_not_read_is_disconnected() -> None:
    listener = Host()
    connection, transport = listener.connect()
    receive(connection, HELLO + unary(1, b"x"))
    for turn in range(1, 7):
        listener.turn, transport.unsent = turn, 1000 - turn
        connection.check_timeouts(4)
        assert transport.closed == (turn > 5), turn


def test_a_connection_whose_streams_are_idle_can_be_evicted() -> None:
    listener = Host()
    connection, _ = listener.connect()

    def idle_since() -> Any:
        return connection.idle_since

    listener.time = 3.0
    receive(connection, HELLO + OPEN)
    assert idle_since() is None, "a call was opened in this turn of the slow clock"
    listener.turn += 2
    assert idle_since() == 0.0, "no message was received since it was opened"
    listener.time = 7.0
    receive(connection, frame(DATA, 0, 1, message(b"one")))
    assert idle_since() is None
    listener.turn += 2
    assert idle_since() == 7.0
    listener.calls[0].awaits = Awaits.NOTHING
    assert idle_since() is None, "its response is due"
