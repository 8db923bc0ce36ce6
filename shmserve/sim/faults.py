"""What goes wrong, how often.

The rule of the file: every fault has its own random numbers, so that a plan with one more kind of fault meets the same
arrivals and service times as before.
"""

from __future__ import annotations

from random import Random

from msgspec import Struct

SECOND = 1_000_000_000
POISON = "poison"
"""A parameter of requests that end whoever runs them."""


class Faults(Struct, frozen=True):
    """Shares are probabilities, 0 is never."""

    death_every_s: float = 0.0
    """Mean time until a worker process ends by itself, at work or not."""
    crash_share: float = 0.0
    """Batches in whose midst the worker ends."""
    poison_share: float = 0.0
    """Requests that end any worker that runs them."""
    hang_share: float = 0.0
    """Batches that are never done, until the worker is killed (the model's execution limit)."""
    failure_share: float = 0.0
    """Requests that the model answers with an error."""
    late_share: float = 0.0
    """Worker processes that take `late_ns` longer to load."""
    late_ns: int = 10 * SECOND
    client_every_s: float = 0.0
    """Mean time until a client dies; another one takes over from it."""
    slow_share: float = 0.0
    """Clients that keep answers in shared memory for `hold_ns`."""
    hold_ns: int = SECOND
    cancel_share: float = 0.0
    """Requests that are cancelled `cancel_ns` after they were sent."""
    cancel_ns: int = 1_000_000


class Fate:
    """What the faults of a plan mean for one batch, request, process or client."""

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
        """ "" or "crash" or "hang", and after which share of the batch's time."""
        share, where = self._batches.random(), self._batches.random()
        if share < self.faults.crash_share:
            return "crash", where
        return ("hang", 0.0) if share < self.faults.crash_share + self.faults.hang_share else ("", 0.0)

    def request(self) -> tuple[bool, bool]:
        """Does it end workers? Is it cancelled?"""
        poison, cancel = self._requests.random(), self._requests.random()
        return poison < self.faults.poison_share, cancel < self.faults.cancel_share

    def answer_fails(self) -> bool:
        return self._answers.random() < self.faults.failure_share

    def worker(self) -> tuple[int, int]:
        """How much later a process is ready, and how long after its start it ends (0: not by itself)."""
        faults, draw = self.faults, self._workers
        late = faults.late_ns if draw.random() < faults.late_share else 0
        every = faults.death_every_s
        return late, round(draw.expovariate(1 / every) * SECOND) + 1 if every else 0

    def client(self) -> tuple[int, int]:
        """How long it keeps answers, and how long after its start it dies (0: not)."""
        faults, draw = self.faults, self._clients
        hold = faults.hold_ns if draw.random() < faults.slow_share else 0
        every = faults.client_every_s
        return hold, round(draw.expovariate(1 / every) * SECOND) + 1 if every else 0
