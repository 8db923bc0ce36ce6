"""Messages of gRPC calls: compression in slices, limits of size and memory, and grpc-timeout."""

from __future__ import annotations

import gzip
import zlib
from contextlib import suppress
from typing import Any

import pytest
from h2.exceptions import StreamClosedError

from shmserve.gateway.http2.limits import INFLATED_BYTES
from shmserve.gateway.limits.backlog import CONNECTION_WORK
from shmserve.gateway.limits.turns import SLICE_BYTES
from shmserve.protocol.grpc.codes import Code
from tests.support.cases import cases
from tests.support.gateway.http2_caller import Caller, Echo, Host
from tests.support.gateway.http2_frames import message


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
