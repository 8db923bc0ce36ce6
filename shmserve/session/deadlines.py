"""Deadlines of tickets, in a heap. Entries of answered tickets are removed lazily."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from shmserve.session.ticket import Ticket


class Deadlines:
    """The deadlines of those `tickets` that are unanswered."""

    __slots__ = ("_heap", "_tickets")

    def __init__(self, tickets: dict[int, Ticket]) -> None:
        self._tickets = tickets
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, deadline: float, number: int) -> None:
        if len(self._heap) > 2 * len(self._tickets) + 64:
            self._heap = [entry for entry in self._heap if entry[1] in self._tickets]
            heapify(self._heap)
        heappush(self._heap, (deadline, number))

    def next(self) -> float | None:
        """The earliest deadline of an unanswered ticket."""
        heap = self._heap
        while heap:
            ticket = self._tickets.get(heap[0][1])
            if ticket is not None and ticket.deadline == heap[0][0]:
                return heap[0][0]
            heappop(heap)
        return None

    def due(self, now: float) -> Ticket | None:
        """A ticket whose deadline has passed; each is returned once."""
        earliest = self.next()
        if earliest is None or earliest > now:
            return None
        return self._tickets[heappop(self._heap)[1]]
