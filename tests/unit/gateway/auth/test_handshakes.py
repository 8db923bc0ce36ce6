"""TLS handshakes of a listener: few at once, round robin between addresses, and all of them counted.

Addresses are those of the loopback network, 127.0.0.1 and following.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import trustme
import uvloop

from shmserve.gateway.listeners.handshakes import ADDRESS_SHARE, MIN_ROOM, UNDER_WAY, Handshakes

uvloop.new_event_loop().close()  # the first loop of a process opens a pipe for signals, which libuv keeps
MOST = int(UNDER_WAY * ADDRESS_SHARE)
"""Maximum number of concurrent handshakes of one address."""


class Greeter(asyncio.Protocol):
    def connection_made(self, transport: Any) -> None:
        transport.write(b"welcome\n")


class Endpoint:
    """Records for each start of a handshake the number of concurrent ones and the iteration of the loop."""

    def __init__(self, authority: trustme.CA, patience_s: float = 600.0, room: int = 4096) -> None:
        self.loop = asyncio.get_running_loop()
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("localhost").configure_cert(tls)
        self.client_tls = ssl.create_default_context()
        authority.configure_trust(self.client_tls)
        self.under_way: list[int] = []
        self.iterations: Counter[int] = Counter()
        self._iteration = 0
        self.handshakes = Handshakes(self.loop, self._start, tls, patience_s, 5.0, lambda: room)
        listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port = listening.getsockname()[1]
        self.handshakes.listen(listening)
        self.callers: list[socket.socket] = []
        self._tick()

    def _tick(self) -> None:
        self._iteration += 1
        self._ticking = self.loop.call_soon(self._tick)

    def _start(self) -> Greeter:
        self.under_way.append(self.handshakes.under_way)
        self.iterations[self._iteration] += 1
        return Greeter()

    async def connect(self, address: str, hello: bool) -> socket.socket:
        """A client that sends at most the first message of a handshake."""
        caller = socket.socket()
        self.callers.append(caller)
        caller.bind((address, 0))
        caller.connect(("127.0.0.1", self.port))
        caller.setblocking(False)
        if hello:
            await self.loop.sock_sendall(caller, self.hello())
        return caller

    def hello(self) -> bytes:
        sent = ssl.MemoryBIO()
        client = self.client_tls.wrap_bio(ssl.MemoryBIO(), sent, server_hostname="localhost")
        with pytest.raises(ssl.SSLWantReadError):
            client.do_handshake()
        return sent.read()

    async def honest(self) -> bytes:
        caller = await self.connect("127.0.0.1", False)
        read, write = await asyncio.open_connection(sock=caller, ssl=self.client_tls, server_hostname="localhost")
        greeting = await read.readline()
        write.transport.abort()
        return greeting

    async def until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            await asyncio.sleep(0)

    def close(self) -> None:
        self.handshakes.close()
        self._ticking.cancel()
        for caller in self.callers:
            caller.close()


Scenario = Callable[[Endpoint], Coroutine[Any, Any, None]]


def on_endpoint(**options: Any) -> Callable[[Scenario], Callable[[trustme.CA], None]]:
    """Runs a scenario on an endpoint with these options."""

    def test_of(scenario: Scenario) -> Callable[[trustme.CA], None]:
        async def main(authority: trustme.CA) -> None:
            endpoint = Endpoint(authority, **options)
            try:
                await scenario(endpoint)
            finally:
                endpoint.close()

        return lambda authority: uvloop.run(main(authority))

    return test_of


@on_endpoint()
async def test_a_flood_of_handshakes_is_bounded_and_other_addresses_get_in(endpoint: Endpoint) -> None:
    flood = [await endpoint.connect("127.0.0.2", False) for _ in range(200)]
    await endpoint.until(lambda: endpoint.handshakes.count == 200)
    assert endpoint.under_way == [], "clients that have sent nothing have no handshake under way"
    hello = endpoint.hello()
    for caller in flood:
        assert caller.send(hello) == len(hello)
    await endpoint.until(lambda: endpoint.handshakes.under_way == MOST)
    assert await endpoint.honest() == b"welcome\n"
    for _ in range(400):
        await asyncio.sleep(0)  # an iteration of the loop, enough to start all of them
    assert max(endpoint.under_way) <= MOST + 1
    # A start can be counted in the iteration before or after its own.
    assert max(endpoint.iterations.values()) <= 2


@on_endpoint()
async def test_many_addresses_share_the_handshakes(endpoint: Endpoint) -> None:
    for number in range(240):
        await endpoint.connect(f"127.0.1.{number % 8 + 1}", True)
    await endpoint.until(lambda: endpoint.handshakes.under_way > MOST)
    assert await endpoint.honest() == b"welcome\n"
    for _ in range(400):
        await asyncio.sleep(0)
    assert max(endpoint.under_way) <= UNDER_WAY


@on_endpoint()
async def test_unfinished_handshakes_do_not_lock_out_their_own_address(endpoint: Endpoint) -> None:
    for _ in range(MOST + 8):
        await endpoint.connect("127.0.0.1", True)
    assert await endpoint.honest() == b"welcome\n"
    assert max(endpoint.under_way) == MOST


@on_endpoint(room=0)
async def test_connections_in_the_handshake_are_limited(endpoint: Endpoint) -> None:
    other = await endpoint.connect("127.0.0.1", False)
    await endpoint.until(lambda: endpoint.handshakes.count == 1)
    silent = [await endpoint.connect("127.0.0.2", False) for _ in range(MIN_ROOM + 7)]
    for caller in silent[:8]:
        assert await endpoint.loop.sock_recv(caller, 1) == b"", "the oldest of the address with most are closed"
    assert await endpoint.honest() == b"welcome\n"
    await endpoint.until(lambda: endpoint.handshakes.under_way == 0)
    assert endpoint.handshakes.count == MIN_ROOM - 1
    await endpoint.loop.sock_sendall(other, endpoint.hello())
    assert await endpoint.loop.sock_recv(other, 1) == b"\x16", "it is still open and gets the server's hello"
    endpoint.close()
    assert (endpoint.handshakes.count, endpoint.handshakes.under_way) == (1, 1)


@on_endpoint(patience_s=0.05)
async def test_a_client_that_does_not_finish_its_handshake_is_disconnected(endpoint: Endpoint) -> None:
    for hello in (False, True):
        caller = await endpoint.connect("127.0.0.1", hello)
        while await endpoint.loop.sock_recv(caller, 65536):
            pass
    await endpoint.until(lambda: endpoint.handshakes.count == 0)


@on_endpoint()
async def test_a_client_without_tls_is_disconnected(endpoint: Endpoint) -> None:
    caller = await endpoint.connect("127.0.0.1", False)
    await endpoint.loop.sock_sendall(caller, b"GET / HTTP/1.1\r\n\r\n")
    while await endpoint.loop.sock_recv(caller, 65536):
        pass
    gone = await endpoint.connect("127.0.0.1", False)
    gone.close()
    assert await endpoint.honest() == b"welcome\n"
    await endpoint.until(lambda: endpoint.handshakes.count == 0)
