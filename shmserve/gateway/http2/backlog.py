"""What all connections of HTTP/2 together may cost in one turn of the loop.

Connections that are over their own limit, or come when the turn's work is spent, are put off. In the next turn those go
first that have cost least, so a flood over any number of connections delays its own connections and no others.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from typing import Protocol

from shmserve.gateway.http2 import limits as most


class Delayed(Protocol):
    """A connection with frames that have not been processed."""

    @property
    def cost(self) -> int:
        """Of what was processed for it lately, and of the frame that waits."""

    def go_on(self) -> bool:
        """Processes what it may. True: there is still more."""


class Backlog:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.left = most.TURN_WORK
        """Of this turn of the loop."""
        self._waiting: list[tuple[int, int, Delayed]] = []
        self._count = itertools.count()
        self._scheduled = False

    def spend(self, work: int) -> None:
        self.left -= work
        if self.left < most.TURN_WORK // 2:
            self._schedule()

    def put(self, connection: Delayed) -> None:
        heapq.heappush(self._waiting, (connection.cost, next(self._count), connection))
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._next)

    def _next(self) -> None:
        """Half of the turn's work is left to connections that are not delayed."""
        self._scheduled = False
        self.left = most.TURN_WORK
        again = []
        while self._waiting and self.left > most.TURN_WORK // 2:
            connection = heapq.heappop(self._waiting)[2]
            if connection.go_on():
                again.append(connection)
        for connection in again:
            self.put(connection)
        if self._waiting:
            self._schedule()
