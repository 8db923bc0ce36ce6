"""All connections of one listening socket, and what they share. The rule of the file: one slow clock for all of them,
so that no request costs a timer.
"""

from __future__ import annotations

import asyncio
import math
import ssl
from collections import Counter
from collections.abc import Callable

from shmserve.clients.gateway.guards.access import Access
from shmserve.clients.gateway.guards.headers import Forward
from shmserve.clients.gateway.http.connection import Connection
from shmserve.clients.gateway.http.heads import Heads
from shmserve.clients.gateway.http.limits import Limits
from shmserve.clients.gateway.http.requests import Requests
from shmserve.clients.gateway.link import GatewayLink
from shmserve.clients.gateway.listen import Listener
from shmserve.clients.gateway.regions import Regions
from shmserve.errors import Unavailable

TURNS = 4
"""So many turns of the slow clock are a read timeout."""
LEAST_RATE = 1024
"""Bytes a second, either way."""


class Door:
    """`metrics`: the door of Prometheus, and no other path. `extra` gives what is added to the broker's metrics."""

    def __init__(
        self, link: GatewayLink, limits: Limits, access: Access, *, metrics: bool = False,
        extra: Callable[[], str] = lambda: "", regions: Regions | None = None, forward: Forward | None = None,
    ) -> None:  # fmt: skip
        self.link = link
        self.limits = limits
        self.loop = link.bind()
        self.heads = Heads(access, metrics, forward)
        self.requests = Requests(link, limits, extra, regions or Regions(False))
        self.turn = 0
        self.turn_s = limits.read_timeout_s / TURNS
        self.least_bytes = max(1, int(LEAST_RATE * self.turn_s))
        """Whoever moves less in a turn is waited for no longer than one who does not move."""
        self.idle_turns = math.ceil(limits.idle_timeout_s / self.turn_s)
        self.stopping = False
        self.answers: Counter[int] = Counter()
        self._held = 0
        self._connections: set[Connection] = set()
        self._listener = Listener(self.loop, lambda: Connection(self), limits.read_timeout_s)
        self._empty: asyncio.Event = asyncio.Event()
        self._clock = self.loop.call_later(self.turn_s, self._tick)

    async def open(self, address: str, port: int, share: bool, tls: ssl.SSLContext | None = None) -> int:
        return await self._listener.open(address, port, share, tls)

    async def renew(self, tls: ssl.SSLContext | None) -> None:
        """Certificates and tokens have been read again."""
        self.heads.forget()
        if tls is not None:
            await self._listener.reopen(tls)

    @property
    def connections(self) -> int:
        return len(self._connections)

    # ------------------------------------------------------------------------------------ what connections call

    def enter(self, connection: Connection) -> bool:
        self._connections.add(connection)
        return len(self._connections) <= self.limits.connections and not self.stopping

    def leave(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._empty.set()

    def hold(self, size: int) -> None:
        """`size` below 0: they are held no longer."""
        held = self._held + size
        if size > 0 and held > self.limits.held_bytes:
            raise Unavailable(
                f"the bodies of all requests together would be over {self.limits.held_bytes} bytes; send again later, "
                "or raise --http-max-held-size of the gateway"
            )
        self._held = held

    def answered(self, status: int) -> None:
        self.answers[status] += 1

    # ------------------------------------------------------------------------------------ time

    def _tick(self) -> None:
        self.turn += 1
        self._clock = self.loop.call_later(self.turn_s, self._tick)
        for connection in list(self._connections):
            connection.look(TURNS)

    # ------------------------------------------------------------------------------------ the end

    async def close(self) -> None:
        """Takes no new requests, and waits for the answers to those that are here, as long as the limit says."""
        self.stopping = True
        self._listener.close()
        for connection in list(self._connections):
            connection.stop()
        if self._connections:
            self._empty.clear()
            waiting = self.loop.create_task(self._empty.wait())
            await asyncio.wait([waiting], timeout=self.limits.exit_timeout_s)
            for connection in list(self._connections):
                connection.abort()
            await waiting
        self._clock.cancel()
