"""The query `service` and the operation `set_service`: take the server out of service before an upgrade, and report
since when it has been idle.

A server that is out of service is not ready, which load balancers notice within seconds, but it still answers every
request that arrives. It is idle while it has no request, sequence or lease; the caller decides how long that must last.
A server that stops, in contrast, refuses new requests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from heapq import nlargest
from typing import Any

from msgspec import Struct

from shmserve.core.events import SetService
from shmserve.core.state import State
from shmserve.protocol.bodies import decode_body

log = logging.getLogger("shmserve")

TICK_S = 0.2
"""Interval at which a server that is out of service checks whether it is idle."""
SHOWN_CLIENTS = 10


class ServiceBody(Struct, forbid_unknown_fields=True):
    out_of_service: bool


class ServiceControl:
    """`put` passes an event to the core. `changed` is called after a change."""

    def __init__(
        self,
        loop: Any,
        state: State,
        put: Callable[[SetService], None],
        changed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loop = loop
        self._state = state
        self._put = put
        self._changed = changed
        self._clock = clock
        self._out_of_service = False
        """As last requested; the core applies it in its next turn."""
        self._began = 0.0
        self._quiet_since: float | None = None
        self._last_number = 0
        self._timer: Any = None

    def document(self) -> dict[str, Any]:
        state, now = self._state, self._clock()
        self._check_idle(now)
        clients = [client for client in state.clients.values() if client.requests]
        shown = nlargest(SHOWN_CLIENTS, clients, key=lambda client: len(client.requests))
        return {
            "out_of_service": self._out_of_service,
            "seconds": round(now - self._began, 3) if self._out_of_service else 0.0,
            "requests": len(state.requests) + len(state.leases),
            "sequences": len(state.sequences),
            "quiet_seconds": 0.0 if self._quiet_since is None else round(now - self._quiet_since, 3),
            "clients": [{"name": client.name, "in_flight": len(client.requests)} for client in shown],
        }

    def change(self, body: bytes) -> dict[str, Any]:
        wanted: ServiceBody = decode_body(body, ServiceBody, "'set_service'")
        if wanted.out_of_service != self._out_of_service:
            self._out_of_service = wanted.out_of_service
            if wanted.out_of_service:
                self._begin()
            else:
                self._end()
            self._put(SetService(wanted.out_of_service))
            self._loop.call_soon(self._changed)
        return self.document()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _begin(self) -> None:
        log.info("out of service: the server is not ready, and finishes its requests")
        self._began = self._clock()
        self._quiet_since = None
        self._tick()

    def _end(self) -> None:
        log.info("in service again")
        self._quiet_since = None
        self.close()

    def _tick(self) -> None:
        self._check_idle(self._clock())
        self._timer = self._loop.call_later(TICK_S, self._tick)

    def _check_idle(self, now: float) -> None:
        """Updates since when the server has been idle. It takes a request number, since a gap between two of these
        reveals requests that arrived and finished between two checks."""
        state = self._state
        number = state.next_number()
        busy = bool(state.requests or state.leases or state.sequences)
        if not self._out_of_service or busy:
            self._quiet_since = None
        elif self._quiet_since is None or number != self._last_number + 1:
            self._quiet_since = now
        self._last_number = number
