"""TLS handshakes of a listener: few at once, round robin between addresses, and all of them counted. Before them, the
PROXY headers of trusted proxies.

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

from shmserve.gateway.limits.proxies import TrustedProxies, networks_of
from shmserve.gateway.listeners.handshakes import ADDRESS_SHARE, MIN_ROOM, UNDER_WAY, Handshakes
from tests.support.patience import PATIENCE_S

uvloop.new_event_loop().close()  # the first loop of a process opens a pipe for signals, which libuv keeps
MOST = int(UNDER_WAY * ADDRESS_SHARE)
"""Maximum number of concurrent handshakes of one address."""


PROXIES = "127.0.3.0/24"
OF_CLIENT = b"PROXY TCP4 203.0.113.9 127.0.0.1 41000 8000\r\n"


class Greeter(asyncio.Protocol):
    def __init__(self, client: str) -> None:
        self._client = client

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(f"welcome {self._client}".encode().strip() + b"\n")

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


class Endpoint:
    """Records for each start of a handshake the number of concurrent ones and the iteration of the loop."""

    def __init__(
        self, authority: trustme.CA, patience_s: float = 600.0, room: int = 4096, proxies: str = "", plain: bool = False
    ) -> None:
        self.loop = asyncio.get_running_loop()
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("localhost").configure_cert(tls)
        self.client_tls = ssl.create_default_context()
        authority.configure_trust(self.client_tls)
        self.under_way: list[int] = []
        self.iterations: Counter[int] = Counter()
        self._iteration = 0
        trusted = TrustedProxies(networks_of(proxies))
        self.handshakes = Handshakes(
            self.loop, self._start, None if plain else tls, patience_s, 5.0, lambda: room, trusted
        )
        listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port = listening.getsockname()[1]
        self.handshakes.listen(listening)
        self.callers: list[socket.socket] = []
        self._tick()

    def _tick(self) -> None:
        self._iteration += 1
        self._ticking = self.loop.call_soon(self._tick)

    def _start(self, client: str) -> Greeter:
        self.under_way.append(self.handshakes.under_way)
        self.iterations[self._iteration] += 1
        return Greeter(client)

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

    async def honest(self, address: str = "127.0.0.1", header: bytes = b"") -> bytes:
        caller = await self.connect(address, False)
        await self.loop.sock_sendall(caller, header)
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
    def test_of(scenario: Scenario) -> Callable[[trustme.CA], None]:
        async def main(authority: trustme.CA) -> None:
            endpoint = Endpoint(authority, **options)
            try:
                await asyncio.wait_for(scenario(endpoint), PATIENCE_S)
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


async def received(endpoint: Endpoint, caller: socket.socket) -> bytes:
    found = b""
    try:
        while data := await endpoint.loop.sock_recv(caller, 4096):
            found += data
    except ConnectionResetError:
        return found
    return found


@on_endpoint(proxies=PROXIES)
async def test_tls_after_a_proxy_header_is_that_of_the_client_it_names(endpoint: Endpoint) -> None:
    assert await endpoint.honest("127.0.3.1", OF_CLIENT) == b"welcome 203.0.113.9\n"
    assert await endpoint.honest("127.0.3.1", b"PROXY UNKNOWN\r\n") == b"welcome\n"
    assert await endpoint.honest("127.0.3.1") == b"welcome\n", "a proxy need not send the header"
    assert await endpoint.honest() == b"welcome\n"


@on_endpoint(proxies=PROXIES)
async def test_the_clients_of_a_proxy_share_the_handshakes_like_others(endpoint: Endpoint) -> None:
    for number in range(2 * UNDER_WAY):
        caller = await endpoint.connect("127.0.3.1", False)
        await endpoint.loop.sock_sendall(caller, OF_CLIENT + (endpoint.hello() if number % 2 else b""))
    await endpoint.until(lambda: endpoint.handshakes.under_way == MOST)
    other = OF_CLIENT.replace(b"203.0.113.9", b"203.0.113.8")
    assert await endpoint.honest("127.0.3.1", other) == b"welcome 203.0.113.8\n"
    assert max(endpoint.under_way) <= MOST + 1, "no client's handshake starts before its first byte"


@on_endpoint(proxies=PROXIES, plain=True)
async def test_a_proxy_header_may_arrive_in_pieces(endpoint: Endpoint) -> None:
    caller = await endpoint.connect("127.0.3.1", False)
    for at in range(len(OF_CLIENT)):
        await endpoint.loop.sock_sendall(caller, OF_CLIENT[at : at + 1])
        await asyncio.sleep(0)
    await endpoint.loop.sock_sendall(caller, b"P")
    assert await endpoint.loop.sock_recv(caller, 100) == b"welcome 203.0.113.9\n"
    assert await endpoint.loop.sock_recv(caller, 100) == b"P"
    await endpoint.loop.sock_sendall(caller, b"x")
    assert await endpoint.loop.sock_recv(caller, 100) == b"x", "the socket reports each byte again"


@on_endpoint(proxies=PROXIES, plain=True)
async def test_clients_without_tls_are_let_in_with_their_first_bytes(endpoint: Endpoint) -> None:
    for address, sent in (("127.0.0.1", b"POST"), ("127.0.3.1", b"POST"), ("127.0.0.1", b"PRO"), ("127.0.3.1", b"")):
        caller = await endpoint.connect(address, False)
        await endpoint.loop.sock_sendall(caller, sent)
        caller.shutdown(socket.SHUT_WR)
        assert await received(endpoint, caller) == b"welcome\n" + sent
    assert endpoint.handshakes.refused_headers == 0
    await endpoint.until(lambda: endpoint.handshakes.count == 0)


@on_endpoint(proxies=PROXIES, plain=True)
async def test_headers_that_are_malformed_or_of_other_senders_end_the_connection(endpoint: Endpoint) -> None:
    for count, (address, header) in enumerate(
        [("127.0.0.1", OF_CLIENT), ("127.0.3.1", b"PROXY TCP4\r\n"), ("127.0.3.1", b"PROXY " + b"x" * 200)], 1
    ):
        caller = await endpoint.connect(address, False)
        await endpoint.loop.sock_sendall(caller, header)
        assert await received(endpoint, caller) == b""
        assert endpoint.handshakes.refused_headers == count
    assert (endpoint.handshakes.count, endpoint.under_way) == (0, [])


@on_endpoint(proxies=PROXIES, plain=True, patience_s=0.05)
async def test_an_incomplete_header_times_out_but_silence_does_not(endpoint: Endpoint) -> None:
    slow, silent, named = [await endpoint.connect("127.0.3.1", False) for _ in range(3)]
    await endpoint.loop.sock_sendall(slow, OF_CLIENT[:20])
    await endpoint.loop.sock_sendall(named, OF_CLIENT)
    assert await received(endpoint, slow) == b""
    assert await endpoint.loop.sock_recv(silent, 100) == b"welcome\n"
    assert await endpoint.loop.sock_recv(named, 100) == b"welcome 203.0.113.9\n"
