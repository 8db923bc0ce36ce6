"""The gRPC listener on sockets, with clients that send raw frames."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import hpack
import pytest

from shmserve.errors import Unavailable
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
    OPEN,
    PING,
    RST,
    SETTINGS,
    block,
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
        self.cancelled = asyncio.Event()

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

            def cancelled(self) -> None:
                calls.cancelled.set()

        self.open.append(Call(stream))
        return self.open[-1]


class Watched(RpcListener):
    def __init__(self, *args: Any) -> None:
        super().__init__(http2_connection.Http2Connection, *args)
        self.left = asyncio.Event()

    def leave(self, connection: Any) -> None:
        super().leave(connection)
        self.left.set()


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

    async def gone(self) -> bytes:
        """The bytes received up to the end of the connection."""
        with suppress(ConnectionResetError):
            return await self.reader.read()
        return b""


Connect = Callable[[], Awaitable[Caller]]
Scenario = Callable[[Watched, Calls, Connect], Awaitable[None]]


def run(scenario: Scenario, **limits: Any) -> None:
    async def main() -> None:
        calls = Calls()
        listener = Watched(asyncio.get_running_loop(), calls, Http2Limits(**limits))
        port = await listener.open("127.0.0.1", 0, False)
        writers: list[asyncio.StreamWriter] = []

        async def connect() -> Caller:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writers.append(writer)
            return Caller(reader, writer)

        try:
            await asyncio.wait_for(scenario(listener, calls, connect), WAIT_S)
        finally:
            for writer in writers:
                writer.close()
            await asyncio.wait_for(listener.close(), WAIT_S)
            for writer in writers:
                with suppress(ConnectionError):
                    await writer.wait_closed()
        assert listener.budget.held == 0
        assert listener.connections == 0

    asyncio.run(main())


def waiting(number: int, *more: tuple[str, str]) -> bytes:
    """A call that is answered when the test releases it."""
    headers = [(":method", "POST"), (":scheme", "http"), (":path", "/wait"), ("content-type", "application/grpc")]
    return frame(HEAD, 4, number, hpack.Encoder().encode([*headers, *more])) + frame(DATA, 1, number, message(b"x"))


def test_a_connection_over_the_limit_is_refused_while_the_others_are_busy() -> None:
    async def scenario(listener: Watched, calls: Calls, connect: Connect) -> None:
        first = await connect()
        first.send(HELLO, waiting(1), unary(3, b"x"))
        await first.frame(DATA)
        assert await (await connect()).gone() == b""
        first.send(unary(5, b"y"))
        assert (await first.frame(DATA))[3] == message(b"y")

    run(scenario, connections=1)


def test_an_idle_connection_over_the_limit_is_evicted() -> None:
    async def scenario(listener: Watched, calls: Calls, connect: Connect) -> None:
        first = await connect()
        first.send(HELLO, unary(1, b"x"))
        await first.frame(DATA)
        second = await connect()
        assert (await first.frame(GOAWAY))[3][:8] == bytes([0, 0, 0, 1]) + bytes(4)
        second.send(HELLO, unary(1, b"y"))
        assert (await second.frame(DATA))[3] == message(b"y")
        assert listener.evicted == 1

    run(scenario, connections=1)


def test_deadlines_are_kept_in_any_order() -> None:
    async def scenario(listener: Watched, calls: Calls, connect: Connect) -> None:
        caller = await connect()
        caller.send(HELLO, waiting(1, ("grpc-timeout", "1H")), waiting(3, ("grpc-timeout", "50m")))
        caller.send(waiting(5, ("grpc-timeout", "150m")))
        ended = [await caller.frame(HEAD) for _ in range(2)]
        assert sorted(number for _, _, number, _ in ended) == [3, 5]
        assert all(b"Deadline Exceeded" in payload for *_, payload in ended)
        assert listener.answers == {4: 2}

    run(scenario)


def test_shutdown_answers_calls_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2_connection, "LAST_CALLS_S", WAIT_S)

    async def scenario(listener: Watched, calls: Calls, connect: Connect) -> None:
        caller = await connect()
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

    run(scenario)


def test_shutdown_does_not_wait_for_a_silent_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2_connection, "LAST_CALLS_S", 0.01)

    async def scenario(listener: Watched, calls: Calls, connect: Connect) -> None:
        silent = await connect()
        silent.send(HELLO)
        await silent.frame(SETTINGS)
        await listener.close()
        await silent.gone()

    run(scenario)


def test_calls_that_are_given_up_at_shutdown_get_an_error() -> None:
    async def scenario(listener: Watched, calls: Calls, connect: Connect) -> None:
        caller = await connect()
        caller.send(HELLO, waiting(1))
        await calls.half.wait()
        closing = asyncio.ensure_future(listener.close())
        listener.give_up(Unavailable("the server stopped"))
        assert b"the server stopped" in (await caller.frame(HEAD))[3]
        await closing
        assert calls.cancelled.is_set()
        await caller.gone()

    run(scenario)


@pytest.mark.parametrize("sent", [b"PRI * HTTP", HELLO + OPEN + frame(DATA, 0, 1, b"\0\0\0\1\0")])
def test_a_client_that_stalls_is_disconnected(sent: bytes) -> None:
    async def scenario(listener: Watched, calls: Calls, connect: Connect) -> None:
        caller = await connect()
        caller.send(sent)
        if sent.startswith(HELLO):
            assert b"the client stalled" in (await caller.frame(HEAD))[3]
            assert (await caller.frame(RST))[2] == 1
        else:
            await caller.gone()
        assert listener.budget.held == 0

    run(scenario, read_timeout_s=0.1)


def test_a_client_that_does_not_read_is_disconnected() -> None:
    async def scenario(listener: Watched, calls: Calls, connect: Connect) -> None:
        caller = await connect()
        caller.writer.transport.pause_reading()  # type: ignore[attr-defined]
        window = frame(4, 0, 0, b"\0\4\x7f\xff\xff\xff") + frame(8, 0, 0, b"\x7f\0\0\0")
        large = frame(DATA, 1, 1, message(bytes(500_000)))
        caller.send(HELLO, window, OPEN, large)
        for number in range(3, 41, 2):
            caller.send(frame(HEAD, 4, number, block()), large[:5] + number.to_bytes(4, "big") + large[9:])
        await listener.left.wait()
        caller.writer.transport.abort()

    run(scenario, read_timeout_s=0.1)
