"""Connections of a listener until their handshake is done: the header of the PROXY protocol, if a trusted proxy sends
one, and TLS.

A TLS handshake costs about a millisecond of the event loop, so hundreds at once would stall every other client.
Therefore only one is started per iteration of the loop, round robin between addresses, and their number is bounded. A
connection whose client has sent nothing yet costs no handshake. A PROXY header stays in the socket until it is
complete, so it costs no memory. From then on, the connection counts for the client that the header names.

Invariant: `Handshakes.count` includes every accepted connection until its handshake has ended.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import islice

from shmserve.gateway.limits.caller_shares import network_of
from shmserve.gateway.limits.proxies import TrustedProxies
from shmserve.gateway.listeners.proxy_header import HEADER_BYTES, BadProxyHeader, client_in, size_of

log = logging.getLogger("shmserve.gateway")

UNDER_WAY = 64
"""Maximum number of concurrent handshakes. Clients can time their handshakes so that all of them continue in the same
iteration."""
ADDRESS_SHARE = 0.5
"""Fraction of UNDER_WAY, less what other addresses use, that one address may use."""
ACCEPTED = 16
"""Connections accepted per iteration; the others wait in the backlog of the socket."""
MIN_ROOM = 32
"""Number of connections that may be in the handshake when the endpoint is full. Idle connections are closed for them
afterwards."""
EVICTION_S = 0.5
"""Time after which a handshake is aborted if others wait for its slot."""
_RETRY_S = 1.0
"""Time until connections are accepted again after descriptors or memory ran out."""


class Arrival:
    """A connection whose handshake has not ended."""

    __slots__ = ("address", "client", "peer", "seen", "sock", "started", "task", "timer")

    def __init__(self, sock: socket.socket, peer: str, seen: int | None) -> None:
        self.sock = sock
        self.peer = peer
        """Address of the other end of the socket."""
        self.client = ""
        """Address of the client, if a PROXY header names it."""
        self.address = network_of(peer) or peer
        """The key by which it is counted."""
        self.seen = seen
        """Number of bytes in the socket, of what may be a PROXY header. None: none is expected any more."""
        self.started = 0.0
        self.timer: asyncio.TimerHandle | None = None
        """Runs until the handshake is started."""
        self.task: asyncio.Task[None] | None = None


class AddressHandshakes:
    """An address, or one /64 network with IPv6."""

    __slots__ = ("arrivals", "queue", "under_way")

    def __init__(self) -> None:
        self.arrivals: dict[Arrival, None] = {}
        """Silent or queued arrivals, oldest first."""
        self.queue: dict[Arrival, None] = {}
        """The arrivals whose client has begun its handshake."""
        self.under_way: dict[Arrival, None] = {}
        """Oldest first."""


class Handshakes:
    """`connect` makes the asyncio protocol of a connection, from the address that a PROXY header names. `tls`: None for
    a listener without TLS. `room`: maximum number of connections in the handshake. `proxies`: those that may send PROXY
    headers; if there are none, no header is expected."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connect: Callable[[str], asyncio.BaseProtocol],
        tls: ssl.SSLContext | None,
        patience_s: float,
        goodbye_s: float,
        room: Callable[[], int],
        proxies: TrustedProxies,
    ) -> None:
        self._tls = tls
        self._loop = loop
        self._connect = connect
        self._patience_s = patience_s
        self._goodbye_s = goodbye_s
        self._room = room
        self._proxies = proxies
        self.refused_headers = 0
        """Connections closed for their PROXY header."""
        self._listening: list[socket.socket] = []
        self._addresses: dict[str, AddressHandshakes] = {}
        self._waiting: deque[str] = deque()
        """Addresses with a queue, in the order of their turns."""
        self._next: asyncio.Handle | None = None
        self._eviction: asyncio.TimerHandle | None = None
        self.count = 0
        """Number of accepted connections whose handshake has not ended."""
        self.under_way = 0

    def listen(self, listening: socket.socket) -> None:
        listening.setblocking(False)
        self._listening.append(listening)
        self._loop.add_reader(listening, self._accept, listening)

    def renew(self, tls: ssl.SSLContext) -> None:
        """Sets the context for handshakes that start from now on."""
        self._tls = tls

    def close(self) -> None:
        """Handshakes under way may still end."""
        for listening in self._listening:
            self._loop.remove_reader(listening)
            listening.close()
        self._listening = []
        for address in list(self._addresses.values()):
            for arrival in list(address.arrivals):
                self._drop(arrival)

    # ------------------------------------------------------------------------------------ accepting

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTED):
            try:
                sock, peer = listening.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    raise
                log.error(
                    "cannot accept connections: %s; retrying in %g s (open files are limited by ulimit -n, or "
                    "LimitNOFILE= of the unit)",
                    error.strerror,
                    _RETRY_S,
                )
                self._loop.remove_reader(listening)
                self._loop.call_later(_RETRY_S, self._accept_again, listening)
                return
            self._arrive(sock, peer[0])

    def _accept_again(self, listening: socket.socket) -> None:
        if listening in self._listening:
            self._loop.add_reader(listening, self._accept, listening)

    def _arrive(self, sock: socket.socket, peer: str) -> None:
        sock.setblocking(False)
        if self.count >= max(MIN_ROOM, self._room()):
            busiest = max(self._addresses.values(), key=lambda address: len(address.arrivals))
            if busiest.arrivals:
                self._drop(next(iter(busiest.arrivals)))
        arrival = Arrival(sock, peer, 0 if self._proxies else None)
        self.count += 1
        self._addresses.setdefault(arrival.address, AddressHandshakes()).arrivals[arrival] = None
        arrival.timer = self._loop.call_later(self._patience_s, self._give_up, arrival)
        self._loop.add_reader(sock, self._begun, arrival)

    def _give_up(self, arrival: Arrival) -> None:
        """Without TLS, a client may stay silent until it has a request."""
        if self._tls is None and not arrival.seen and arrival not in self._addresses[arrival.address].queue:
            self._enqueue(arrival)
        else:
            self._drop(arrival)

    def _begun(self, arrival: Arrival) -> None:
        """Called when bytes, or the end of the connection, have arrived."""
        try:
            if arrival.seen is None or not self._has_header(arrival, arrival.seen):
                self._enqueue(arrival)
        except BadProxyHeader as error:
            self.refused_headers += 1
            log.debug("closed the connection of %s, which began with a PROXY header: %s", arrival.peer, error)
            self._drop(arrival)
        except OSError:  # the client has disconnected
            self._drop(arrival)

    def _has_header(self, arrival: Arrival, seen: int) -> bool:
        """True if the connection begins with a PROXY header, or may do so. A complete header is removed from the
        socket. Until then, the loop reports only the arrival of the rest."""
        start = arrival.sock.recv(HEADER_BYTES, socket.MSG_PEEK)
        size = size_of(start)
        if size > len(start) > seen:
            arrival.seen = len(start)
            arrival.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
            return True
        arrival.seen = None
        arrival.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        if not 0 < size <= len(start):  # the client may have closed its side after the first bytes of something else
            return False
        if not self._proxies.trusts(arrival.peer):
            raise BadProxyHeader("its sender is not one of --trusted-proxies")
        arrival.client = client_in(arrival.sock.recv(size))
        if arrival.client:
            self._count_for(arrival, network_of(arrival.client) or arrival.client)
        return True

    def _count_for(self, arrival: Arrival, address: str) -> None:
        del self._addresses[arrival.address].arrivals[arrival]
        self._forget_unused(arrival.address)
        arrival.address = address
        self._addresses.setdefault(address, AddressHandshakes()).arrivals[arrival] = None

    def _enqueue(self, arrival: Arrival) -> None:
        self._loop.remove_reader(arrival.sock)
        queue = self._addresses[arrival.address].queue
        queue[arrival] = None
        if len(queue) == 1:
            self._waiting.append(arrival.address)
        self._start_soon()

    def _drop(self, arrival: Arrival) -> None:
        """Closes a connection whose handshake was not started."""
        address = self._addresses[arrival.address]
        del address.arrivals[arrival]
        if arrival in address.queue:
            del address.queue[arrival]
            if not address.queue:
                self._waiting.remove(arrival.address)
        else:
            self._loop.remove_reader(arrival.sock)
        assert arrival.timer is not None
        arrival.timer.cancel()
        arrival.sock.close()
        self._gone(arrival)

    def _gone(self, arrival: Arrival) -> None:
        self.count -= 1
        self._forget_unused(arrival.address)

    def _forget_unused(self, name: str) -> None:
        address = self._addresses[name]
        if not address.arrivals and not address.under_way:
            del self._addresses[name]

    # ------------------------------------------------------------------------------------ handshakes

    def _start_soon(self) -> None:
        if self._next is None and self._waiting:
            self._next = self._loop.call_soon(self._start_one)

    def _start_one(self) -> None:
        self._next = None
        for _ in range(len(self._waiting)):
            name = self._waiting.popleft()
            address = self._addresses[name]
            others = self.under_way - len(address.under_way)
            started = len(address.under_way) < (UNDER_WAY - others) * ADDRESS_SHARE
            if started:
                self._start(address, next(iter(address.queue)))
            if address.queue:
                self._waiting.append(name)
            if started:
                self._start_soon()
                return
        if self._waiting and self._eviction is None:
            self._make_room()

    def _start(self, address: AddressHandshakes, arrival: Arrival) -> None:
        del address.queue[arrival]
        del address.arrivals[arrival]
        address.under_way[arrival] = None
        self.under_way += 1
        assert arrival.timer is not None
        arrival.timer.cancel()
        arrival.started = self._loop.time()
        arrival.task = self._loop.create_task(self._shake(arrival))
        arrival.task.add_done_callback(lambda _: self._ended(arrival))

    async def _shake(self, arrival: Arrival) -> None:
        limits = {"ssl_handshake_timeout": self._patience_s, "ssl_shutdown_timeout": self._goodbye_s}
        try:
            await self._loop.connect_accepted_socket(
                partial(self._connect, arrival.client), arrival.sock, ssl=self._tls, **(limits if self._tls else {})
            )
        except OSError as error:  # caused by the client: no TLS, no valid certificate, too slow, or disconnected
            log.debug("TLS handshake with %s failed: %s", arrival.address, error)

    def _ended(self, arrival: Arrival) -> None:
        """Called as a done callback, since a task that is cancelled before its first step never runs."""
        del self._addresses[arrival.address].under_way[arrival]
        self.under_way -= 1
        self._gone(arrival)
        self._start_soon()

    def _make_room(self) -> None:
        """Called when no address with a queue may start another handshake. Aborts handshakes older than EVICTION_S, one
        for each that waits."""
        self._eviction = None
        now = self._loop.time()
        due = now + EVICTION_S
        for name in self._waiting:
            address = self._addresses[name]
            busiest = address
            if not address.under_way:
                busiest = max(self._addresses.values(), key=lambda address: len(address.under_way))
            for arrival in islice(busiest.under_way, len(address.queue)):
                if arrival.started + EVICTION_S > now:
                    due = min(due, arrival.started + EVICTION_S)
                    break
                assert arrival.task is not None
                arrival.task.cancel()
        if self._waiting:
            self._eviction = self._loop.call_at(due, self._make_room)
