"""Statistics of callers: what each of those for whom gateways speak takes from the server.

Invariant: there may be any number of callers over time, so only those with requests in flight, and about KEPT others,
are remembered. Those that have taken least are forgotten first, half of them at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import nlargest
from operator import attrgetter

from msgspec import Struct

KEPT = 1000
SHOWN = 10


class CallerCount(Struct, eq=False):
    """The requests of a caller, including steps of ensembles and calls of models. `number`: unique while the server
    runs, and names the caller where its `name` is not shown. `request_ns`: sum of the times from arrival to the end."""

    number: int
    name: str
    in_flight: int = 0
    requests: int = 0
    """Requests that have ended."""
    request_ns: int = 0


class CallerCounts:
    def __init__(self) -> None:
        self._counts: dict[str, CallerCount] = {}
        self._seen = 0
        self._sweep_at = KEPT

    def of(self, name: str) -> CallerCount:
        """The count of a caller that is about to have a request."""
        found = self._counts.get(name)
        if found is None:
            if len(self._counts) >= self._sweep_at:
                self._forget()
            self._seen += 1
            found = self._counts[name] = CallerCount(self._seen, name)
        return found

    def _forget(self) -> None:
        busy = {user: count for user, count in self._counts.items() if count.in_flight}
        idle = [item for item in self._counts.items() if not item[1].in_flight]
        self._counts = busy | dict(nlargest(KEPT // 2, idle, key=lambda item: item[1].request_ns))
        self._sweep_at = len(busy) + KEPT

    def largest(self) -> list[CallerCount]:
        """Those with the most requests in flight; of others, those whose requests took most time."""
        return nlargest(SHOWN, self._counts.values(), key=attrgetter("in_flight", "request_ns"))

    def __iter__(self) -> Iterator[CallerCount]:
        return iter(self._counts.values())
