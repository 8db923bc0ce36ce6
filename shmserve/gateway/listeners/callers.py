"""The listening sockets of one endpoint, its connections (HTTP/1.1 or HTTP/2), and the state that they share. One slow
clock serves all timeouts, so that no request costs a timer. Certificates are replaced without closing the sockets, so
that no connecting client is refused."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any, Protocol

from msgspec import Struct

from shmserve.errors import ServeError
from shmserve.gateway.limits.body_budget import Budget
from shmserve.gateway.limits.turns import SlicedJob, SlicedWork
from shmserve.gateway.listeners.handshakes import Handshakes
from shmserve.gateway.metrics import family
from shmserve.gateway.upstream.link import GatewayLink

BACKLOG = 1024
HANDSHAKE_S = 10.0
"""Maximum time for the TLS handshake; a slower client is disconnected."""
_GOODBYE_S = 5.0
"""Maximum time to wait for the client's TLS close_notify."""
EVICTED = 32
"""Maximum number of idle connections evicted at once."""
FLUSH_S = 0.5
"""Time for clients to read the last responses, at the end of a stop. Less than the time that the server leaves to its
gateways beyond the exit timeout."""
TURNS = 4
"""Number of turns of the slow clock in the shortest time that it measures."""
CHECK_S = 0.001
"""Time after which the check of timeouts lets other work have its turn."""


class CallerConnection(Protocol):
    """A connection, as its listener sees it."""

    def check_timeouts(self, waited: int) -> None:
        """Called on every turn of the slow clock. `waited`: number of turns without enough progress after which a
        client times out."""

    def stop(self) -> None:
        """Accepts no more requests after the current ones."""

    def give_up(self, error: ServeError) -> None:
        """Answers requests that have not arrived completely, or are still being processed here, with an error."""

    def abort(self) -> None: ...

    @property
    def idle_since(self) -> float | None:
        """Time on the event loop's clock. None: the connection is in use, and not slower than the data rate."""

    def evict(self) -> None:
        """Closes the connection to make room for a new one."""


def peer_address(transport: Any) -> str:
    """The address of the client, or "" on a socket without addresses."""
    peer = transport.get_extra_info("peername")
    return peer[0] if isinstance(peer, tuple) else ""


class ConnectionLimits(Struct, frozen=True):
    """Limits of HTTP/1.1 and HTTP/2 connections, set by flags."""

    connections: int = 4096
    read_timeout_s: float = 60.0
    """Timeout of an incomplete request or message that arrives at less than `data_rate`, and of a response that the
    client reads at less than that rate. The head of an HTTP/1.1 request must be complete within this time."""
    data_rate: int = 1024
    """Bytes per second below which the read timeout runs."""
    idle_timeout_s: float = 600.0
    """Idle timeout between two requests, or of a connection without calls."""


class EndpointListener:
    """`link` has what all endpoints share. `connect` makes the asyncio protocol of a new connection, from this object
    and the address of the client, if a PROXY header names it. `turn_s`: period of the slow clock. `budget`: bounds
    bodies and unsent responses."""

    def __init__(
        self,
        link: GatewayLink,
        connect: Callable[[Any, str], Any],
        limits: ConnectionLimits,
        turn_s: float,
        budget: Budget,
    ) -> None:
        self.link = link
        self.loop = loop = link.bind()
        self.now = loop.time
        self.shares = link.shares
        self.turns = link.turns
        self.reads = link.reads
        self.backlog = link.backlog
        self.turn = 0
        self.min_bytes = max(1, int(limits.data_rate * turn_s))
        """Fewer bytes than this in a turn count as no progress."""
        self.idle_turns = math.ceil(limits.idle_timeout_s / turn_s)
        self.stopping = False
        self.answers: Counter[int] = Counter()
        """Number of responses by status."""
        self.evicted = 0
        """Number of connections closed to make room for others."""
        self.budget = budget
        self._limits = limits
        self._turn_s = turn_s
        self._read_turns = math.ceil(limits.read_timeout_s / turn_s)
        self._connections: set[CallerConnection] = set()
        self._connect = partial(connect, self)
        self._server: asyncio.Server | None = None
        self._handshakes: Handshakes | None = None
        """Only with TLS or PROXY headers."""
        self._empty = asyncio.Event()
        self._last_call: asyncio.TimerHandle | None = None
        """Set by `give_up`: closes the connections that are left."""
        self._checks: SlicedJob | None = None
        self._clock = loop.call_later(turn_s, self._tick)

    async def open(self, address: str, port: int, share: bool, tls: ssl.SSLContext | None = None) -> int:
        """Listens, and returns the port. `share`: other processes may also listen on the port, and the kernel
        distributes clients."""
        proxies = self.shares.bounds.proxies
        plain = tls is None and not proxies
        server = await self.loop.create_server(
            partial(self._connect, ""), address, port, reuse_port=share or None, backlog=BACKLOG, start_serving=plain
        )
        bound_port: int = server.sockets[0].getsockname()[1]
        if plain:
            self._server = server
            return bound_port
        patience_s = min(self._limits.read_timeout_s, HANDSHAKE_S)
        self._handshakes = Handshakes(self.loop, self._connect, tls, patience_s, _GOODBYE_S, self._room, proxies)
        for bound in server.sockets:
            listening = socket.socket(fileno=os.dup(bound.fileno()))
            listening.listen(BACKLOG)
            self._handshakes.listen(listening)
        server.close()
        return bound_port

    async def renew(self, tls: ssl.SSLContext | None) -> None:
        """Applies reloaded certificates and tokens."""
        if tls is not None:
            assert self._handshakes is not None
            self._handshakes.renew(tls)

    @property
    def connections(self) -> int:
        return len(self._connections)

    def _room(self) -> int:
        """Maximum number of connections in the handshake."""
        return self._limits.connections - len(self._connections)

    def metrics(self, protocol: str, answers: str, label: str) -> str:
        """`answers`: the help text for the counter of responses. `label`: the name of its status label."""
        name = protocol.lower()
        handshakes, refused = 0, 0
        if self._handshakes is not None:
            handshakes, refused = self._handshakes.count, self._handshakes.refused_headers
        counts = {f'{label}="{status:d}"': count for status, count in sorted(self.answers.items())}
        opened = f"Open {protocol} connections, including those in the TLS handshake"
        evicted = f"Idle {protocol} connections closed to make room for new ones"
        headers = f"{protocol} connections closed for a PROXY header that was malformed or came from no trusted proxy"
        return (
            family(f"{name}_connections", "gauge", opened, {"": self.connections + handshakes})
            + family(f"{name}_connections_evicted_total", "counter", evicted, {"": self.evicted})
            + family(f"{name}_proxy_headers_refused_total", "counter", headers, {"": refused})
            + family(f"{name}_answers_total", "counter", f"{answers}, by status", counts)
        )

    # ------------------------------------------------------------------------------------ interface for connections

    def enter(self, connection: CallerConnection) -> bool:
        if len(self._connections) >= self._limits.connections:
            self._evict()
        self._connections.add(connection)
        return len(self._connections) <= self._limits.connections and not self.stopping

    def _evict(self) -> None:
        """Closes the connections that have been idle longest; their clients reconnect when they need to. Several are
        closed at once, because the search scans all connections."""
        idle = [(since, one) for one in self._connections if (since := one.idle_since) is not None]
        idle.sort(key=itemgetter(0))
        for _, connection in idle[: max(1, min(EVICTED, len(idle) // 8))]:
            self._connections.discard(connection)
            self.evicted += 1
            connection.evict()

    def leave(self, connection: CallerConnection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._empty.set()

    def answered(self, status: int) -> None:
        self.answers[status] += 1

    # ------------------------------------------------------------------------------------ timeouts and shutdown

    def _tick(self) -> None:
        self.turn += 1
        self._clock = self.loop.call_later(self._turn_s, self._tick)
        if self._checks is None or not self._checks.running:
            self._checks = self.turns.run(self._check_timeouts(), lambda _: None, _raise)

    def _check_timeouts(self) -> SlicedWork[None]:
        """In slices: a connection may have a thousand calls, which may all have timed out."""
        end = time.monotonic() + CHECK_S
        for connection in list(self._connections):
            connection.check_timeouts(self._read_turns)
            if time.monotonic() > end:
                yield
                end = time.monotonic() + CHECK_S

    async def close(self) -> None:
        """Stops accepting requests and waits for those in flight."""
        self.stopping = True
        if self._server is not None:
            self._server.close()
        if self._handshakes is not None:
            self._handshakes.close()
        for connection in list(self._connections):
            connection.stop()
        if self._connections:
            self._empty.clear()
            await self._empty.wait()
        self._clock.cancel()
        if self._last_call is not None:
            self._last_call.cancel()

    def give_up(self, error: ServeError) -> None:
        """Ends `close` soon: requests that were not sent to the server get this error. Call after all others were
        failed."""
        for connection in list(self._connections):
            connection.give_up(error)
        self._last_call = self.loop.call_later(FLUSH_S, self._abort_all)

    def _abort_all(self) -> None:
        for connection in list(self._connections):
            connection.abort()


def _raise(error: Exception) -> None:
    raise error
