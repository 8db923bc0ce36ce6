"""The gRPC listener on sockets, with clients that send raw frames."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import hpack
import pytest

from shmserve.gateway.http2 import connection as http2_connection
from shmserve.gateway.http2.codes import Code
from shmserve.gateway.http2.interface import TransportStream
from shmserve.gateway.http2.limits import Http2Limits
from shmserve.gateway.http2.listener import RpcListener
from tests.support.gateway.http2_caller import Echo
from tests.support.gateway.http2_frames import (
    DATA,
    GOAWAY,
    HEAD,
    HELLO,
    PING,
    SETTINGS,
    frame,
    message,
    unary,
)

WAIT_S = 30.0


class Calls:
    """The services: calls of /wait are not answered, others are answered with their messages."""

    def __init__(self) -> None:
        self.open: list[Echo] = []
        self.half = asyncio.Event()

    def __call__(self, stream: TransportStream) -> Echo:
        calls = self

        class Call(Echo):
            def message(self, data: Any) -> None:
                self.events.append(bytes(data))

            def half_closed(self) -> None:
                if stream.path == "/wait":
                    calls.half.set()
                else:
                    self.stream.send(self.events)
                    self.stream.finish(Code.OK)

        self.open.append(Call(stream))
        return self.open[-1]


class Caller:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def frame(self, *kinds: int) -> tuple[int, int, int, bytes]:
        """The next frame of these kinds."""
        while True:
            head = await self.reader.readexactly(9)
            payload = await self.reader.readexactly(int.from_bytes(head[:3], "big"))
            if head[3] in kinds:
                return head[3], head[4], int.from_bytes(head[5:], "big"), payload

    def send(self, *frames: bytes) -> None:
        self.writer.writelines(frames)

    async def gone(self) -> None:
        """Waits for the end of the connection."""
        with suppress(ConnectionResetError):
            await self.reader.read()


Scenario = Callable[[RpcListener, Calls, Caller], Awaitable[None]]


def with_a_caller(scenario: Scenario) -> Callable[[], None]:
    """Runs the scenario. By default, no connection ends at a stop before its calls have."""

    async def main() -> None:
        calls = Calls()
        listener = RpcListener(http2_connection.Http2Connection, asyncio.get_running_loop(), calls, Http2Limits())
        reader, writer = await asyncio.open_connection("127.0.0.1", await listener.open("127.0.0.1", 0, False))
        try:
            await asyncio.wait_for(scenario(listener, calls, Caller(reader, writer)), WAIT_S)
        finally:
            writer.close()
            await asyncio.wait_for(listener.close(), WAIT_S)
            with suppress(ConnectionError):
                await writer.wait_closed()
        assert (listener.budget.held, listener.connections) == (0, 0)

    def test() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(http2_connection, "LAST_CALLS_S", WAIT_S)
            asyncio.run(main())

    return test


def waiting(number: int, *more: tuple[str, str]) -> bytes:
    """A call that is answered when the test releases it."""
    headers = [(":method", "POST"), (":scheme", "http"), (":path", "/wait"), ("content-type", "application/grpc")]
    return frame(HEAD, 4, number, hpack.Encoder().encode([*headers, *more])) + frame(DATA, 1, number, message(b"x"))


@with_a_caller
async def test_deadlines_are_kept_in_any_order(listener: RpcListener, calls: Calls, caller: Caller) -> None:
    caller.send(HELLO, waiting(1, ("grpc-timeout", "1H")), waiting(3, ("grpc-timeout", "50m")))
    caller.send(waiting(5, ("grpc-timeout", "150m")))
    ended = [await caller.frame(HEAD) for _ in range(2)]
    assert sorted(number for _, _, number, _ in ended) == [3, 5]
    assert all(b"Deadline Exceeded" in payload for *_, payload in ended)
    assert listener.answers == {4: 2}


@with_a_caller
async def test_shutdown_answers_calls_in_flight(listener: RpcListener, calls: Calls, caller: Caller) -> None:
    caller.send(HELLO, waiting(1))
    await calls.half.wait()
    closing = asyncio.ensure_future(listener.close())
    assert (await caller.frame(GOAWAY))[3][:4] == b"\x7f\xff\xff\xff"
    ping = await caller.frame(PING)
    caller.send(unary(3, b"in transit"), frame(PING, 1, 0, ping[3]))
    assert (await caller.frame(DATA))[3] == message(b"in transit")
    assert (await caller.frame(GOAWAY))[3][:4] == b"\0\0\0\3"
    calls.open[0].stream.send([b"late"])
    calls.open[0].stream.finish(0)
    assert (await caller.frame(DATA))[3] == message(b"late")
    await caller.gone()
    await closing


@with_a_caller
async def test_shutdown_does_not_wait_for_a_silent_client(listener: RpcListener, calls: Calls, caller: Caller) -> None:
    caller.send(HELLO)
    await caller.frame(SETTINGS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http2_connection, "LAST_CALLS_S", 0.01)
        await listener.close()
    await caller.gone()
