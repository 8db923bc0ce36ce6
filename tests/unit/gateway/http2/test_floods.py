"""Floods on HTTP/2 connections: the work of one turn of the event loop is bounded, and a flood ends its connection.

Work is counted in frames and fields.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import hpack
import pytest

from shmserve.errors import InvalidRequest
from shmserve.gateway.http2 import limits
from shmserve.gateway.http2.interface import Awaits, TransportStream
from shmserve.gateway.limits.backlog import CONNECTION_WORK, REQUEST_WORK, TURN_WORK
from shmserve.protocol.grpc.codes import Code, RpcError
from tests.support.gateway.grpc_calls import Case
from tests.support.gateway.http2_caller import Caller, Echo, Host, Unfinished
from tests.support.gateway.http2_frames import (
    CALM,
    DATA,
    HEAD,
    HEADERS,
    HELLO,
    OPEN,
    PING,
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

IDLE = frame(PRIORITY, 0, 1, bytes(5))
"""A frame without effect."""


def new_fields(count: int, at: int) -> bytes:
    """A request whose header block adds `count` fields to the table."""
    more = [(f"x-{at}-{n}", str(n)) for n in range(count - len(HEADERS))]
    return frame(HEAD, 5, 2 * at + 1, block(*more))


# ---------------------------------------------------------------------------------------- turns of the loop


def turns(caller: Caller) -> Iterator[None]:
    """The turns that the rest of the input takes."""
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


# ---------------------------------------------------------------------------------------- what ends a connection


def test_many_settings_end_the_connection() -> None:
    caller = Caller(Host(Unfinished), opening=HELLO + OPEN)
    entries = b"".join(b"\0\4" + number(n % 2 * 1000) for n in range(64))
    assert caller.errors(frame(SETTINGS, 0, 0, entries)) == []
    assert [stream.widen(0) for stream in caller.core.streams.open.values()] == [1000]
    assert caller.errors(*[frame(SETTINGS, 0, 0, entries)] * (limits.IDLE_FRAMES // limits.SETTINGS_WEIGHT)) == [CALM]


def test_many_new_fields_end_the_connection() -> None:
    caller = Caller(Host(Unfinished), opening=HELLO)
    per_block = 120 - limits.FIELDS
    enough = (limits.IDLE_FRAMES - limits.SETTINGS_WEIGHT) // per_block
    assert caller.errors(*[new_fields(120, at) for at in range(enough)]) == []
    assert caller.errors(new_fields(120, enough)) == [CALM]
    caller = Caller(Host(Unfinished), opening=HELLO)
    assert caller.errors(*[new_fields(40, at) for at in range(enough + 1)]) == []


@pytest.mark.parametrize("provoke", [
    lambda at: frame(HEAD, 4, 2 * at + 1, block()) + frame(WINDOW, 0, 2 * at + 1, number(0)),
    lambda at: frame(HEAD, 5, 2 * at + 1, block(("connection", "close"))),
    lambda at: frame(HEAD, 5, 2 * at + 1, block()) + frame(DATA, 0, 2 * at + 1, b"x"),
    lambda at: frame(HEAD, 4, 2 * at + 1, block()) + frame(RST, 0, 2 * at + 1, number(8)),
], ids=["a window of nothing", "malformed headers", "data after the end", "cancelled"])  # fmt: skip
def test_many_resets_by_either_side_end_the_connection(
    provoke: Callable[[int], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.parametrize(("application", "headers"), [
    (unknown, HEADERS),
    (Echo, [*HEADERS[:4], ("content-type", "text/html")]),
    (Echo, [(":method", "GET"), *HEADERS[1:]]),
], ids=["no such method", "not gRPC", "not POST"])  # fmt: skip
def test_calls_that_are_refused_take_turns_and_end_the_connection(
    application: Any, headers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MISTAKES", 100)
    caller = Caller(Host(application), opening=HELLO)
    calls = [frame(HEAD, 5, 2 * at + 1, hpack.Encoder().encode(headers)) for at in range(101)]
    caller.core.feed(b"".join(calls[:100]))
    counts = [caller.core.streams.abuse.mistakes, *(caller.core.streams.abuse.mistakes for _ in turns(caller))]
    assert 0 < max(after - before for before, after in pairwise(counts)) <= math.ceil(CONNECTION_WORK / REQUEST_WORK)
    assert counts[-1] == 100
    assert caller.errors() == []
    assert caller.errors(calls[100]) == [CALM]


# ---------------------------------------------------------------------------------------- streams that never finish


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
