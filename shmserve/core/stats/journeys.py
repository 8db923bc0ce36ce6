"""The slowest requests of a version in the last minutes, and the last ones that failed: where the time of each went.

A request is described only if it is one of them. Of an ensemble, one run in each SAMPLED_NS is followed with its steps;
of the others that fail, the steps that failed are known.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from operator import attrgetter

from msgspec import Struct, field

KEPT = 8
STEPS = 64
"""Maximum number of steps kept of one run of an ensemble."""
WINDOW_NS = 60 * 10**9
SAMPLED_NS = 100_000_000


class Journey(Struct):
    """`times`: of its batch: when it was taken, its inputs were ready, its outputs were computed, and its outputs were
    placed; empty for a request that no batch has answered. `reason`: why the batch was formed. `code` "": success."""

    model: str
    version: int
    arrived: int
    ended: int
    rows: int
    id: str = ""
    code: str = ""
    text: str = ""
    instance: str = ""
    batch_rows: int = 0
    reason: str = ""
    times: tuple[int, ...] = ()
    steps: list[Journey] = []

    @property
    def took_ns(self) -> int:
        return self.ended - self.arrived


_took_ns = attrgetter("took_ns")


class Journeys(Struct):
    """Those of one version. Invariant: at most 3 * KEPT."""

    floor: int = 0
    """Slower requests than this are among the slowest."""
    until: int = 0
    """When the window of the slowest ends."""
    slowest: list[Journey] = []
    """By duration, the fastest first."""
    before: list[Journey] = []
    """The slowest of the window before."""
    failed: deque[Journey] = field(default_factory=lambda: deque(maxlen=KEPT))
    sample_at: int = 0
    """For ensembles: when the next run is to be followed."""

    def follows(self, now: int) -> bool:
        """True if a run that begins now is to be followed, as the first one in SAMPLED_NS."""
        due = now >= self.sample_at
        if due:
            self.sample_at = now + SAMPLED_NS
        return due

    def is_slow(self, arrived: int, now: int) -> bool:
        return now - arrived > self.floor or now >= self.until

    def add_slow(self, journey: Journey, now: int) -> None:
        if now >= self.until:
            self.before = self.slowest if now < self.until + WINDOW_NS else []
            self.slowest, self.until, self.floor = [], now + WINDOW_NS, 0
        insort(self.slowest, journey, key=_took_ns)
        del self.slowest[:-KEPT]
        if len(self.slowest) == KEPT:
            self.floor = self.slowest[0].took_ns

    def recent_slow(self) -> list[Journey]:
        """The slowest first."""
        return sorted([*self.before, *self.slowest], key=_took_ns, reverse=True)[:KEPT]

    def recent_failed(self) -> list[Journey]:
        """The last first."""
        return list(reversed(self.failed))
