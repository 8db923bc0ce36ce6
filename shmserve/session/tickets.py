"""The unanswered tickets of a session: their deadlines, their end, and the release of their inputs."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from shmserve.session.memory import SessionMemory
from shmserve.session.ticket import Abandoned, KeptInputs, Ticket


class Tickets:
    """Invariant: the inputs of a request stay allocated until the server has answered it or released them."""

    __slots__ = ("_deadlines", "_held", "_memory", "pending")

    def __init__(self, memory: SessionMemory) -> None:
        self.pending: dict[int, Ticket] = {}
        """Number -> unanswered ticket."""
        self._memory = memory
        self._held: dict[int, KeptInputs] = {}
        """Number of an answered request -> its inputs, which the server still reads."""
        self._deadlines: list[tuple[float, int]] = []
        """A heap. Entries of answered tickets are removed lazily."""

    # ------------------------------------------------------------------------------------ ending

    def remove(self, ticket: Ticket) -> None:
        """Removes a ticket and releases its inputs."""
        self.pending.pop(ticket.number, None)
        ticket.message = None
        if ticket.kept is not None:
            self._memory.release_inputs(ticket.kept)
            ticket.kept = None

    def abandon(self, ticket: Ticket) -> None:
        """Detaches a ticket whose caller no longer waits. Its inputs are kept until the server answers."""
        self.pending[ticket.number] = Abandoned(ticket.number, ticket.kept)
        ticket.message = None
        ticket.kept = None

    def hold(self, ticket: Ticket) -> KeptInputs | None:
        """Keeps the inputs of an answered request until `release`."""
        kept, ticket.kept = ticket.kept, None
        if kept is not None:
            self._held[ticket.number] = kept
        return kept

    def release(self, number: int) -> None:
        kept = self._held.pop(number, None)
        if kept is not None:
            self._memory.release_inputs(kept)

    def release_all(self) -> None:
        """Releases the inputs of all failed requests: the server that read them is gone."""
        for number in list(self._held):
            self.release(number)

    # ------------------------------------------------------------------------------------ deadlines

    def add_deadline(self, deadline: float, number: int) -> None:
        if len(self._deadlines) > 2 * len(self.pending) + 64:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self.pending]
            heapify(self._deadlines)
        heappush(self._deadlines, (deadline, number))

    def next_deadline(self) -> float | None:
        """The earliest deadline of an unanswered ticket."""
        heap = self._deadlines
        while heap:
            ticket = self.pending.get(heap[0][1])
            if ticket is not None and ticket.deadline == heap[0][0]:
                return heap[0][0]
            heappop(heap)
        return None

    def due(self, now: float) -> Ticket | None:
        """A ticket whose deadline has passed; each is returned once."""
        earliest = self.next_deadline()
        if earliest is None or earliest > now:
            return None
        return self.pending[heappop(self._deadlines)[1]]
