"""The generator's HTTP/2, against a server built with the package h2."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.settings
import pytest

from shmserve.errors import ConnectionLost, ModelFailed, NotFound, ServeError, Unavailable
from shmserve.tools.load.targets.grpc_connection import GrpcConnection, framed, head_block
from tests.support.cases import cases

HEAD = head_block("https", "host:1", "/package.Service/Method", [("Authorization", "Bearer " + "x" * 300)])
OK = [("grpc-status", "0")]
ANSWER = [(":status", "200"), ("content-type", "application/grpc")]
Behaviour = Callable[["Server", int], object]


class Server(asyncio.Protocol):
    """Calls `behave` with each stream that was ended. Keeps the requests, and the last header list."""

    def __init__(self, behave: Behaviour, window: int) -> None:
        self.core = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding="utf-8"))
        self.window = window
        self.behave = behave
        self.data: dict[int, bytes] = {}
        self.fields: dict[str, str] = {}
        self.resets: list[int] = []

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.core.initiate_connection()
        self.core.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: self.window})
        self.flush()

    def flush(self) -> None:
        self.transport.write(self.core.data_to_send())

    def data_received(self, data: bytes) -> None:
        for event in self.core.receive_data(data):
            if isinstance(event, h2.events.RequestReceived):
                self.fields = {str(name): str(value) for name, value in event.headers}
                self.data[event.stream_id] = b""
            elif isinstance(event, h2.events.DataReceived):
                self.data[event.stream_id] += event.data
                self.core.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, h2.events.StreamEnded):
                self.behave(self, event.stream_id)
            elif isinstance(event, h2.events.StreamReset):
                self.resets.append(event.stream_id)
        self.flush()


def echo(server: Server, stream: int) -> None:
    server.core.send_headers(stream, ANSWER)
    data = server.data[stream]
    for at in range(0, len(data), 16_000):
        server.core.send_data(stream, data[at : at + 16_000], pad_length=3)
    server.core.send_headers(stream, OK, end_stream=True)


def only_headers(fields: list[tuple[str, str]]) -> Behaviour:
    return lambda server, stream: server.core.send_headers(stream, fields, end_stream=True)


def without_status(server: Server, stream: int) -> None:
    server.core.send_headers(stream, ANSWER)
    server.core.send_data(stream, b"", end_stream=True)


def going_away(server: Server, stream: int) -> None:
    echo(server, stream)
    server.core.close_connection()


@asynccontextmanager
async def connected(behave: Behaviour, window: int = 65_535) -> AsyncIterator[tuple[GrpcConnection, list[Server]]]:
    servers: list[Server] = []

    def accept() -> Server:
        servers.append(Server(behave, window))
        return servers[-1]

    loop = asyncio.get_running_loop()
    listener = await loop.create_server(accept, "127.0.0.1", 0)
    _, connection = await loop.create_connection(GrpcConnection, "127.0.0.1", listener.sockets[0].getsockname()[1])
    await connection.ready
    try:
        yield connection, servers
    finally:
        connection.close()
        listener.close()
        for server in servers:
            server.transport.close()
        await listener.wait_closed()


@pytest.mark.parametrize("window", [1000, 65_535, 1 << 24])
@pytest.mark.parametrize("size", [0, 9, 70_000])
def test_messages_of_all_sizes_through_windows_of_all_sizes(size: int, window: int) -> None:
    messages = [bytes([number]) * (size * number) for number in (1, 2)]

    async def run() -> tuple[list[bytes], dict[str, str]]:
        found: list[bytes] = []
        async with connected(echo, window) as (connection, servers):
            for _ in range(3):
                await connection.call(HEAD, b"".join(map(framed, messages)), found.append)
        return found, servers[0].fields

    found, fields = asyncio.run(run())
    assert found == messages * 3
    assert (fields[":path"], fields[":authority"]) == ("/package.Service/Method", "host:1")
    assert (fields["authorization"], fields["te"]) == ("Bearer " + "x" * 300, "trailers")


@cases(
    (
        only_headers([(":status", "200"), ("grpc-status", "5"), ("grpc-message", "no %C3%A4 100%25")]),
        NotFound,
        "gRPC NOT_FOUND: no \xe4 100%",
    ),
    (
        lambda server, stream: server.core.reset_stream(stream, 7),
        Unavailable,
        "the server has reset the call (HTTP/2",
    ),
    (only_headers([(":status", "502")]), ModelFailed, "HTTP 502 instead of a gRPC status"),
    (without_status, ConnectionLost, "the server ended the call without a status"),
    (lambda server, stream: server.transport.abort(), ConnectionLost, "the connection was lost"),
)
def test_failed_calls_have_the_error_of_their_status(behave: Behaviour, kind: type[ServeError], text: str) -> None:
    """Runs twice: the second header block comes from the cache."""

    async def run() -> None:
        async with connected(behave) as (connection, _):
            for _ in range(2 if kind is not ConnectionLost else 1):
                with pytest.raises(kind, match=f"^{re.escape(text)}"):
                    await connection.call(HEAD, framed(b"x"), lambda message: None)

    asyncio.run(run())


def test_a_connection_that_goes_away_is_not_used_again() -> None:
    async def run() -> list[bytes]:
        found: list[bytes] = []
        async with connected(going_away) as (connection, _):
            await connection.call(HEAD, framed(b"last"), found.append)
            while not connection.closed:
                await asyncio.sleep(0)
            with pytest.raises(ConnectionLost):
                await connection.call(HEAD, framed(b"x"), found.append)
        return found

    assert asyncio.run(run()) == [b"last"]


def test_answers_to_a_cancelled_call_are_ignored() -> None:
    def behave(server: Server, stream: int) -> None:
        if stream > 1:
            echo(server, stream)

    async def run() -> tuple[list[bytes], list[int]]:
        found: list[bytes] = []
        async with connected(behave) as (connection, servers):
            connection.call(HEAD, framed(b"cancelled"), found.append)
            connection.cancel()
            await connection.call(HEAD, framed(b"next"), found.append)
            return found, servers[0].resets

    assert asyncio.run(run()) == ([b"next"], [1])
