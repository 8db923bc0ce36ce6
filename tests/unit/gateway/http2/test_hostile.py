"""Callers of gRPC who keep no rules: each is told why, and nobody else notices."""

from __future__ import annotations

from typing import Any

import hpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.gateway.http2 import limits as most
from shmserve.gateway.http2.protocol import Http2
from tests.support.gateway.http2_caller import Caller, Echo, Host, message
from tests.support.hypothesis_profiles import examples
from tests.unit.gateway.http2.test_http2 import (
    CALM,
    COMPRESSION,
    CONTINUATION,
    DATA,
    FLOW,
    GOAWAY,
    HEAD,
    HELLO,
    PING,
    PREFACE,
    PRIORITY,
    PROTOCOL,
    PUSH,
    RST,
    SETTINGS,
    SIZE,
    WINDOW,
    block,
    frame,
    unary,
)  # fmt: skip


class Silent(Echo):
    def half_closed(self) -> None:
        self.told.append("half closed")


def reason(caller: Caller, *parts: bytes) -> int | None:
    """Why the connection was ended, if it was."""
    found = [payload for kind, _, _, payload in caller.raw(parts) if kind == GOAWAY]
    assert bool(found) == caller.core.over
    return int.from_bytes(found[0][4:8], "big") if found else None


def number(value: int) -> bytes:
    return value.to_bytes(4, "big")


OPEN = frame(HEAD, 4, 1, block())
WRONG: dict[str, tuple[bytes, int]] = {
    "HTTP/1": (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", PROTOCOL),
    "no settings at first": (PREFACE + frame(PING, 0, 0, bytes(8)), PROTOCOL),
    "an acknowledgement at first": (PREFACE + frame(SETTINGS, 1, 0), PROTOCOL),
    "settings of a stream": (HELLO + frame(SETTINGS, 0, 1), PROTOCOL),
    "settings of 5 bytes": (HELLO + frame(SETTINGS, 0, 0, bytes(5)), SIZE),
    "an acknowledgement of something": (HELLO + frame(SETTINGS, 1, 0, bytes(6)), SIZE),
    "many settings": (HELLO + frame(SETTINGS, 0, 0, bytes(6000)), SIZE),
    "a window over the largest": (HELLO + frame(SETTINGS, 0, 0, b"\0\4" + number(1 << 31)), FLOW),
    "a small frame size": (HELLO + frame(SETTINGS, 0, 0, b"\0\5" + number(1)), PROTOCOL),
    "a push setting of 2": (HELLO + frame(SETTINGS, 0, 0, b"\0\2" + number(2)), PROTOCOL),
    "a push": (HELLO + frame(PUSH, 4, 1, number(2)), PROTOCOL),
    "a frame over the limit": (HELLO + b"\x20\0\0\0\0\0\0\0\1", SIZE),
    "headers over the limit": (HELLO + frame(HEAD, 4, 1, bytes(40_000)), CALM),
    "headers over the limit, announced": (HELLO + frame(HEAD, 4, 1, bytes(40_000))[:50], CALM),
    "headers of stream 0": (HELLO + frame(HEAD, 4, 0, block()), PROTOCOL),
    "headers of an even stream": (HELLO + frame(HEAD, 4, 2, block()), PROTOCOL),
    "headers with too much padding": (HELLO + frame(HEAD, 0xC, 1, b"\xff"), PROTOCOL),
    "headers with no padding where it should be": (HELLO + frame(HEAD, 0xC, 1), PROTOCOL),
    "headers with half a priority": (HELLO + frame(HEAD, 0x24, 1, bytes(3)), PROTOCOL),
    "headers that are none": (HELLO + frame(HEAD, 4, 1, b"\xff\xff\xff\xff\xff\xff\xff\xff"), COMPRESSION),
    "headers cut short": (HELLO + frame(HEAD, 4, 1, block()[:-3]), COMPRESSION),
    "headers cut short in a number": (HELLO + frame(HEAD, 4, 1, b"\x40"), COMPRESSION),
    "sizes of the table, again and again": (HELLO + frame(HEAD, 4, 1, b"\x20\x3f\x85\x01\x20" + block()), COMPRESSION),
    "many headers": (HELLO + frame(HEAD, 4, 1, b"\x00\x01a\x00" * 200), CALM),
    "a table over the limit": (HELLO + frame(HEAD, 4, 1, b"\x3f\xff\xff\xff\x07"), COMPRESSION),
    "something between headers": (HELLO + frame(HEAD, 0, 1, block()) + frame(PING, 0, 0, bytes(8)), PROTOCOL),
    "a continuation of another": (HELLO + frame(HEAD, 0, 1, block()) + frame(CONTINUATION, 4, 3), PROTOCOL),
    "a continuation of nothing": (HELLO + frame(CONTINUATION, 4, 1), PROTOCOL),
    "endless continuations": (HELLO + frame(HEAD, 0, 1) + frame(CONTINUATION, 0, 1) * 1000, CALM),
    "large continuations": (HELLO + frame(HEAD, 0, 1) + frame(CONTINUATION, 0, 1, bytes(16_384)) * 3, CALM),
    "data of stream 0": (HELLO + frame(DATA, 0, 0, b"x"), PROTOCOL),
    "data of an unknown stream": (HELLO + OPEN + frame(DATA, 0, 3, b"x"), PROTOCOL),
    "more padding than data": (HELLO + OPEN + frame(DATA, 8, 1, b"\x05abc"), PROTOCOL),
    "no padding where it should be": (HELLO + OPEN + frame(DATA, 8, 1), PROTOCOL),
    "a ping of a stream": (HELLO + frame(PING, 0, 1, bytes(8)), PROTOCOL),
    "a ping of 7 bytes": (HELLO + frame(PING, 0, 0, bytes(7)), SIZE),
    "many pings": (HELLO + frame(PING, 0, 0, bytes(8)) * 4, CALM),
    "a reset of an unknown stream": (HELLO + frame(RST, 0, 1, number(8)), PROTOCOL),
    "a reset of 3 bytes": (HELLO + OPEN + frame(RST, 0, 1, bytes(3)), SIZE),
    "an update of nothing": (HELLO + frame(WINDOW, 0, 0, number(0)), PROTOCOL),
    "an update over the largest": (HELLO + frame(WINDOW, 0, 0, number((1 << 31) - 1)), FLOW),
    "an update of 5 bytes": (HELLO + frame(WINDOW, 0, 0, bytes(5)), SIZE),
    "an update of an unknown stream": (HELLO + frame(WINDOW, 0, 1, number(1)), PROTOCOL),
    "a priority of 4 bytes": (HELLO + frame(PRIORITY, 0, 1, bytes(4)), SIZE),
    "a priority of nothing": (HELLO + frame(PRIORITY, 0, 0, bytes(5)), PROTOCOL),
    "an end of a stream": (HELLO + frame(GOAWAY, 0, 1, bytes(8)), PROTOCOL),
    "settings, again and again": (HELLO + frame(SETTINGS, 0, 0) * 10_001, CALM),
    "data of nothing, again and again": (HELLO + OPEN + frame(DATA, 0, 1) * 10_001, CALM),
    "priorities, again and again": (HELLO + frame(PRIORITY, 0, 1, bytes(5)) * 10_001, CALM),
    "what is unknown, again and again": (HELLO + frame(200, 0, 1) * 10_001, CALM),
}


@pytest.mark.parametrize("name", WRONG)
def test_who_leaves_the_protocol_is_told_and_is_over(name: str) -> None:
    data, expected = WRONG[name]
    caller = Caller(greet=False)
    assert reason(caller, data) == expected
    assert not caller.core.streams
    assert not caller.host.held
    assert caller.raw([unary(9, b"more")]) == []


def test_data_of_a_call_that_has_ended_is_thrown_away() -> None:
    caller = Caller(greet=False)
    late = [frame(DATA, 0, 1, b"late"), frame(WINDOW, 0, 1, number(5)), frame(RST, 0, 1, number(8)),
            frame(DATA, 0x8, 1, bytes([200]) + bytes(300))]  # fmt: skip
    assert reason(caller, HELLO, unary(1, b"x"), *late) is None
    assert reason(caller, unary(3, b"y")) is None
    assert caller.host.calls[1].told == [b"y", "half closed"]


def test_data_after_the_end_of_a_call_ends_that_call_alone() -> None:
    caller = Caller(Host(Silent), greet=False)
    found = caller.raw([HELLO, unary(1, b"x"), unary(3, b"y"), frame(DATA, 0, 1, b"more")])
    assert (RST, 0, 1, number(5)) in found
    assert caller.host.calls[0].told[-1] == "cancelled"
    assert caller.host.calls[1].told == [b"y", "half closed"]


@pytest.mark.parametrize("headers", [
    [(":method", "POST"), (":path", "/a"), ("Upper", "x")],
    [(":method", "POST"), ("a", "b"), (":path", "/a")],
    [(":method", "POST"), (":method", "POST"), (":path", "/a")],
    [(":method", "POST"), (":path", "/a"), ("connection", "close")],
    [(":method", "POST"), (":path", "/a"), (":status", "200")],
    [(":method", "POST"), (":path", "")],
])  # fmt: skip
def test_malformed_headers_end_that_call_alone(headers: list[tuple[str, str]]) -> None:
    caller = Caller(greet=False)
    found = caller.raw([HELLO, frame(HEAD, 5, 1, hpack.Encoder().encode(headers))])
    assert (RST, 0, 1, number(PROTOCOL)) in found
    assert not caller.host.calls
    assert reason(caller, unary(3, b"y")) is None


def test_trailers_that_do_not_end_the_call() -> None:
    caller = Caller(greet=False)
    assert (RST, 0, 1, number(PROTOCOL)) in caller.raw([HELLO, OPEN, frame(HEAD, 4, 1, block())])
    assert caller.host.calls[0].told == ["cancelled"]


def test_an_answer_that_is_taken_byte_by_byte() -> None:
    caller = Caller(greet=False)
    caller.raw([HELLO + frame(SETTINGS, 0, 0, b"\0\4" + number(0)), unary(1, bytes(20_000))])
    assert reason(caller, *[frame(WINDOW, 0, 1, number(1))] * 10_001) == CALM


def test_windows_of_a_stream_that_are_wrong() -> None:
    for size, expected in ((0, PROTOCOL), ((1 << 31) - 1, FLOW)):
        caller = Caller(greet=False)
        assert (RST, 0, 1, number(expected)) in caller.raw([HELLO, OPEN, frame(WINDOW, 0, 1, number(size))])


def test_calls_that_are_taken_back_at_once_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(most, "RESETS", 200)
    caller = Caller(Host(Silent), greet=False)
    caller.raw([HELLO])
    parts = []
    for at in range(most.RESETS + 1):
        parts.append(frame(HEAD, 5, 2 * at + 1, block()) + frame(RST, 0, 2 * at + 1, number(8)))
    assert reason(caller, *parts) == CALM
    assert len(caller.host.calls) == most.RESETS + 1
    caller = Caller(Host(Silent), greet=False)
    caller.raw([HELLO])
    caller.core.feed(b"".join(parts[:-1]))
    caller.host.turn += 1
    caller.core.life.look(4, 1, 40)
    assert reason(caller, parts[-1]) is None


def test_calls_whose_time_is_over_may_all_be_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(most, "RESETS", 10)
    caller = Caller(Host(Silent), greet=False)
    caller.raw([HELLO])
    for at in range(1, 101, 2):
        caller.raw([frame(HEAD, 5, at, block(("grpc-timeout", "1S")))])
    caller.host.time += 0.95
    for at in range(1, 101, 2):
        assert reason(caller, frame(RST, 0, at, number(8))) is None
    assert not caller.core.streams


def test_a_bomb_of_headers() -> None:
    """One large header, kept in the table, and then named thousands of times by one byte each."""
    encoder = hpack.Encoder()
    first = encoder.encode([(":method", "POST"), (":path", "/a"), ("x", "y" * 3900)])
    caller = Caller(greet=False)
    assert reason(caller, HELLO, frame(HEAD, 5, 1, first)) is None
    assert reason(caller, frame(HEAD, 5, 3, b"\xbe" * 20)) == COMPRESSION
    caller = Caller(greet=False)
    assert reason(caller, HELLO, frame(HEAD, 5, 1, first)) is None
    assert reason(caller, frame(HEAD, 5, 3, b"\xbe" * 16_000)) == CALM


def test_data_beyond_what_was_granted() -> None:
    caller = Caller(greet=False)
    caller.raw([HELLO, OPEN])
    caller.host.calls[0].stream.pause()
    found = caller.raw([frame(DATA, 0, 1, bytes(1 << 20))] * 5)
    assert (RST, 0, 1, number(FLOW)) in found
    assert caller.host.held == 0


def test_a_caller_who_asks_and_does_not_read() -> None:
    caller = Caller(Host(ping_strikes=0), greet=False)
    caller.raw([HELLO])
    caller.core.accepts = False
    assert reason(caller, *[frame(PING, 0, 0, bytes(8))] * 999) is None
    assert reason(caller, *[frame(SETTINGS, 0, 0)] * 2) == CALM


# ---------------------------------------------------------------------------------------- time


def look(caller: Caller, times: int = 1, seconds: float = 1.0) -> None:
    for _ in range(times):
        caller.host.turn += 1
        caller.host.time += seconds
        caller.core.life.look(4, 100, 40)


def test_a_message_that_does_not_go_on() -> None:
    caller = Caller()
    slow, steady, idle = caller.begin(), caller.begin(), caller.begin()
    caller.turn()
    caller.send(slow, message(bytes(10_000))[:50], end=False)
    caller.send(steady, message(bytes(10_000))[:50], end=False)
    for _ in range(6):
        caller.send(slow, bytes(10), end=False) if slow not in caller.ended else None
        caller.send(steady, bytes(200), end=False)
        look(caller)
        caller.turn()
    assert caller.status(slow) == 4
    assert steady not in caller.ended
    assert idle not in caller.ended
    assert not caller.gone


def test_an_answer_that_is_not_taken() -> None:
    caller = Caller(window=10)
    caller.acknowledge = False
    number_of = caller.begin()
    caller.send(number_of, message(bytes(1000)))
    look(caller, 6)
    caller.turn()
    assert caller.reset[number_of] == 8
    assert not caller.core.streams


def test_pings_are_counted_as_grpc_does() -> None:
    ping = frame(PING, 0, 0, bytes(8))
    caller = Caller(Host(Silent, ping_interval_s=300.0), greet=False)
    caller.raw([HELLO, OPEN])
    for _ in range(5):
        assert reason(caller, ping) is None
        caller.host.time += 301
    caller.core.sent_since_ping = True
    assert reason(caller, ping, ping, ping) is None
    assert reason(caller, ping) == CALM
    caller = Caller(Host(ping_interval_s=300.0), greet=False)
    caller.raw([HELLO])
    for _ in range(3):
        assert reason(caller, ping) is None
        caller.host.time += 301
    assert reason(caller, ping) == CALM
    caller = Caller(Host(ping_interval_s=300.0, pings_without_calls=True), greet=False)
    caller.raw([HELLO])
    for _ in range(10):
        assert reason(caller, ping) is None
        caller.host.time += 301


def test_a_caller_who_is_silent_is_asked() -> None:
    caller = Caller(Host(Silent, keepalive_s=10.0, keepalive_timeout_s=5.0))
    number_of = caller.begin(end=True)
    caller.turn()
    look(caller, 12)
    pings = [event for event in caller.raw([]) if event[0] == PING]
    assert len(pings) == 1
    caller.core.feed(frame(PING, 1, 0, pings[0][3]))
    look(caller, 12)
    assert not caller.core.done
    assert len([event for event in caller.raw([]) if event[0] == PING]) == 1
    look(caller, 6)
    assert caller.core.over
    assert caller.host.calls[0].told[-1] == "cancelled"
    assert number_of not in caller.core.streams


def ends(caller: Caller, *parts: bytes) -> list[tuple[int, int]]:
    """Last stream and reason of every GOAWAY."""
    found = [payload for kind, _, _, payload in caller.raw(parts) if kind == GOAWAY]
    return [(int.from_bytes(payload[:4], "big"), int.from_bytes(payload[4:8], "big")) for payload in found]


EVERY = (1 << 31) - 1


def test_a_connection_without_calls_and_one_without_a_word() -> None:
    caller = Caller(greet=False)
    assert ends(caller, HELLO) == []
    look(caller, 30)
    assert ends(caller, unary(1, b"x")) == []
    look(caller, 40)
    assert ends(caller) == []
    look(caller, 1)
    assert ends(caller) == [(EVERY, 0)]
    look(caller, 2)
    assert ends(caller) == [(1, 0)]
    assert caller.core.done
    caller = Caller(greet=False)
    caller.core.feed(PREFACE[:10])
    look(caller, 5)
    assert caller.core.done


def test_the_end_of_a_connection_loses_no_call() -> None:
    caller = Caller(Host(Silent), greet=False)
    caller.raw([HELLO, OPEN])
    caller.core.life.drain()
    found = caller.raw([frame(HEAD, 4, 3, block()) + frame(DATA, 1, 3, message(b"on its way"))])
    assert found[0] == (GOAWAY, 0, 0, number(EVERY) + number(0))
    assert caller.host.calls[1].told == [b"on its way", "half closed"]
    assert ends(caller, frame(PING, 1, 0, found[1][3])) == [(3, 0)]
    caller.core.feed(frame(HEAD, 5, 5, block()))
    assert len(caller.host.calls) == 2
    assert not caller.core.done
    for call in caller.host.calls:
        call.stream.finish(0)
    assert caller.core.done


def test_an_old_connection() -> None:
    caller = Caller(Host(Silent, age_s=10.0, age_grace_s=5.0), greet=False)
    caller.raw([HELLO, OPEN])
    look(caller, 11)
    assert ends(caller) == [(EVERY, 0)]
    look(caller, 2)
    assert ends(caller) == [(1, 0)]
    assert not caller.core.done
    look(caller, 3)
    assert ends(caller) == [(1, 0)]
    assert caller.core.over
    assert caller.host.calls[0].told == ["cancelled"]


# ---------------------------------------------------------------------------------------- anything at all

KINDS = st.one_of(st.integers(0, 9), st.integers(0, 255))
FRAMES = st.builds(frame, KINDS, st.one_of(st.sampled_from([0, 1, 4, 5, 8, 9, 13, 0x2C]), st.integers(0, 255)),
                   st.one_of(st.integers(0, 7), st.integers(0, (1 << 32) - 1)),
                   st.one_of(st.binary(max_size=40), st.just(block()), st.just(message(b"abc")),
                             st.just(bytes(4)), st.just(bytes(8)), st.just(number(1))))  # fmt: skip


@settings(max_examples=examples(150))
@given(st.lists(FRAMES, max_size=25), st.integers(1, 60), st.booleans())
def test_whatever_comes_nothing_is_raised(frames: list[bytes], size: int, silent: bool) -> None:
    host = Host(Silent if silent else Echo)
    core = Http2(host, "caller", lambda: None)
    data = HELLO + OPEN + b"".join(frames)
    for at in range(0, len(data), size):
        core.feed(data[at : at + size])
    host.turn, host.time = 100, 1e6
    core.life.look(4, 1, 40)
    core.lost()
    assert host.held == 0
    assert not core.streams
    for call in host.calls:
        ends: list[Any] = [word for word in call.told if word in ("cancelled", "half closed")]
        assert len(ends) == 1 or ends == ["half closed", "cancelled"]
