"""Bounds the work that all HTTP/2 connections together cause in one iteration of the event loop.

A connection is delayed if it exceeds its own limit, or if it receives frames after the work budget of the iteration is
spent. The next iteration starts with the connections that have cost least, so a flood over any number of connections
delays only those connections.
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
        """Recent work for the connection, plus an estimate for the waiting frame."""

    def go_on(self) -> bool:
        """Processes frames up to the limits. True: frames are left."""


class FrameBacklog:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.left = most.TURN_WORK
        """Work left in this iteration of the loop."""
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
        """Reserves half of the work budget for connections that are not delayed."""
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
