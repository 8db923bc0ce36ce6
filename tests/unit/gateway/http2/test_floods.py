"""Floods of HTTP/2: what one connection may cost in one turn of the loop, and what ends it. Turns are counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hpack
import pytest

from shmserve.errors import InvalidRequest
from shmserve.gateway.http2 import limits as most
from shmserve.gateway.http2.codes import Code, RpcError
from shmserve.gateway.http2.connection import Http2Connection
from shmserve.gateway.http2.interface import Awaits, TransportStream
from tests.support.gateway.grpc_calls import Case
from tests.support.gateway.http2_caller import HEADERS, Caller, Echo, Host, message
from tests.unit.gateway.http2.test_conformance import Silent, number
from tests.unit.gateway.http2.test_http2 import (
    CALM,
    DATA,
    GOAWAY,
    HEAD,
    HELLO,
    PING,
    PRIORITY,
    RST,
    SETTINGS,
    WINDOW,
    block,
    frame,
    unary,
)  # fmt: skip

OPEN = frame(HEAD, 4, 1, block())


def ended(caller: Caller, *parts: bytes) -> list[int]:
    """Reasons of GOAWAY."""
    return [int.from_bytes(payload[4:8], "big") for kind, _, _, payload in caller.raw(parts) if kind == GOAWAY]


def new_fields(count: int, at: int) -> bytes:
    """A request whose block adds so many fields to the table."""
    made: bytes = hpack.Encoder().encode([*HEADERS, *[(f"x-{at}-{n}", str(n)) for n in range(count - len(HEADERS))]])
    return frame(HEAD, 5, 2 * at + 1, made)


# ---------------------------------------------------------------------------------------- turns of the loop


def test_a_turn_takes_no_more_than_its_frames() -> None:
    caller = Caller(greet=False)
    caller.core.feed(HELLO + frame(PRIORITY, 0, 1, bytes(5)) * 300)
    counts = [caller.core.abuse.idle_frames - most.SETTINGS_WEIGHT]
    while caller.core.more:
        caller.host.turn_once()
        caller.core.feed(b"")
        counts.append(caller.core.abuse.idle_frames - most.SETTINGS_WEIGHT)
    assert counts == [most.WORK - 1, 2 * most.WORK - 1, 300]


def test_fields_that_are_decoded_are_work_and_known_blocks_are_not() -> None:
    host = Host(Silent)
    caller = Caller(host, greet=False)
    caller.core.feed(HELLO + b"".join(new_fields(120, at) for at in range(6)))
    taken = [len(host.calls)]
    while caller.core.more:
        caller.host.turn_once()
        caller.core.feed(b"")
        taken.append(len(host.calls))
    assert taken == [1, 2, 3, 4, 5, 6]
    known = hpack.Encoder()
    first = known.encode(HEADERS)
    calls = [frame(HEAD, 5, 2 * at + 101, first if not at else known.encode(HEADERS)) for at in range(150)]
    caller.raw(calls[:2])
    before = len(host.calls)
    caller.core.feed(b"".join(calls[2:]))
    assert len(host.calls) == before + most.WORK


def test_what_comes_meanwhile_is_taken_in_its_order() -> None:
    caller = Caller(greet=False)
    caller.core.feed(HELLO + frame(PRIORITY, 0, 1, bytes(5)) * 200 + unary(1, b"one")[:30])
    caller.core.feed(unary(1, b"one")[30:] + unary(3, b"two"))
    while caller.core.more:
        caller.host.turn_once()
        caller.core.feed(b"")
    assert [call.told for call in caller.host.calls] == [[b"one", "half closed"], [b"two", "half closed"]]


class Transport:
    def __init__(self) -> None:
        self.sent = b""
        self.reading = True
        self.closed = False

    def get_extra_info(self, name: str) -> Any:
        return ("192.0.2.1", 1)

    def write(self, data: bytes) -> None:
        self.sent += data

    def writelines(self, parts: list[Any]) -> None:
        self.sent += b"".join(map(bytes, parts))

    def pause_reading(self) -> None:
        assert self.reading
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading
        self.reading = True

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        self.closed = True


class Loop(Host):
    """A door whose loop is turned by hand."""

    def __init__(self, application: Callable[[TransportStream], Any] = Echo) -> None:
        super().__init__(application)

    def enter(self, connection: Any) -> bool:
        return True

    def leave(self, connection: Any) -> None: ...

    def connect(self) -> tuple[Http2Connection, Transport]:
        listener: Any = self
        made, transport = Http2Connection(listener), Transport()
        made.connection_made(transport)
        return made, transport


def receive(connection: Http2Connection, data: bytes) -> None:
    connection.get_buffer(-1)[: len(data)] = data
    connection.buffer_updated(len(data))


def test_others_have_their_turn_between_those_of_a_flood() -> None:
    loop = Loop(Silent)
    floods = [loop.connect() for _ in range(3)]
    honest, answered = loop.connect()
    loop.turn_once()
    for connection, transport in floods:
        receive(connection, HELLO + frame(PRIORITY, 0, 1, bytes(5)) * 5000)
        assert not transport.reading
    receive(honest, HELLO + unary(1, b"x"))
    assert loop.calls[0].told == [b"x", "half closed"]
    assert answered.reading

    def taken() -> list[int]:
        return [connection._core.abuse.idle_frames for connection, _ in floods if connection._core]

    while loop.later:
        before = taken()
        loop.turn_once()
        moved = [after - had for after, had in zip(taken(), before, strict=True)]
        assert sum(moved) <= most.TURN_WORK // 2, "of all of them together"
        assert max(taken()) - min(taken()) <= most.WORK, "round robin"
    assert all(transport.reading for _, transport in floods)


def test_many_connections_with_one_new_header_block_each() -> None:
    """None is over its own limit, and all of them together are over that of a turn."""
    loop = Loop(Silent)
    crowd = [loop.connect() for _ in range(100)]
    honest, _ = loop.connect()
    loop.turn_once()
    for connection, _ in crowd:
        receive(connection, HELLO)
        loop.turn_once()
    receive(honest, HELLO)
    while loop.later:
        loop.turn_once()

    def decoded() -> int:
        return sum(connection._core.spent for connection, _ in crowd if connection._core)

    for at in range(3):
        before = decoded()
        for connection, _ in crowd:
            receive(connection, new_fields(60, at))
        assert decoded() - before <= most.TURN_WORK + most.WORK
        receive(honest, unary(2 * at + 1, b"honest"))
        loop.turn_once()
        answers = [call for call in loop.calls if call.told == [b"honest", "half closed"]]
        assert len(answers) == at + 1, "in the next turn, before the connections that have cost more"
        while loop.later:
            before = decoded()
            loop.turn_once()
            assert decoded() - before <= most.TURN_WORK // 2 + most.WORK
    assert all(transport.reading for _, transport in crowd)


def test_a_flood_that_ends_its_connection_is_not_read_on() -> None:
    loop = Loop()
    connection, transport = loop.connect()
    receive(connection, HELLO + frame(PRIORITY, 0, 1, bytes(5)) * 200 + frame(PING, 0, 1, bytes(8)))
    while loop.later:
        loop.turn_once()
    assert transport.closed
    other, transport = loop.connect()
    receive(other, HELLO + frame(PRIORITY, 0, 1, bytes(5)) * 200)
    other.connection_lost(None)
    while loop.later:
        loop.turn_once()
    assert not transport.reading, "its transport is gone, and is left alone"


# ---------------------------------------------------------------------------------------- what ends a connection


def test_settings_of_many_entries() -> None:
    caller = Caller(Host(Silent), greet=False)
    caller.raw([HELLO, OPEN])
    entries = b"".join(b"\0\4" + number(n % 2 * 1000) for n in range(64))
    assert ended(caller, frame(SETTINGS, 0, 0, entries)) == []
    assert [stream.window for stream in caller.core.streams.values()] == [1000]
    assert ended(caller, *[frame(SETTINGS, 0, 0, entries)] * (most.IDLE_FRAMES // most.SETTINGS_WEIGHT)) == [CALM]


def test_fields_beyond_what_clients_send_are_counted() -> None:
    caller = Caller(Host(Silent), greet=False)
    caller.raw([HELLO])
    per_block = 120 - most.FIELDS
    enough = (most.IDLE_FRAMES - most.SETTINGS_WEIGHT) // per_block
    assert ended(caller, *[new_fields(120, at) for at in range(enough)]) == []
    assert ended(caller, new_fields(120, enough)) == [CALM]
    caller = Caller(Host(Silent), greet=False)
    caller.raw([HELLO])
    assert ended(caller, *[new_fields(40, at) for at in range(enough + 1)]) == []


def provoked(at: int) -> bytes:
    return frame(HEAD, 4, 2 * at + 1, block()) + frame(WINDOW, 0, 2 * at + 1, number(0))


@pytest.mark.parametrize("provoke", [
    provoked,
    lambda at: frame(HEAD, 5, 2 * at + 1, block(("connection", "close"))),
    lambda at: frame(HEAD, 5, 2 * at + 1, block()) + frame(DATA, 0, 2 * at + 1, b"x"),
    lambda at: frame(HEAD, 4, 2 * at + 1, block()) + frame(RST, 0, 2 * at + 1, number(8)),
], ids=["a window of nothing", "malformed headers", "data after the end", "taken back"])  # fmt: skip
def test_resets_are_counted_whoever_sends_them(
    provoke: Callable[[int], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(most, "RESETS", 50)
    caller = Caller(Host(Silent), greet=False)
    caller.raw([HELLO])
    assert ended(caller, *[provoke(at) for at in range(50)]) == []
    assert ended(caller, provoke(50)) == [CALM]
    caller = Caller(Host(Silent), greet=False)
    caller.raw([HELLO, *[provoke(at) for at in range(50)]])
    caller.core.life.look(4, 1, 40)
    assert ended(caller, provoke(50)) == []


def unknown(stream: TransportStream) -> Any:
    raise RpcError(Code.UNIMPLEMENTED, "there is no such method")


@pytest.mark.parametrize(("application", "head"), [
    (unknown, HEADERS),
    (Echo, [*HEADERS[:4], ("content-type", "text/html")]),
    (Echo, [(":method", "GET"), *HEADERS[1:]]),
], ids=["no such method", "not gRPC", "not POST"])  # fmt: skip
def test_calls_that_are_refused_from_their_headers_are_mistakes(
    application: Any, head: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(most, "MISTAKES", 50)
    caller = Caller(Host(application), greet=False)
    caller.raw([HELLO])
    calls = [frame(HEAD, 5, 2 * at + 1, hpack.Encoder().encode(head)) for at in range(51)]
    assert ended(caller, *calls[:50]) == []
    assert ended(caller, calls[50]) == [CALM]


def test_resets_of_streams_that_are_closed() -> None:
    caller = Caller(greet=False)
    caller.raw([HELLO, unary(1, b"x")])
    assert ended(caller, frame(RST, 0, 1, number(8)) * most.IDLE_FRAMES) == [CALM]


# ---------------------------------------------------------------------------------------- streams that never finish


def look(caller: Caller, times: int) -> None:
    for _ in range(times):
        caller.host.turn += 1
        caller.core.life.look(4, 100, 40)


def test_a_request_that_does_not_come() -> None:
    class Request(Silent):
        awaits = Awaits.REQUEST

        def message(self, data: Any) -> None:
            self.awaits = Awaits.NOTHING

    caller = Caller(Host(Request))
    silent, asked, closed = caller.begin(), caller.begin(), caller.begin(end=True)
    caller.send(asked, message(b"x"), end=False)
    look(caller, 4)
    caller.turn()
    assert not caller.ended.get(silent, {}).get("grpc-status")
    look(caller, 1)
    caller.turn()
    assert caller.status(silent) == 4
    assert "--http-read-timeout" in caller.ended[silent]["grpc-message"]
    assert {asked, closed} <= set(caller.core.streams)


def test_a_stream_that_is_idle_for_too_long() -> None:
    caller = Caller(Host(Silent))
    caller.host.stream_turns = 10
    idle, used = caller.begin(), caller.begin()
    caller.turn()
    look(caller, 6)
    caller.send(used, message(b"x"), end=False)
    look(caller, 5)
    caller.turn()
    assert caller.status(idle) == 4
    assert "--grpc-stream-idle-timeout" in caller.ended[idle]["grpc-message"]
    assert set(caller.core.streams) == {used}
    look(caller, 6)
    caller.turn()
    assert caller.status(used) == 4


def test_what_calls_of_the_services_wait_for() -> None:
    one, many = Case("ModelInfer"), Case("ModelStreamInfer")
    found = [one.call.awaits, many.call.awaits]
    one.ask()
    ticket = many.ask()
    found += [one.call.awaits, many.call.awaits]
    ticket.fail(InvalidRequest("no"))
    found.append(many.call.awaits)
    assert found == [Awaits.REQUEST, Awaits.NEXT_REQUEST, Awaits.NOTHING, Awaits.NOTHING, Awaits.NEXT_REQUEST]


def idle_since(connection: Http2Connection) -> float | None:
    return connection.idle_since


def test_a_connection_whose_streams_are_idle_can_be_evicted() -> None:
    loop = Loop()
    connection, _ = loop.connect()
    loop.time = 3.0
    receive(connection, HELLO + OPEN)
    assert idle_since(connection) is None, "a call was opened in this turn of the slow clock"
    loop.turn += 2
    assert idle_since(connection) == 0.0, "it was opened, and nothing has come"
    loop.time = 7.0
    receive(connection, frame(DATA, 0, 1, message(b"one")))
    assert idle_since(connection) is None
    loop.turn += 2
    assert idle_since(connection) == 7.0
    loop.calls[0].awaits = Awaits.NOTHING
    assert idle_since(connection) is None, "its answer is due"
