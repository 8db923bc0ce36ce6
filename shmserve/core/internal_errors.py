"""Internal errors: an unexpected exception is logged with its traceback, and affects only the peer that caused it.

Invariant: a turn loses only the event that failed. If a client sent it, the client is disconnected and so does not wait
for a response. If a worker sent it, the worker is killed and other workers run its requests.
"""

from __future__ import annotations

import traceback
from typing import Any

from shmserve.core.intake.connections import Connections
from shmserve.core.state import WORKERS_FROM, State
from shmserve.core.termination import kill
from shmserve.errors import Internal

INTERNAL_ERROR = "an internal error of the server"
"""Marks each such error in the log."""
ERRORS_PER_TURN = 100
"""Limit of internal errors in one turn; further ones are raised."""


class InternalErrors:
    """Handles internal errors; call it within an except clause. With `survive` false they are raised, for tests and
    simulations."""

    def __init__(self, state: State, connections: Connections, survive: bool) -> None:
        self._state = state
        self._connections = connections
        self._survive = survive
        self._turn = -1
        self._count = 0

    def by_event(self, peer: int, message: Any) -> None:
        what = type(message).__name__
        self.report(f"{what} of {'worker' if peer >= WORKERS_FROM else 'client'} {peer}")
        if peer >= WORKERS_FROM:
            known = self._state.instances.get(peer)
            if known is not None:
                kill(self._state, *known, f"{INTERNAL_ERROR} in its {what}")
        else:
            self._connections.disconnect_peer(
                peer, Internal(f"{INTERNAL_ERROR} ended this connection; reconnect, and see the server's log")
            )

    def report(self, where: str) -> None:
        if not self._survive:
            raise  # re-raises the exception being handled
        if self._turn != self._state.now:
            self._turn, self._count = self._state.now, 0
        self._count += 1
        if self._count > ERRORS_PER_TURN:
            raise
        self._state.log("critical", f"{INTERNAL_ERROR}, please report it: in {where}:\n{traceback.format_exc()}")
