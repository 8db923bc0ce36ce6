"""HTTP/2 under gRPC without a socket: `h2` as the caller, and callers who keep no rules."""

from __future__ import annotations

import gzip
import random
from itertools import pairwise
from typing import Any

import hpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.gateway.http2.codes import Code, RpcError
from shmserve.gateway.http2.interface import TransportStream
from shmserve.gateway.http2.protocol import Http2
from shmserve.gateway.kserve.answers import Buffer
from tests.support.gateway.http2_caller import HEADERS, Caller, Echo, Host, message
from tests.support.hypothesis_profiles import examples

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEAD, PRIORITY, RST, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)
CALM, PROTOCOL, FLOW, SIZE, COMPRESSION = 11, 1, 3, 6, 9


def frame(kind: int, flags: int, number: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + number.to_bytes(4, "big") + payload


def block(*more: tuple[str, str]) -> bytes:
    found: bytes = hpack.Encoder().encode([*HEADERS, *more])
    return found


HELLO = PREFACE + frame(SETTINGS, 0, 0)


def unary(number: int, data: bytes) -> bytes:
    return frame(HEAD, 4, number, block()) + frame(DATA, 1, number, message(data))


# ---------------------------------------------------------------------------------------- calls


def test_one_call() -> None:
    caller = Caller()
    assert caller.call(b"hello") == (b"hello", 0)
    assert caller.host.calls[0].told == [b"hello", "half closed"]
    headers = caller.ended[1]
    assert headers[":status"] == "200"
    assert headers["content-type"] == "application/grpc"
    assert caller.host.answers == {0: 1}
    assert not caller.core.streams


def test_many_calls_one_after_another_and_at_once() -> None:
    caller = Caller()
    for size in (0, 1, 5, 300, 70_000):
        assert caller.call(b"a" * size) == (b"a" * size, 0)
    numbers = [caller.begin() for _ in range(100)]
    for number in numbers:
        caller.h2.send_data(number, message(str(number).encode()), end_stream=True)
    caller.turn()
    for number in numbers:
        assert caller.answer(number) == str(number).encode()
        assert caller.status(number) == 0


def test_what_the_service_is_told_of_the_call() -> None:
    seen: list[TransportStream] = []

    class Call(Echo):
        def __init__(self, stream: TransportStream) -> None:
            super().__init__(stream)
            seen.append(stream)

    caller = Caller(Host(Call))
    caller.host.time = 100.0
    caller.call(b"", ("grpc-timeout", "250m"), ("x-more", "1"), ("x-more", "2"), ("user-agent", "me"))
    assert seen[0].path == "/test.Echo/Unary"
    assert seen[0].metadata == {"x-more": "1,2", "user-agent": "me"}
    assert seen[0].expires == 100.25
    assert seen[0].peer == "caller"
    assert not caller.host.expiring


def test_equal_headers_are_looked_up_and_others_are_not_mixed_up() -> None:
    paths: list[str] = []

    class Call(Echo):
        def __init__(self, stream: TransportStream) -> None:
            super().__init__(stream)
            paths.append(stream.path)

    caller = Caller(Host(Call))
    order = ["/a", "/b", "/a", "/a", "/c", "/b", "/b", "/a", "/c", *[f"/{n}" for n in range(100)], "/a", "/b"]
    for path in order:
        caller.begin(path=path, end=True)
        caller.turn()
    assert paths == order


def test_messages_of_a_stream_and_their_borders() -> None:
    caller = Caller()
    sent = [b"a" * size for size in (0, 3, 100_000, 1, 20_000)]
    number = caller.begin()
    everything = b"".join(map(message, sent))
    for at in range(0, len(everything), 7001):
        caller.send(number, everything[at : at + 7001], end=False)
    caller.h2.end_stream(number)
    caller.turn()
    assert caller.messages(number) == sent
    assert caller.status(number) == 0
    assert caller.host.held == 0


def test_large_messages_pass_small_windows() -> None:
    caller = Caller(window=1000)
    data = bytes(range(256)) * 4000
    assert caller.call(data) == (data, 0)


def test_a_large_message_is_read_where_it_belongs() -> None:
    caller = Caller(window=100 << 20)
    data = bytes(range(256)) * 4000
    caller.h2.increment_flow_control_window(100 << 20)
    number = caller.begin()
    caller.turn()
    whole = frame(DATA, 1, number, message(data))
    caller.core.feed(whole[:30])
    sent = 30
    while sent < len(whole):
        space = caller.core.space()
        if space is None:
            caller.core.feed(whole[sent:])
            break
        assert len(space) <= (len(whole) if sent >= 65_536 else 14 + 65_536) - sent, "the rest, once a part has come"
        count = min(100_000, len(space))
        space[:count] = whole[sent : sent + count]
        caller.core.fill(count)
        sent += count
    caller.turn()
    assert caller.answer(number) == data
    assert caller.status(number) == 0
    assert caller.host.held == 0


def test_a_service_says_where_large_messages_belong() -> None:
    given: list[Any] = []

    class Call(Echo):
        def message(self, data: Buffer) -> None:
            given.append(data)

    caller = Caller(Host(Call))
    sent = [b"R" + bytes(200_000), b"x" + bytes(200_000), b"R" + bytes(30_000), b"R" * 100_000]
    number = caller.begin()
    everything = b"".join(map(message, sent))
    for at in range(0, len(everything), 10_000):
        caller.send(number, everything[at : at + 10_000], end=False)
    first, last = caller.host.calls[0].rooms
    assert given == sent
    assert given[0] is first
    assert given[3] is last
    caller.send(
        number, message(gzip.compress(b"R" * 500_000 + random.Random(1).randbytes(200_000)), 1)[:100_000], end=False
    )
    assert len(caller.host.calls[0].rooms) == 2


def test_what_the_caller_does_not_take_waits_and_all_get_their_turn() -> None:
    caller = Caller(window=1 << 30)
    caller.acknowledge = False
    one, other = caller.begin(), caller.begin()
    caller.send(one, message(b"a" * 3_000_000))
    caller.send(other, message(b"b" * 3_000_000))
    assert len(caller.bodies[one]) == 65_535
    assert other not in caller.bodies
    assert caller.core.streams.keys() == {one, other}
    for _ in range(60):
        caller.h2.increment_flow_control_window(100_000)
        caller.turn()
    shares = len(caller.bodies[one]), len(caller.bodies[other])
    assert min(shares) > 2_500_000
    caller.h2.increment_flow_control_window(6_000_000)
    caller.turn()
    assert caller.answer(one) == b"a" * 3_000_000
    assert caller.answer(other) == b"b" * 3_000_000
    assert not caller.core.streams


def test_writable_and_resume() -> None:
    caller = Caller(window=10)
    caller.acknowledge = False
    number = caller.begin()
    caller.send(number, message(b"a" * 100), end=False)
    call = caller.host.calls[0]
    assert not call.stream.writable
    assert "resume" not in call.told
    caller.h2.increment_flow_control_window(1000, number)
    caller.turn()
    assert call.stream.writable
    assert call.told[-1] == "resume"
    caller.core.accepts = False
    assert not call.stream.writable
    caller.core.resumed()
    assert call.told[-2:] == ["resume", "resume"]


def test_no_more_is_made_ready_than_the_socket_takes() -> None:
    class Much(Echo):
        left = 50

        def half_closed(self) -> None:
            self.resume()

        def resume(self) -> None:
            while self.left and self.stream.writable:
                self.stream.send([bytes(100_000)])
                self.left -= 1
            if not self.left:
                self.stream.finish(0)

    caller = Caller(Host(Much), window=100 << 20)
    caller.h2.increment_flow_control_window(100 << 20)
    caller.turn()
    number = caller.begin()
    caller.core.feed(caller.h2.data_to_send() + frame(DATA, 1, number, message(b"")))
    assert caller.host.calls[0].left == 39
    caller.turn()
    assert len(caller.messages(number)) == 51
    assert caller.status(number) == 0


def test_a_paused_stream_keeps_what_comes_and_slows_the_caller_down() -> None:
    caller = Caller()
    number = caller.begin()
    caller.send(number, message(b"1"), end=False)
    call = caller.host.calls[0]
    call.stream.pause()
    size = 0
    while caller.h2.local_flow_control_window(number) >= 10_005:
        caller.send(number, message(b"x" * 10_000), end=False)
        size += 1
    assert call.told == [b"1"]
    assert caller.host.held >= size * 10_000
    other = caller.call(b"others go on")
    assert other == (b"others go on", 0)
    call.stream.unpause()
    caller.turn()
    assert call.told.count(b"x" * 10_000) == size
    assert caller.host.held == 0
    assert caller.h2.local_flow_control_window(number) > 1_000_000
    caller.h2.end_stream(number)
    caller.turn()
    assert caller.status(number) == 0
    assert len(caller.messages(number)) == 1 + size


def test_a_service_may_pause_at_every_message() -> None:
    class Slow(Echo):
        def message(self, data: Buffer) -> None:
            super().message(data)
            self.stream.pause()

    caller = Caller(Host(Slow))
    number = caller.begin()
    caller.send(number, b"".join(message(bytes([n])) for n in range(5)))
    call = caller.host.calls[0]
    for n in range(1, 6):
        assert call.told == [bytes([m]) for m in range(n)]
        call.stream.unpause()
        caller.turn()
    assert call.told[-1] == "half closed"
    assert caller.status(number) == 0
    assert caller.host.held == 0


def test_calls_that_end_before_the_caller_does() -> None:
    class Refuses(Echo):
        def message(self, data: Buffer) -> None:
            raise RpcError(Code.NOT_FOUND, "no such modèl\n100%")

    caller = Caller(Host(Refuses))
    number = caller.begin()
    caller.send(number, message(b"x"), end=False)
    assert caller.status(number) == 5
    assert caller.ended[number]["grpc-message"] == "no such mod%C3%A8l%0A100%25"
    assert caller.reset[number] == 0
    assert caller.host.calls[0].told == ["cancelled"]


def test_a_service_that_refuses_at_once_and_one_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    def refuses(stream: TransportStream) -> Any:
        raise RpcError(Code.UNIMPLEMENTED, "unknown service")

    class Fails(Echo):
        def half_closed(self) -> None:
            raise ZeroDivisionError

    caller = Caller(Host(refuses))
    number = caller.begin(end=True)
    caller.turn()
    assert caller.status(number) == 12
    assert number not in caller.reset
    caller = Caller(Host(Fails))
    assert caller.call(b"x")[1] == Code.INTERNAL
    assert "ZeroDivisionError" in caplog.text

    def fails(stream: TransportStream) -> Any:
        raise KeyError

    caller = Caller(Host(fails))
    assert caller.call(b"x")[1] == Code.INTERNAL


def test_a_service_that_fails_to_be_cancelled_harms_no_other(caplog: pytest.LogCaptureFixture) -> None:
    class Fails(Echo):
        def half_closed(self) -> None: ...

        def cancelled(self) -> None:
            super().cancelled()
            raise ZeroDivisionError

        resume = cancelled

    caller = Caller(Host(Fails))
    for _ in range(2):
        caller.begin(end=True)
    caller.turn()
    caller.core.resumed()
    caller.core.lost()
    assert [call.told for call in caller.host.calls] == [["cancelled"] * 2] * 2
    assert caplog.messages == ["a service failed"] * 4


def test_the_caller_takes_a_call_back() -> None:
    class Silent(Echo):
        def half_closed(self) -> None:
            self.told.append("half closed")

    caller = Caller(Host(Silent))
    number = caller.begin(("grpc-timeout", "1H"))
    caller.send(number, message(b"x"))
    assert len(caller.host.expiring) == 1
    caller.h2.reset_stream(number, 8)
    caller.turn()
    call = caller.host.calls[0]
    assert call.told[-1] == "cancelled"
    call.stream.send([b"too late"])
    call.stream.finish(0)
    call.stream.pause()
    call.stream.unpause()
    assert caller.raw([]) == []
    assert not caller.host.expiring
    assert not caller.core.streams


def test_the_connection_ends_with_calls_in_flight() -> None:
    caller = Caller()
    number = caller.begin()
    caller.send(number, message(b"x" * 100_000)[:5000], end=False)
    assert caller.host.held == 5000 - 5, "what has arrived, and not what was announced"
    caller.core.lost()
    assert caller.host.calls[0].told == ["cancelled"]
    assert caller.host.held == 0


# ---------------------------------------------------------------------------------------- bytes in any pieces

LONG = (
    HELLO
    + frame(HEAD, 0, 1, block()[:5])
    + frame(CONTINUATION, 0, 1, block()[5:9])
    + frame(CONTINUATION, 4, 1, block()[9:])
    + frame(DATA, 0x8, 1, b"\x03" + message(b"padded")[:4] + bytes(3))
    + frame(PING, 0, 0, b"12345678")
    + frame(HEAD, 0x2C, 3, b"\x02" + bytes(5) + block() + bytes(2))
    + frame(0x99, 0xFF, 7, b"unknown" * 30)
    + frame(DATA, 1, 1, message(b"padded")[4:])
    + frame(PRIORITY, 0, 3, bytes(5))
    + frame(DATA, 0, 3, message(b"one") + message(b"two")[:3])
    + frame(DATA, 0, 3, message(b"two")[3:] + message(b"x" * 3000)[:100])
    + frame(DATA, 0x8, 3, bytes([40]) + message(b"x" * 3000)[100:2000] + bytes(40))
    + frame(WINDOW, 0, 0, (5).to_bytes(4, "big"))
    + frame(DATA, 0, 3, message(b"x" * 3000)[2000:])
    + frame(DATA, 0x8, 3, b"\0")
    + frame(HEAD, 5, 3, hpack.Encoder().encode([("a", "trailer")]))
)


def told(pieces: list[bytes]) -> list[list[Any]]:
    host = Host()
    core = Http2(host, "caller", lambda: None)
    for piece in pieces:
        space = core.space()
        while space is not None and piece:
            size = min(len(space), len(piece))
            space[:size] = piece[:size]
            core.fill(size)
            piece = piece[size:]
            space = core.space()
        core.feed(piece)
    assert not core.over
    assert not host.held
    return [call.told for call in host.calls]


def test_the_same_bytes_in_any_pieces() -> None:
    expected = [[b"padded", "half closed"], [b"one", b"two", b"x" * 3000, "half closed"]]
    assert told([LONG]) == expected
    for size in (1, 2, 3, 7, 100):
        assert told([LONG[at : at + size] for at in range(0, len(LONG), size)]) == expected


@settings(max_examples=examples(60))
@given(st.lists(st.integers(0, len(LONG)), max_size=30))
def test_the_same_bytes_in_random_pieces(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(LONG)]
    assert told([LONG[a:b] for a, b in pairwise(places)]) == told([LONG])
