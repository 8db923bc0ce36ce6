"""Faults of our own: an exception where none may be. It is told with its trace, and costs only whoever brought it.

The rule of the file: nothing of a turn is lost but the one event. Its client is sent away, and so knows that it will
have no answer; its worker is ended, and what that one had is run by others.
"""

from __future__ import annotations

import traceback
from typing import Any

from shmserve.core.models.termination import kill
from shmserve.core.requests.admission import Admission
from shmserve.core.state import WORKERS_FROM, State
from shmserve.errors import Internal

SIGN = "a fault of the server's own"
"""In the log, wherever there is one."""
MANY = 100
"""So many in one turn are no accident any more."""


class Faults:
    """Call within an except clause. `survive` false: they are raised, as tests and simulations want."""

    def __init__(self, state: State, admission: Admission, survive: bool) -> None:
        self._state = state
        self._admission = admission
        self._survive = survive
        self._turn = -1
        self._count = 0

    def by_event(self, peer: int, message: Any) -> None:
        what = type(message).__name__
        self.told(f"{what} of {'worker' if peer >= WORKERS_FROM else 'client'} {peer}")
        if peer >= WORKERS_FROM:
            known = self._state.instances.get(peer)
            if known is not None:
                kill(self._state, *known, f"{SIGN} in its {what}")
        else:
            self._admission.part_with(peer, Internal(f"{SIGN} ended this connection; connect again. The log has more"))

    def told(self, where: str) -> None:
        if not self._survive:
            raise  # the one that is handled
        if self._turn != self._state.now:
            self._turn, self._count = self._state.now, 0
        self._count += 1
        if self._count > MANY:
            raise
        self._state.log("critical", f"{SIGN}, please report it: in {where}:\n{traceback.format_exc()}")
