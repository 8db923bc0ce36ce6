"""The world of a simulation: its clock, the links to the broker, and the count of what is sent and owed.

Clients and workers are given the World and act on it alone. `run.Simulation` drives it and gives the broker its turns.
Invariant: what happens at one time happens in the order in which it was planned. Nothing is drawn here.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from shmserve.sim.faults import Fate
from shmserve.sim.plan import Plan
from shmserve.sim.results import SECOND, Digest

START = SECOND
"""The first moment: 0 is no time for the core."""
FOREVER = 1 << 62
KEPT_LOG = 20


class World:
    """`turn` is called with the messages that the broker takes up in one turn."""

    def __init__(self, plan: Plan, turn: Callable[[list[tuple[int, Any]]], object]) -> None:
        self.plan = plan
        self.fate = Fate(plan.faults, plan.seed)
        self.digest = Digest()
        self.log: list[str] = []
        self.now = START
        self._heap: list[tuple[int, int, Callable[[Any], object], Any]] = []
        self._number = 0
        # The broker
        self._turn = turn
        self._take_up: Callable[[Any], object] = self._take_turn
        self._inbox: list[tuple[int, Any]] = []
        self._due = False
        """A turn is planned for what is in the inbox."""
        self.free = START
        """When the broker has done with its last turn."""
        # The load
        self.began = START
        """When the first request could be sent."""
        self.ends = FOREVER
        """When sending ends."""
        self._last = FOREVER
        """When the last request that was sent has arrived."""
        self._sent = 0
        self._exhausted = False
        self.sources = 0
        """Sources that have more to send."""
        self.owed = 0
        """Requests without an answer, and those of sequences that are still to come."""
        self.last_answer = START
        self._homes: dict[int | str, int] = {}

    # ------------------------------------------------------------------------------------ time

    def at(self, time: int, what: Callable[[Any], object], argument: Any) -> None:
        """Plans it."""
        self._number += 1
        heapq.heappush(self._heap, (time, self._number, what, argument))

    def run_until(self, over: Callable[[], bool], limit: int) -> None:
        heap, pop = self._heap, heapq.heappop
        while heap and not over():
            if heap[0][0] > limit:
                return
            self.now, _, what, argument = pop(heap)
            what(argument)

    def run_load(self) -> None:
        """Until all that is to be sent has arrived."""
        heap, pop = self._heap, heapq.heappop
        while self.sending and heap and heap[0][0] <= self._last:
            for _ in range(100):  # whether it is over need not be asked before each event
                if not heap or heap[0][0] > self._last or self._exhausted:
                    break
                self.now, _, what, argument = pop(heap)
                what(argument)
        self._exhausted = True
        if self.ends == FOREVER:
            self.ends = self.now

    # ------------------------------------------------------------------------------------ to the broker

    def send(self, at: int, peer: int, message: Any) -> None:
        """From a client."""
        self._number += 1
        heapq.heappush(self._heap, (at + self.plan.link_ns, self._number, self.arrive, (peer, message)))

    def say(self, peer: int, message: Any) -> None:
        """From a worker, now."""
        self._number += 1
        heapq.heappush(self._heap, (self.now + self.plan.link_ns, self._number, self.arrive, (peer, message)))

    def arrive(self, event: tuple[int, Any]) -> None:
        self._inbox.append(event)
        if not self._due:
            self._due = True
            now, free = self.now, self.free
            self._number += 1  # whatever else comes at that very moment is in the turn
            heapq.heappush(self._heap, (now if now > free else free, FOREVER + self._number, self._take_up, None))

    def _take_turn(self, _: None) -> None:
        self._due = False
        inbox, self._inbox = self._inbox, []
        self.free = self.now + self.plan.turn_ns + self.plan.message_ns * len(inbox)
        self._turn(inbox)

    def take_empty_turn(self) -> None:
        """The broker has been woken by its timer."""
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
        """One more request; False: the time, or the number of requests, is up."""
        if self._exhausted or at > self.ends:
            return False
        self._sent += 1
        if self._sent == self.plan.requests:
            self._exhausted = True
            self.ends = at
        return True

    # ------------------------------------------------------------------------------------ what is observed

    def note(self, text: str) -> None:
        if len(self.log) < KEPT_LOG:
            self.log.append(f"{(self.now - self.began) / SECOND:.6f} {text}")

    def lives_at(self, sequence: int | str, peer: int) -> None:
        """No two sequences here share an id, so each has one worker for good."""
        home = self._homes.setdefault(sequence, peer)
        assert home == peer, f"sequence {sequence} moved from worker {home} to {peer}"
