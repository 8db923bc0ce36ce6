"""Clients that break the protocol or abuse it: each is disconnected or loses its call, and no other call is affected.

test_conformance.py has the rules of the RFC.
"""

from __future__ import annotations

import hpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.gateway.http2 import limits
from shmserve.gateway.http2.protocol import Http2
from tests.support.gateway.http2_caller import Caller, Echo, Host, Unfinished
from tests.support.gateway.http2_frames import (
    CALM,
    COMPRESSION,
    CONTINUATION,
    DATA,
    FLOW,
    GOAWAY,
    HEAD,
    HELLO,
    OPEN,
    PING,
    PREFACE,
    PRIORITY,
    PROTOCOL,
    RST,
    SETTINGS,
    SIZE,
    WINDOW,
    block,
    frame,
    message,
    number,
    unary,
)
from tests.support.hypothesis_profiles import examples

MANY = 10_001
WRONG: dict[str, tuple[bytes, int]] = {
    "an acknowledgement at first": (frame(SETTINGS, 1, 0), PROTOCOL),
    "many settings": (frame(SETTINGS, 0, 0, bytes(6000)), SIZE),
    "a frame over the limit, announced": (b"\x20\0\0\0\0\0\0\0\1", SIZE),
    "headers over the limit": (frame(HEAD, 4, 1, bytes(40_000)), CALM),
    "headers over the limit, announced": (frame(HEAD, 4, 1, bytes(40_000))[:50], CALM),
    "headers with no padding where it should be": (frame(HEAD, 0xC, 1), PROTOCOL),
    "headers cut short": (frame(HEAD, 4, 1, block()[:-3]), COMPRESSION),
    "three sizes of the table": (frame(HEAD, 4, 1, b"\x20\x3f\x85\x01\x20" + block()), COMPRESSION),
    "a continuation of another stream": (frame(HEAD, 0, 1, block()) + frame(CONTINUATION, 4, 3), PROTOCOL),
    "many continuations": (frame(HEAD, 0, 1) + frame(CONTINUATION, 0, 1) * 1000, CALM),
    "large continuations": (frame(HEAD, 0, 1) + frame(CONTINUATION, 0, 1, bytes(16_384)) * 3, CALM),
    "data beyond the last stream": (OPEN + frame(DATA, 0, 3, b"x"), PROTOCOL),
    "many pings": (frame(PING, 0, 0, bytes(8)) * 4, CALM),
    "much SETTINGS": (frame(SETTINGS, 0, 0) * MANY, CALM),
    "much empty DATA": (OPEN + frame(DATA, 0, 1) * MANY, CALM),
    "much PRIORITY": (frame(PRIORITY, 0, 1, bytes(5)) * MANY, CALM),
    "many unknown frames": (frame(200, 0, 1) * MANY, CALM),
    "many resets of an ended call": (unary(1, b"x") + frame(RST, 0, 1, number(8)) * MANY, CALM),
    "a window that grows byte by byte": (
        frame(SETTINGS, 0, 0, b"\0\4" + bytes(4)) + unary(1, bytes(20_000)) + frame(WINDOW, 0, 1, number(1)) * MANY,
        CALM,
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_client_that_breaks_the_protocol_is_disconnected(name: str) -> None:
    data, expected = WRONG[name]
    caller = Caller(opening=b"")
    assert caller.errors((PREFACE if name.endswith("at first") else HELLO) + data) == [expected]
    assert not caller.core.streams.open
    assert not caller.host.held
    assert caller.raw([unary(9, b"more")]) == []


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


@pytest.mark.parametrize(("opening", "settings", "pings", "error"), [
    (HELLO + OPEN, {}, 6, []),
    (HELLO, {}, 4, [CALM]),
    (HELLO, {"pings_without_calls": True}, 10, []),
], ids=["with a call", "without calls", "allowed without calls"])  # fmt: skip
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
