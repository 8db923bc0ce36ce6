"""gRPC calls over HTTP/2 without a socket, with the package `h2` as the client: streams, messages with compression,
limits and timeouts; and what the listener adds to its connections: deadlines, and an end for silent clients."""

from __future__ import annotations

import gzip
import random
import zlib
from contextlib import suppress
from itertools import pairwise
from typing import Any

import hpack
import pytest
from h2.exceptions import StreamClosedError
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shmserve.gateway.http2 import limits
from shmserve.gateway.http2.connection import LAST_CALLS_S, Http2Connection
from shmserve.gateway.http2.limits import INFLATED_BYTES, Http2Limits
from shmserve.gateway.http2.listener import DEADLINE_S, RpcListener
from shmserve.gateway.http2.protocol import Http2
from shmserve.gateway.kserve.answers import Buffer
from shmserve.gateway.limits.backlog import CONNECTION_WORK
from shmserve.gateway.limits.body_budget import Budget
from shmserve.gateway.limits.turns import SLICE_BYTES
from shmserve.protocol.grpc.codes import Code, RpcError
from tests.support.cases import cases
from tests.support.gateway.http2_caller import Caller, Echo, Host, Unfinished
from tests.support.gateway.http2_frames import (
    CONTINUATION,
    DATA,
    HEAD,
    HELLO,
    PING,
    PRIORITY,
    WINDOW,
    block,
    frame,
    message,
    number,
)
from tests.support.gateway.http_connection import receive, shared
from tests.support.hypothesis_profiles import examples
from tests.support.manual_loop import ManualLoop


def test_the_stream_of_a_call_has_its_headers() -> None:
    caller = Caller()
    caller.host.time = 100.0
    caller.call(b"", ("grpc-timeout", "250m"), ("x-more", "1"), ("x-more", "2"), ("user-agent", "me"))
    stream = caller.host.calls[0].stream
    assert (stream.path, stream.metadata) == ("/test.Echo/Unary", {"x-more": "1,2", "user-agent": "me"})
    assert stream.expires == 100.25
    assert not caller.host.expiring


def test_cached_headers_are_those_of_equal_blocks() -> None:
    caller = Caller()
    order = ["/a", "/b", "/a", "/a", "/c", "/b", "/b", "/a", "/c", *[f"/{n}" for n in range(100)], "/a", "/b"]
    for path in order:
        caller.begin(path=path, end=True)
        caller.turn()
    assert [call.stream.path for call in caller.host.calls] == order


def test_a_service_provides_the_memory_of_large_messages() -> None:
    received: list[Any] = []

    class Call(Echo):
        def message(self, data: Buffer) -> None:
            received.append(data)

    caller = Caller(Host(Call))
    sent = [b"R" + bytes(200_000), b"x" + bytes(200_000), b"R" + bytes(30_000), b"R" * 100_000]
    stream = caller.begin()
    everything = b"".join(map(message, sent))
    for at in range(0, len(everything), 10_000):
        caller.send(stream, everything[at : at + 10_000], end=False)
    first, last = caller.host.calls[0].rooms
    assert received == sent
    assert received[0] is first
    assert received[3] is last
    zipped = gzip.compress(b"R" * 500_000 + random.Random(1).randbytes(200_000))
    caller.send(stream, message(zipped, 1)[:100_000], end=False)
    assert len(caller.host.calls[0].rooms) == 2


def test_responses_wait_for_the_window_and_share_it() -> None:
    caller, size = Caller(window=1 << 30), 3_000_000
    caller.acknowledge = False
    streams = caller.begin(), caller.begin()
    for stream, letter in zip(streams, (b"a", b"b"), strict=True):
        caller.send(stream, message(letter * size))
    assert {stream: len(body) for stream, body in caller.bodies.items()} == {streams[0]: 65_535}
    for _ in range(60):
        caller.h2.increment_flow_control_window(100_000)
        caller.turn()
    assert min(len(caller.bodies[stream]) for stream in streams) > 2_500_000
    caller.h2.increment_flow_control_window(2 * size)
    caller.turn()
    assert [caller.answer(stream) for stream in streams] == [b"a" * size, b"b" * size]
    assert not caller.core.streams.open


def test_a_service_is_paused_when_much_is_unsent() -> None:
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
    stream = caller.begin()
    caller.core.feed(caller.h2.data_to_send() + frame(DATA, 1, stream, message(b"")))
    assert caller.host.calls[0].left == 39
    caller.turn()
    assert len(caller.messages(stream)) == 51
    assert caller.status(stream) == 0


def test_the_window_of_a_paused_stream_is_not_replenished() -> None:
    caller = Caller()
    stream = caller.begin()
    caller.send(stream, message(b"1"), end=False)
    call = caller.host.calls[0]
    call.stream.pause()
    size = 0
    while caller.h2.local_flow_control_window(stream) >= 10_005:
        caller.send(stream, message(b"x" * 10_000), end=False)
        size += 1
    assert call.events == [b"1"]
    assert caller.host.held >= size * 10_000
    assert caller.call(b"another stream") == (b"another stream", 0)
    call.stream.unpause()
    caller.turn()
    assert call.events.count(b"x" * 10_000) == size
    assert caller.host.held == 0
    assert caller.h2.local_flow_control_window(stream) > 1_000_000
    caller.h2.end_stream(stream)
    caller.turn()
    assert caller.status(stream) == 0
    assert len(caller.messages(stream)) == 1 + size


def test_a_service_can_pause_at_each_message() -> None:
    class Slow(Echo):
        def message(self, data: Buffer) -> None:
            super().message(data)
            self.stream.pause()

    caller = Caller(Host(Slow))
    stream = caller.begin()
    caller.send(stream, b"".join(message(bytes([n])) for n in range(5)))
    call = caller.host.calls[0]
    for n in range(1, 6):
        assert call.events == [bytes([m]) for m in range(n)]
        call.stream.unpause()
        caller.turn()
    assert (call.events[-1], caller.status(stream), caller.host.held) == ("half closed", 0, 0)


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (RpcError(Code.NOT_FOUND, "no such modèl\n100%"), 5, "no such mod%C3%A8l%0A100%25"),
        (ZeroDivisionError(), 13, ""),
    ],
)
@pytest.mark.parametrize("place", ["headers", "message", "half_closed"])
def test_a_service_ends_a_call(error: Exception, status: int, text: str, place: str) -> None:
    """At its headers, its message or its end. The stream of a client that has not finished is reset."""

    def fail(*arguments: Any) -> Any:
        raise error

    application = fail if place == "headers" else type("Fails", (Echo,), {place: fail})
    caller = Caller(Host(application))
    stream = caller.begin()
    caller.turn()
    if place != "headers":
        caller.send(stream, message(b"x"), end=place == "half_closed")
    assert caller.status(stream) == status
    assert text in caller.ended[stream]["grpc-message"]
    assert caller.reset == ({} if place == "half_closed" else {stream: 0})
    assert not caller.core.streams.open


def test_an_exception_in_a_cancellation_does_not_affect_other_calls(caplog: pytest.LogCaptureFixture) -> None:
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
    caller.core.streams.resumed()
    caller.core.streams.lost()
    assert [call.events for call in caller.host.calls] == [["cancelled"] * 2] * 2
    assert caplog.messages == ["a service failed"] * 4


def test_a_call_is_cancelled_by_its_client() -> None:
    caller = Caller(Host(Unfinished))
    stream = caller.begin(("grpc-timeout", "1H"))
    caller.send(stream, message(b"x"))
    assert len(caller.host.expiring) == 1
    caller.h2.reset_stream(stream, 8)
    caller.turn()
    call = caller.host.calls[0]
    assert call.events[-1] == "cancelled"
    call.stream.send([b"too late"])
    call.stream.finish(0)
    call.stream.pause()
    call.stream.unpause()
    assert caller.raw([]) == []
    assert not caller.host.expiring
    assert not caller.core.streams.open


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
    + frame(WINDOW, 0, 0, number(5))
    + frame(DATA, 0, 3, message(b"x" * 3000)[2000:])
    + frame(DATA, 0x8, 3, b"\0")
    + frame(HEAD, 5, 3, hpack.Encoder().encode([("a", "trailer")]))
)


def events(pieces: list[bytes]) -> list[list[Any]]:
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
    assert not core.streams.over
    assert not host.held
    return [call.events for call in host.calls]


@settings(max_examples=examples(60))
@example([])
@example(list(range(len(LONG))))
@example(list(range(0, len(LONG), 3)))
@given(st.lists(st.integers(0, len(LONG)), max_size=30))
def test_events_do_not_depend_on_the_borders_of_pieces(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(LONG)]
    expected = [[b"padded", "half closed"], [b"one", b"two", b"x" * 3000, "half closed"]]
    for direct in limits.DIRECT_BYTES, 500:  # parts of the largest message are read into its buffer
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(limits, "DIRECT_BYTES", direct)
            assert events([LONG[a:b] for a, b in pairwise(places)]) == expected


def test_deadlines_are_kept_in_any_order() -> None:
    loop: Any = ManualLoop()
    listener: Any = RpcListener(shared(loop), Http2Connection, Unfinished, Http2Limits(), Budget(), lambda: None)
    caller = Caller(listener, opening=HELLO)
    for stream, timeout in ((1, "1H"), (3, "50m"), (5, "150m"), (7, "100m")):
        caller.raw([frame(HEAD, 5, stream, block(("grpc-timeout", timeout)))])

    def ended(seconds: float) -> list[int]:
        loop.advance(seconds)
        answers = [(stream, payload) for kind, _, stream, payload in caller.raw([]) if kind == HEAD]
        assert all(b"Deadline Exceeded" in payload for _, payload in answers)
        return [stream for stream, _ in answers]

    assert ended(0.05) == []
    assert ended(2 * DEADLINE_S) == [3]
    assert ended(0.1) == [7, 5]
    assert ended(3590) == []
    assert ended(20) == [1]
    assert listener.answers == {4: 4}


def test_a_client_that_does_not_answer_does_not_delay_the_end() -> None:
    host = Host()
    connection, transport = host.connect()
    receive(connection, HELLO)
    connection.stop()
    host.loop.advance(LAST_CALLS_S - 0.01)
    assert not transport.closed
    host.loop.advance(0.01)
    assert transport.closed


@pytest.mark.parametrize(("name", "deflate"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_compressed_messages(name: str, deflate: Any) -> None:
    caller = Caller(Host(compression=1))
    data = b"to be compressed " * 1000
    number = caller.begin(("grpc-encoding", name), ("grpc-accept-encoding", f"identity,{name}"))
    caller.send(number, message(deflate(data), 1) + message(b"plain"))
    assert caller.host.calls[0].events == [data, b"plain", "half closed"]
    first, second = caller.messages(number)
    assert zlib.decompress(first, 47) == data
    assert len(first) < len(data)
    assert second == b"plain"
    assert (bytes(caller.bodies[number])[0], caller.ended[number]["grpc-encoding"]) == (1, name)


ZIPPED = ("grpc-encoding", "gzip")
SLICE = 4 * SLICE_BYTES
"""Bytes of output per slice."""


# With ids: compressed data contains the time, and each xdist worker must collect the same tests.
@pytest.mark.parametrize(
    ("headers", "data"),
    [
        pytest.param([("grpc-encoding", "snappy")], message(b"x", 1), id="unknown compression"),
        pytest.param([ZIPPED], message(b"not gzip", 1), id="not gzip"),
        pytest.param([ZIPPED], message(gzip.compress(b"x")[:-1], 1), id="incomplete gzip"),
        pytest.param([], message(gzip.compress(b"x"), 1), id="gzip without a header"),
        pytest.param([], message(b"x", 7), id="unknown flag"),
        pytest.param([], message(b"abc")[:-1], id="incomplete message"),
        pytest.param([], b"\0\0", id="incomplete prefix"),
    ],
)
def test_an_invalid_message_ends_its_call(headers: list[tuple[str, str]], data: bytes) -> None:
    caller = Caller()
    number = caller.begin(*headers)
    with suppress(StreamClosedError):  # refused by its headers
        caller.send(number, data)
    unknown = ("grpc-encoding", "snappy") in headers
    assert caller.status(number) == (Code.UNIMPLEMENTED if unknown else Code.INTERNAL)
    assert caller.ended[number].get("grpc-accept-encoding", "") == ("identity,deflate,gzip" if unknown else "")


class Recorder(Echo):
    """Does not answer messages."""

    def message(self, data: Any) -> None:
        self.events.append(bytes(data))


def test_inflated_bytes_count_against_the_budget_and_the_limit() -> None:
    bomb = gzip.compress(bytes(32 << 20))
    for host, code in (
        (Host(Recorder, held_bytes=8 << 20), Code.UNAVAILABLE),
        (Host(Recorder, message_bytes=4 << 20), Code.RESOURCE_EXHAUSTED),
    ):
        caller = Caller(host)
        number = caller.begin(ZIPPED)
        caller.send(number, message(bomb, 1), end=False)
        assert caller.status(number) == code
        assert (host.calls[0].events, host.held) == (["cancelled"], 0)


def test_the_message_of_a_cancelled_call_is_not_inflated_further() -> None:
    caller = Caller(Host(Recorder))
    number = caller.begin(ZIPPED)
    caller.h2.send_data(number, message(gzip.compress(bytes(16 << 20)), 1))
    caller.core.feed(caller.h2.data_to_send())
    assert caller.host.held > SLICE
    caller.h2.reset_stream(number)
    caller.core.feed(caller.h2.data_to_send())
    assert caller.host.held == 0
    caller.host.loop.run()
    assert caller.host.calls[0].events == ["cancelled"]


@pytest.mark.parametrize("part", [message(gzip.compress(bytes(SLICE // 2)), 1), message(b"")])
def test_many_messages_in_one_frame_take_many_turns(part: bytes) -> None:
    caller = Caller(Host(Recorder))
    number = caller.begin(ZIPPED)
    count = 250_000 // len(part) if part[0] else 1000
    sent = part * count
    for at in range(0, len(sent), 16_384):
        caller.h2.send_data(number, sent[at : at + 16_384], end_stream=at + 16_384 >= len(sent))
    caller.core.feed(caller.h2.data_to_send())
    call = caller.host.calls[0]
    before, most = len(call.events), 0
    assert before <= CONNECTION_WORK
    while caller.core.more or caller.host.loop.soon:
        before = len(call.events)
        if caller.core.more:
            caller.core.feed(b"")
        caller.host.loop.iterate()
        most = max(most, sum(len(data) // INFLATED_BYTES + 1 for data in call.events[before:]))
    assert most <= 2 * CONNECTION_WORK + SLICE // INFLATED_BYTES
    assert (len(call.events), call.events[-1]) == (count + 1, "half closed")


def test_a_large_response_is_compressed_in_slices() -> None:
    caller = Caller(Host(Recorder, compression=9), window=1 << 30)
    number = caller.begin(("grpc-accept-encoding", "gzip"))
    caller.core.feed(caller.h2.data_to_send())
    call, data = caller.host.calls[0], bytes(4 << 20)
    call.stream.send([data])
    assert not call.stream.writable
    call.stream.send([b"behind it"])
    assert caller.host.loop.run() == len(data) // SLICE_BYTES - 1
    assert call.events == ["resume"]
    call.stream.finish(0)
    caller.turn()
    first, second = caller.messages(number)
    assert gzip.decompress(first) == data
    assert second == b"behind it"
    assert caller.status(number) == 0


def test_messages_over_the_limits_end_their_calls() -> None:
    caller = Caller(Host(message_bytes=100_000, held_bytes=400_020))
    assert caller.call(b"a" * 100_000) == (b"a" * 100_000, 0)
    number = caller.begin()
    caller.send(number, message(b"a" * 100_001)[:1000], end=False)
    assert caller.status(number) == Code.RESOURCE_EXHAUSTED
    assert "100001 vs. 100000" in caller.ended[number]["grpc-message"]
    assert "--grpc-max-input-size" in caller.ended[number]["grpc-message"]
    first, second = caller.begin(), caller.begin()
    caller.send(first, message(b"a" * 80_000)[:1000], end=False)
    caller.send(second, message(b"a" * 80_000)[:60_000], end=False)
    assert caller.host.held == 1000 - 5 + 60_000 - 5
    caller.send(second, message(b"a" * 80_000)[60_000:], end=False)
    caller.send(first, message(b"a" * 80_000)[1000:79_000], end=False)
    third = caller.begin()
    caller.send(third, message(b"a" * 80_000)[:60_000], end=False)
    assert caller.status(third) == Code.UNAVAILABLE, "the connection would exceed its share, a quarter"
    caller.send(first, message(b"a" * 80_000)[79_000:])
    assert caller.status(first) == 0
    assert caller.host.held == 0
    assert not caller.gone


@cases(
    ("soon", Code.INTERNAL),
    ("123456789S", Code.INTERNAL),
    ("", Code.INTERNAL),
    ("99999999H", Code.OK),
    ("0n", Code.OK),
)
def test_grpc_timeout(timeout: str, status: int) -> None:
    assert Caller().call(b"", ("grpc-timeout", timeout))[1] == status
