"""What calls of gRPC may carry: compressed messages, limits, timeouts, and what is no gRPC at all."""

from __future__ import annotations

import gzip
import zlib
from typing import Any

import pytest

from shmserve.gateway.http2.codes import Code
from shmserve.gateway.http2.limits import INFLATED_BYTES, WORK
from shmserve.gateway.limits.turns import SLICE_BYTES
from tests.support.gateway.http2_caller import HEADERS, Caller, Echo, Host, message
from tests.unit.gateway.http2.test_http2 import HEAD, RST, block, frame

# ---------------------------------------------------------------------------------------- compression


@pytest.mark.parametrize(("name", "deflate"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_compressed_messages(name: str, deflate: Any) -> None:
    caller = Caller(Host(compression=1))
    data = b"to be compressed " * 1000
    number = caller.begin(("grpc-encoding", name), ("grpc-accept-encoding", f"identity,{name}"))
    caller.send(number, message(deflate(data), 1) + message(b"plain"))
    assert caller.host.calls[0].told == [data, b"plain", "half closed"]
    first, second = caller.messages(number)
    assert zlib.decompress(first, 47) == data
    assert len(first) < len(data)
    assert second == b"plain"
    assert bytes(caller.bodies[number])[0] == 1
    assert caller.ended[number]["grpc-encoding"] == name


def test_what_is_wrong_with_compression() -> None:
    bomb = gzip.compress(bytes(10_000_000))
    caller = Caller(Host(message_bytes=1_000_000))

    def status(data: bytes, *more: tuple[str, str]) -> int:
        number = caller.begin(*more)
        caller.send(number, data)
        return caller.status(number)

    zipped = ("grpc-encoding", "gzip")
    assert status(message(bomb, 1), zipped) == Code.RESOURCE_EXHAUSTED
    assert status(message(b"not gzip", 1), zipped) == Code.INTERNAL
    assert status(message(gzip.compress(b"x")[:-1], 1), zipped) == Code.INTERNAL
    assert status(message(gzip.compress(b"x"), 1)) == Code.INTERNAL
    assert status(message(b"x", 7)) == Code.INTERNAL
    number = caller.begin(("grpc-encoding", "snappy"), end=True)
    caller.turn()
    assert caller.status(number) == Code.UNIMPLEMENTED
    assert caller.ended[number]["grpc-accept-encoding"] == "identity,deflate,gzip"


ZIPPED = ("grpc-encoding", "gzip")
SLICE = 4 * SLICE_BYTES
"""Of output."""


class Silent(Echo):
    def message(self, data: Any) -> None:
        self.told.append(bytes(data))


def test_a_large_message_is_inflated_a_slice_in_a_turn() -> None:
    caller = Caller(Host(Silent))
    honest = Caller(caller.host)
    data = bytes(16 << 20)
    number = caller.begin(ZIPPED)
    caller.h2.send_data(number, message(gzip.compress(data), 1) + message(b"behind it"), end_stream=True)
    caller.core.feed(caller.h2.data_to_send())
    call, turns = caller.host.calls[0], 0
    made = []
    while not call.told:
        assert len(caller.host.later) == 1
        before = caller.host.held
        caller.host.turn_once()
        made.append(caller.host.held - before)
        turns += 1
        if turns == 5:
            number = honest.begin(end=True)
            honest.core.feed(honest.h2.data_to_send())
            assert caller.host.calls[1].told == ["half closed"]
    assert max(made) <= SLICE, "output is counted"
    assert turns >= len(data) // SLICE - 1
    while caller.host.later:
        caller.host.turn_once()
    assert call.told == [data, b"behind it", "half closed"]
    assert caller.host.held == 0


def test_inflated_bytes_count_against_the_budget_and_the_limit() -> None:
    bomb = gzip.compress(bytes(32 << 20))
    for host, code in (
        (Host(Silent, held_bytes=8 << 20), Code.UNAVAILABLE),
        (Host(Silent, message_bytes=4 << 20), Code.RESOURCE_EXHAUSTED),
    ):
        caller = Caller(host)
        number = caller.begin(ZIPPED)
        caller.send(number, message(bomb, 1), end=False)
        assert caller.status(number) == code
        assert host.calls[0].told == ["cancelled"]
        assert host.held == 0


def test_a_call_that_is_cancelled_is_inflated_no_further() -> None:
    caller = Caller(Host(Silent))
    number = caller.begin(ZIPPED)
    caller.h2.send_data(number, message(gzip.compress(bytes(16 << 20)), 1))
    caller.core.feed(caller.h2.data_to_send())
    assert caller.host.held > SLICE
    caller.h2.reset_stream(number)
    caller.core.feed(caller.h2.data_to_send())
    assert caller.host.held == 0
    while caller.host.later:
        caller.host.turn_once()
    assert caller.host.calls[0].told == ["cancelled"]


@pytest.mark.parametrize("part", [message(gzip.compress(bytes(SLICE // 2)), 1), message(b"")])
def test_many_messages_in_one_frame_take_many_turns(part: bytes) -> None:
    caller = Caller(Host(Silent))
    number = caller.begin(ZIPPED)
    count = 250_000 // len(part) if part[0] else 1000
    sent = part * count
    for at in range(0, len(sent), 16_384):
        caller.h2.send_data(number, sent[at : at + 16_384], end_stream=at + 16_384 >= len(sent))
    caller.core.feed(caller.h2.data_to_send())
    call = caller.host.calls[0]
    before, most = len(call.told), 0
    assert before <= WORK
    while caller.core.more or caller.host.later:
        before = len(call.told)
        if caller.core.more:
            caller.core.feed(b"")
        caller.host.turn_once()
        most = max(most, sum(len(data) // INFLATED_BYTES + 1 for data in call.told[before:]))
    assert most <= 2 * WORK + SLICE // INFLATED_BYTES
    assert len(call.told) == count + 1
    assert call.told[-1] == "half closed"


def test_a_large_answer_is_compressed_a_slice_in_a_turn() -> None:
    caller = Caller(Host(Silent, compression=9), window=1 << 30)
    number = caller.begin(("grpc-accept-encoding", "gzip"), end=True)
    caller.core.feed(caller.h2.data_to_send())
    stream = caller.core.streams.get(number)
    assert stream is None
    number = caller.begin(("grpc-accept-encoding", "gzip"))
    caller.core.feed(caller.h2.data_to_send())
    call, data = caller.host.calls[1], bytes(4 << 20)
    call.stream.send([data])
    assert not call.stream.writable
    call.stream.send([b"behind it"])
    call.stream.finish(0)
    turns = 0
    while caller.host.later:
        caller.host.turn_once()
        turns += 1
    assert turns == len(data) // SLICE_BYTES - 1
    caller.turn()
    first, second = caller.messages(number)
    assert gzip.decompress(first) == data
    assert second == b"behind it"
    assert caller.status(number) == 0


def test_a_service_goes_on_when_its_answer_is_compressed() -> None:
    caller = Caller(Host(Silent, compression=1), window=1 << 30)
    caller.begin(("grpc-accept-encoding", "gzip"))
    caller.core.feed(caller.h2.data_to_send())
    call = caller.host.calls[0]
    call.stream.send([bytes(1 << 20)])
    while caller.host.later:
        assert call.told == []
        caller.host.turn_once()
    assert call.told == ["resume"]


# ---------------------------------------------------------------------------------------- limits of calls


def test_messages_over_the_limit_and_all_together() -> None:
    caller = Caller(Host(message_bytes=100_000, held_bytes=400_020))
    assert caller.call(b"a" * 100_000) == (b"a" * 100_000, 0)
    number = caller.begin()
    caller.send(number, message(b"a" * 100_001)[:1000], end=False)
    assert caller.status(number) == Code.RESOURCE_EXHAUSTED
    assert "100001 vs. 100000" in caller.ended[number]["grpc-message"]
    first, second = caller.begin(), caller.begin()
    caller.send(first, message(b"a" * 80_000)[:1000], end=False)
    caller.send(second, message(b"a" * 80_000)[:60_000], end=False)
    assert caller.host.held == 1000 - 5 + 60_000 - 5
    caller.send(second, message(b"a" * 80_000)[60_000:], end=False)
    caller.send(first, message(b"a" * 80_000)[1000:79_000], end=False)
    third = caller.begin()
    caller.send(third, message(b"a" * 80_000)[:60_000], end=False)
    assert caller.status(third) == Code.UNAVAILABLE, "the connection would be over its quarter"
    caller.send(first, message(b"a" * 80_000)[79_000:])
    assert caller.status(first) == 0
    assert caller.host.held == 0
    assert not caller.gone


def test_half_a_message() -> None:
    caller = Caller()
    for data in (message(b"abc")[:-1], b"\0\0"):
        number = caller.begin()
        caller.send(number, data)
        assert caller.status(number) == Code.INTERNAL


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ((("grpc-timeout", "soon"),), Code.INTERNAL),
        ((("grpc-timeout", "123456789S"),), Code.INTERNAL),
        ((("grpc-timeout", ""),), Code.INTERNAL),
        ((("grpc-timeout", "99999999H"),), Code.OK),
        ((("grpc-timeout", "0n"),), Code.OK),
    ],
)
def test_timeouts_as_they_are_written(more: tuple[tuple[str, str], ...], expected: int) -> None:
    assert Caller().call(b"", *more)[1] == expected


def test_what_is_no_grpc() -> None:
    caller = Caller()
    base = dict(HEADERS)
    for change, status in (({"content-type": "text/html"}, "415"), ({"content-type": "application/grpc-web"}, "415"),
                           ({":method": "GET"}, "405")):  # fmt: skip
        number = caller.h2.get_next_available_stream_id()
        caller.h2.send_headers(number, list((base | change).items()), end_stream=True)
        caller.turn()
        assert caller.ended[number][":status"] == status
    assert caller.call(b"goes on") == (b"goes on", 0)


def test_more_calls_at_a_time_than_are_taken() -> None:
    caller = Caller(Host(streams=2))
    raw = [frame(HEAD, 4, number, block()) for number in (1, 3, 5)]
    assert (RST, 0, 5, (7).to_bytes(4, "big")) in caller.raw(raw)
    assert not caller.core.over
    assert len(caller.host.calls) == 2
