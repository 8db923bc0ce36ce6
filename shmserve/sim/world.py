"""The world of a simulation: the clock, the links to the broker, and counters of requests sent and unanswered.

Clients and workers act only through the World. `run.Simulation` drives it and runs the broker's turns. Invariant:
events at the same time are processed in the order in which they were scheduled, the broker's turn after all others.
Nothing here is random.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from shmserve.sim.faults import FaultDraws
from shmserve.sim.plan import Plan
from shmserve.sim.results import SECOND, Digest

START = SECOND
"""Start time; the core reserves 0 for "none"."""
FOREVER = 1 << 62
KEPT_LOG = 20


class World:
    """`turn` is called with the messages of each turn of the broker."""

    def __init__(self, plan: Plan, turn: Callable[[list[tuple[int, Any]]], object]) -> None:
        self.plan = plan
        self.faults = FaultDraws(plan.faults, plan.seed)
        self.digest = Digest()
        self.log: list[str] = []
        self.now = START
        self._heap: list[tuple[int, int, Callable[[Any], object], Any]] = []
        self._number = 0
        # The broker
        self._turn = turn
        self._take_up: Callable[[Any], object] = self._run_turn
        self._inbox: list[tuple[int, Any]] = []
        self._due = False
        """A turn is scheduled for the messages in the inbox."""
        self.free = START
        """When the broker finishes its last turn."""
        # The load
        self.began = START
        """Time at which the load starts."""
        self.ends = FOREVER
        """Time at which sending ends."""
        self._last = FOREVER
        """Time at which the last request arrives."""
        self._sent = 0
        self._exhausted = False
        self.sources = 0
        """Sources with requests left to send."""
        self.unanswered = 0
        """Unanswered requests, including the next request of each sequence that is between two requests."""
        self.last_answer = START
        self._homes: dict[int | str, int] = {}

    # ------------------------------------------------------------------------------------ time

    def at(self, time: int, what: Callable[[Any], object], argument: Any) -> None:
        """Schedules a call."""
        self._number += 1
        heapq.heappush(self._heap, (time, self._number, what, argument))

    def run_until(self, over: Callable[[], bool], limit: int) -> None:
        heap, pop = self._heap, heapq.heappop
        while heap and not over():
            if heap[0][0] > limit:
                return
            self.now, _, what, argument = pop(heap)
            what(argument)

    def advance(self, end: int) -> int:
        """Runs all events before `end`, for a simulation of several worlds. Returns the time of the next event."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] < end:
            self.now, _, what, argument = pop(heap)
            what(argument)
        return heap[0][0] if heap else FOREVER

    def run_load(self) -> None:
        """Runs until all requests to be sent have arrived."""
        heap, pop = self._heap, heapq.heappop
        while self.sending and heap and heap[0][0] <= self._last:
            for _ in range(100):  # check for the end only every 100 events
                if not heap or heap[0][0] > self._last or self._exhausted:
                    break
                self.now, _, what, argument = pop(heap)
                what(argument)
        self._exhausted = True
        if self.ends == FOREVER:
            self.ends = self.now

    # ------------------------------------------------------------------------------------ to the broker

    def send_from_client(self, at: int, peer: int, message: Any) -> None:
        self._number += 1
        heapq.heappush(self._heap, (at + self.plan.link_ns, self._number, self.arrive, (peer, message)))

    def send_from_worker(self, peer: int, message: Any) -> None:
        """Sends a message from a worker, now."""
        self._number += 1
        heapq.heappush(self._heap, (self.now + self.plan.link_ns, self._number, self.arrive, (peer, message)))

    def arrive(self, event: tuple[int, Any]) -> None:
        self._inbox.append(event)
        if not self._due:
            self._due = True
            now, free = self.now, self.free
            self._number += 1  # everything else that arrives at this time is part of the turn
            heapq.heappush(self._heap, (now if now > free else free, FOREVER + self._number, self._take_up, None))

    def _run_turn(self, _: None) -> None:
        self._due = False
        inbox, self._inbox = self._inbox, []
        self.free = self.now + self.plan.turn_ns + self.plan.message_ns * len(inbox)
        self._turn(inbox)

    def take_empty_turn(self) -> None:
        """Accounts for the time of a turn without messages, when the broker was woken by its timer."""
        self.free = max(self.free, self.now + self.plan.turn_ns)

    # ------------------------------------------------------------------------------------ the load

    def begin_load(self) -> None:
        self.began = self.now
        if self.plan.seconds:
            self.ends = self.now + round(self.plan.seconds * SECOND)
            self._last = self.ends + self.plan.link_ns

    @property
    def sending(self) -> bool:
        return self.sources > 0 and not self._exhausted and self.now <= self._last

    def may_send(self, at: int) -> bool:
        """Counts one more request. False: the limit of time or requests has been reached."""
        if self._exhausted or at > self.ends:
            return False
        self._sent += 1
        if self._sent == self.plan.requests:
            self._exhausted = True
            self.ends = at
        return True

    # ------------------------------------------------------------------------------------ observations

    def note(self, text: str) -> None:
        if len(self.log) < KEPT_LOG:
            self.log.append(f"{(self.now - self.began) / SECOND:.6f} {text}")

    def check_home(self, sequence: int | str, peer: int) -> None:
        """Asserts that each sequence stays at one worker. No two sequences share an id."""
        home = self._homes.setdefault(sequence, peer)
        assert home == peer, f"sequence {sequence} moved from worker {home} to {peer}"
