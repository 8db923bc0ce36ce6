"""Statistics of callers: what those for whom gateways speak have used.

Invariant: there may be any number of callers over time, so only about KEPT are remembered. Those whose requests took
least time are forgotten first, half of them at a time.
"""

from __future__ import annotations

from heapq import nlargest

from msgspec import Struct

KEPT = 1000


class CallerCount(Struct, eq=False):
    """The requests of a caller that have ended, including steps of ensembles and calls of models. `number`: unique
    while the server runs; it stands for the caller where the `name` is not shown. `request_ns`: sum of the times from
    arrival to the end."""

    number: int
    name: str
    requests: int = 0
    request_ns: int = 0


class CallerCounts:
    def __init__(self) -> None:
        self._counts: dict[str, CallerCount] = {}
        self._seen = 0

    def of(self, name: str) -> CallerCount:
        """The count of a caller that is about to have a request."""
        found = self._counts.get(name)
        if found is None:
            if len(self._counts) >= KEPT:
                self._counts = {count.name: count for count in self.largest(KEPT // 2)}
            self._seen += 1
            found = self._counts[name] = CallerCount(self._seen, name)
        return found

    def largest(self, limit: int) -> list[CallerCount]:
        """Those whose requests took most time."""
        return nlargest(limit, self._counts.values(), key=lambda count: count.request_ns)
