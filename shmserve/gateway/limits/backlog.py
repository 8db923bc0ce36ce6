"""Bounds the work that the input of all connections causes in one iteration of the event loop, whoever answers it: the
model, the broker, or the gateway alone.

A connection is delayed if it exceeds its own limit, or if it receives input after the work budget of the iteration is
spent. The next iteration starts with the connections that have had the least of their fair share, as in start-time fair
queueing. So a flood over any number of connections delays only those connections, and a new connection gains nothing
over an old one.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from typing import Protocol

log = logging.getLogger("shmserve.gateway")

CONNECTION_WORK = 128
"""Maximum units of work for one connection per iteration of the event loop. A unit is the work for one HTTP/2 frame
without effect, about 5 us."""
TURN_WORK = 8 * CONNECTION_WORK
"""The same for all connections together: enough for a request from each of a hundred connections."""
_RESERVED_WORK = TURN_WORK // 2
"""The part of it that is reserved for connections that are not delayed."""
REQUEST_WORK = 6
"""The work for one request: to parse it, and to answer it or to pass it on."""
SENT_BYTES = 4096
"""Sending this many bytes of an answer is one unit."""


class Delayed(Protocol):
    """A connection with input that has not been processed."""

    @property
    def spent(self) -> int: ...

    @property
    def estimate(self) -> int:
        """The estimated work for the input that waits."""

    def proceed(self) -> bool:
        """Processes input up to the limits. True: input is left."""

    def abort(self) -> None:
        """Closes the connection."""


class Spender(Protocol):
    """`spent` is set here: the virtual time up to which the connection has used its share."""

    spent: int


class WorkBudget:
    """The work that one connection may still do in this iteration of the loop. `left` is only changed here."""

    def __init__(self) -> None:
        self.left = 0
        self._allowed = 0

    def begin(self, allowed: int) -> None:
        self.left = self._allowed = allowed

    def spend(self, work: int) -> None:
        self.left -= work

    @property
    def spent(self) -> int:
        return self._allowed - self.left


class InputBacklog:
    """The work budget of an iteration, and the connections that are delayed."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.remaining = TURN_WORK
        """Work left in this iteration of the loop."""
        self.allowed = CONNECTION_WORK
        """Work that a connection may do now."""
        self._now = self._end = 0
        """Virtual time: it advances with the work for the connection that has had the least, so that idle connections
        save nothing up. `_end`: the latest `spent` of all connections."""
        self._waiting: list[tuple[int, int, Delayed]] = []
        self._count = itertools.count()
        self._scheduled = False

    def spend(self, spender: Spender, work: int) -> None:
        spent = spender.spent
        spent = (spent if spent > self._now else self._now) + work  # max() would take longer than the rest
        spender.spent = spent
        if spent > self._end:
            self._end = spent
        self.remaining -= work
        if self.remaining < _RESERVED_WORK:
            self.allowed = max(0, min(CONNECTION_WORK, self.remaining))
            self._schedule()

    def put(self, connection: Delayed) -> None:
        key = max(connection.spent, self._now) + connection.estimate
        heapq.heappush(self._waiting, (key, next(self._count), connection))
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._next)

    def _next(self) -> None:
        """Starts an iteration with the connections that are delayed."""
        self._scheduled = False
        self.remaining = TURN_WORK
        self.allowed = CONNECTION_WORK
        again = []
        while self._waiting and self.remaining > _RESERVED_WORK:
            connection = heapq.heappop(self._waiting)[2]
            self._now = max(self._now, connection.spent)
            try:
                delayed = connection.proceed()
            except Exception:  # an internal error must not affect other connections
                log.exception("cannot process the input of a client")
                connection.abort()
            else:
                if delayed:
                    again.append(connection)
        for connection in again:
            self.put(connection)
        if self._waiting:
            self._schedule()
        else:
            self._now = self._end
