"""Fault injection: kinds of faults and their frequencies.

Invariant: faults are drawn from separate random number generators, so adding a fault to a plan does not change arrivals
or service times.
"""

from __future__ import annotations

from random import Random

from msgspec import Struct

from shmserve.sim.results import SECOND

POISON = "poison"
"""Request parameter that makes a worker crash when it runs the request."""


class Faults(Struct, frozen=True):
    """Each `*_share` is a probability, each `*_every_s` a mean time between faults. 0 disables the fault."""

    death_every_s: float = 0.0
    """Mean time until a worker process dies by itself, busy or idle."""
    crash_share: float = 0.0
    """Share of batches during which the worker crashes."""
    poison_share: float = 0.0
    """Share of requests that crash every worker that runs them."""
    hang_share: float = 0.0
    """Share of batches that hang until the worker is killed (execution limit of the model)."""
    failure_share: float = 0.0
    """Share of requests that the model answers with an error."""
    late_share: float = 0.0
    """Share of worker processes that take `late_ns` longer to load."""
    late_ns: int = 10 * SECOND
    client_every_s: float = 0.0
    """Mean time until a client dies; a new client replaces it."""
    slow_share: float = 0.0
    """Share of clients that hold outputs in shared memory for `hold_ns`."""
    hold_ns: int = SECOND
    cancel_share: float = 0.0
    """Share of requests that are cancelled `cancel_ns` after they were sent."""
    cancel_ns: int = 1_000_000


class FaultDraws:
    """Draws the faults of a plan for each batch, request, process and client."""

    def __init__(self, faults: Faults, seed: int) -> None:
        self.faults = faults
        self._batches = Random(f"{seed} batches")
        self._requests = Random(f"{seed} requests")
        self._answers = Random(f"{seed} answers")
        self._workers = Random(f"{seed} workers")
        self._clients = Random(f"{seed} clients")
        self.of_batches = faults.crash_share > 0 or faults.hang_share > 0
        self.of_requests = faults.poison_share > 0 or faults.cancel_share > 0
        self.of_answers = faults.failure_share > 0

    def batch(self) -> tuple[str, float]:
        """The fault ("", "crash" or "hang"), and the fraction of the batch's time after which it happens."""
        share, where = self._batches.random(), self._batches.random()
        if share < self.faults.crash_share:
            return "crash", where
        return ("hang", 0.0) if share < self.faults.crash_share + self.faults.hang_share else ("", 0.0)

    def request(self) -> tuple[bool, bool]:
        """Whether the request crashes workers, and whether it is cancelled."""
        poison, cancel = self._requests.random(), self._requests.random()
        return poison < self.faults.poison_share, cancel < self.faults.cancel_share

    def answer_fails(self) -> bool:
        return self._answers.random() < self.faults.failure_share

    def worker(self) -> tuple[int, int]:
        """The extra load time of the process, and the time from loading to its death (0: it does not die)."""
        late = self.faults.late_ns if self._workers.random() < self.faults.late_share else 0
        return late, _lifetime_ns(self._workers, self.faults.death_every_s)

    def client(self) -> tuple[int, int]:
        """How long the client holds outputs, and the time from its start to its death (0: it does not die)."""
        hold = self.faults.hold_ns if self._clients.random() < self.faults.slow_share else 0
        return hold, _lifetime_ns(self._clients, self.faults.client_every_s)


def _lifetime_ns(draws: Random, mean_s: float) -> int:
    return round(draws.expovariate(1 / mean_s) * SECOND) + 1 if mean_s else 0
