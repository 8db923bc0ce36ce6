"""The callers for whom clients speak: what they have in flight, and what they have used.

Invariant: there may be any number of callers over time, so only about KEPT of a user are remembered. Those without
requests in flight whose requests took least time are forgotten first, half of them at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import nlargest

from msgspec import Struct

KEPT = 1000


class Caller(Struct, eq=False):
    """One of the callers for whom clients speak. `number`: unique while the server runs, and negative, as clients have
    positive ones. `name`: as its client states it. `user`: with whom it shares. `label`: how it is shown.

    `entered` are its admitted requests, including steps of ensembles and calls of models, and `finished` those
    of them that have ended. `finished_ns`: sum of the times from arrival to the end.
    """

    number: int
    name: str
    user: str
    label: str
    entered: int = 0
    finished: int = 0
    finished_ns: int = 0

    @property
    def in_flight(self) -> int:
        return self.entered - self.finished

    def enter(self, count: int = 1) -> None:
        self.entered += count

    def leave(self, count: int, ns: int) -> None:
        """Requests have ended. `ns`: the sum of the times since they arrived."""
        self.finished += count
        self.finished_ns += ns


class Callers(dict[str, Caller]):
    """The callers of a user's clients, by the names that the clients state. Those of the server's gateways count like
    users. Those of other clients share what their user has, so the client gains nothing by naming them."""

    def __init__(self, user: str, trusted: bool, numbers: Iterator[int]) -> None:
        """`numbers`: those of new callers."""
        super().__init__()
        self._user = user
        self._trusted = trusted
        self._numbers = numbers
        self._sweep_at = KEPT
        self.active = 0
        """The number of those with requests in flight, when they were last counted."""

    def __missing__(self, name: str) -> Caller:
        if len(self) >= self._sweep_at:
            self._forget()
        whole = f"{self._user} {name}"
        user, label = (whole, name) if self._trusted else (self._user, whole)
        created = self[name] = Caller(next(self._numbers), name, user, label)
        return created

    def _forget(self) -> None:
        kept = set(nlargest(KEPT // 2, self.values(), key=lambda caller: caller.finished_ns))
        for name in [name for name, caller in self.items() if not caller.in_flight and caller not in kept]:
            del self[name]
        self._sweep_at = len(self) + KEPT // 2

    def count_active(self) -> int:
        self.active = sum([caller.entered != caller.finished for caller in self.values()])
        return self.active
