"""All connections of a listening socket of HTTP, of either version, and what they share. The rule of the file: one slow
clock for all of them, so that no request costs a timer.
"""

from __future__ import annotations

import asyncio
import math
import ssl
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from shmserve.clients.gateway.listen import Listener
from shmserve.clients.gateway.metrics import family
from shmserve.errors import Unavailable

TURNS = 4
"""The slow clock goes so often while the shortest time that it measures goes by."""
LEAST_RATE = 1024
"""Bytes a second, either way."""


class Caller(Protocol):
    """A connection."""

    def look(self, waited: int) -> None:
        """Every turn of the slow clock. `waited`: so many turns are too many for one who keeps others waiting."""

    def stop(self) -> None:
        """No more requests are taken after those that are here."""

    def abort(self) -> None: ...


class Bounds(Protocol):
    @property
    def connections(self) -> int: ...
    @property
    def held_bytes(self) -> int: ...
    @property
    def read_timeout_s(self) -> float: ...
    @property
    def idle_timeout_s(self) -> float: ...
    @property
    def exit_timeout_s(self) -> float: ...


class Callers:
    """`made` makes the protocol of a new connection. `turn_s`: of the slow clock. `held`: what is held, in words."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, made: Callable[[], Any], bounds: Bounds, turn_s: float, held: str
    ) -> None:
        self.loop = loop
        self.turn = 0
        self.least_bytes = max(1, int(LEAST_RATE * turn_s))
        """Whoever moves less in a turn is waited for no longer than one who does not move."""
        self.idle_turns = math.ceil(bounds.idle_timeout_s / turn_s)
        self.stopping = False
        self.answers: Counter[int] = Counter()
        self.held = 0
        self._bounds = bounds
        self._turn_s = turn_s
        self._read_turns = math.ceil(bounds.read_timeout_s / turn_s)
        self._what = held
        self._connections: set[Caller] = set()
        self._listener = Listener(loop, made, bounds.read_timeout_s)
        self._empty = asyncio.Event()
        self._clock = loop.call_later(turn_s, self._tick)

    async def open(self, address: str, port: int, share: bool, tls: ssl.SSLContext | None = None) -> int:
        return await self._listener.open(address, port, share, tls)

    async def renew(self, tls: ssl.SSLContext | None) -> None:
        """Certificates and tokens have been read again."""
        if tls is not None:
            await self._listener.reopen(tls)

    @property
    def connections(self) -> int:
        return len(self._connections)

    def metrics(self, protocol: str, answers: str, label: str) -> str:
        """`answers`: what they are called. `label`: that of their status."""
        name = protocol.lower()
        counts = {f'{label}="{status:d}"': count for status, count in sorted(self.answers.items())}
        return family(
            f"{name}_connections", "gauge", f"Connections of {protocol} that are open", {"": self.connections}
        ) + family(f"{name}_answers_total", "counter", f"{answers}, by their status", counts)

    # ------------------------------------------------------------------------------------ what connections call

    def enter(self, connection: Caller) -> bool:
        self._connections.add(connection)
        return len(self._connections) <= self._bounds.connections and not self.stopping

    def leave(self, connection: Caller) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._empty.set()

    def hold(self, size: int) -> None:
        """`size` below 0: they are held no longer."""
        held = self.held + size
        if size > 0 and held > self._bounds.held_bytes:
            raise Unavailable(
                f"{self._what} together would be over {self._bounds.held_bytes} bytes; send again later, or raise "
                "--http-max-held-size of the gateway"
            )
        self.held = held

    def answered(self, status: int) -> None:
        self.answers[status] += 1

    # ------------------------------------------------------------------------------------ time, and the end

    def _tick(self) -> None:
        self.turn += 1
        self._clock = self.loop.call_later(self._turn_s, self._tick)
        for connection in list(self._connections):
            connection.look(self._read_turns)

    async def close(self) -> None:
        """Takes no new requests, and waits for the answers to those that are here, as long as the limit says."""
        self.stopping = True
        self._listener.close()
        for connection in list(self._connections):
            connection.stop()
        if self._connections:
            self._empty.clear()
            waiting = self.loop.create_task(self._empty.wait())
            await asyncio.wait([waiting], timeout=self._bounds.exit_timeout_s)
            for connection in list(self._connections):
                connection.abort()
            await waiting
        self._clock.cancel()
