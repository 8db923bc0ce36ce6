"""What calls of gRPC may carry: compressed messages, limits, timeouts, and what is no gRPC at all."""

from __future__ import annotations

import gzip
import zlib
from typing import Any

import pytest

from shmserve.clients.gateway.http2.codes import Code
from tests.unit.http2_caller import HEADERS, Caller, Host, message
from tests.unit.test_gateway_http2 import HEAD, RST, block, frame

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


# ---------------------------------------------------------------------------------------- limits of calls


def test_messages_over_the_limit_and_all_together() -> None:
    caller = Caller(Host(message_bytes=100_000, held_bytes=150_000))
    assert caller.call(b"a" * 100_000) == (b"a" * 100_000, 0)
    number = caller.begin()
    caller.send(number, message(b"a" * 100_001)[:1000], end=False)
    assert caller.status(number) == Code.RESOURCE_EXHAUSTED
    assert "100001 vs. 100000" in caller.ended[number]["grpc-message"]
    first, second = caller.begin(), caller.begin()
    caller.send(first, message(b"a" * 80_000)[:1000], end=False)
    caller.send(second, message(b"a" * 80_000)[:1000], end=False)
    assert caller.status(second) == Code.UNAVAILABLE
    caller.send(first, message(b"a" * 80_000)[1000:])
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
