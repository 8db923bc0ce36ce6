"""The requests of one model version that wait here, in the order in which they would run.

Priority levels come strictly one after the other. Within a level clients share fairly: a request's `tag` is the
virtual time at which its client's turn comes (start-time fair queueing; cost is in rows), so that a client which
offers more does not get more. With one client that is the order of arrival. Requests whose queue timeout has passed
under the DELAY action stand behind all unexpired ones of their level.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from operator import attrgetter

from shmserve.core.policy import BatchPolicy, QueuePolicy, TimeoutAction
from shmserve.core.request import Request

_by_tag = attrgetter("tag")
IDLE_LEVELS = 64
"""So many priority levels are kept before empty ones are dropped."""


def _take_out(waiting: list[Request], numbers: set[int]) -> None:
    """Those of these numbers, which are near the front. Each that is found is removed from the set."""
    kept: list[Request] = []
    for place, request in enumerate(waiting):
        if not numbers:
            waiting[:place] = kept
            return
        if request.number in numbers:
            numbers.remove(request.number)
        else:
            kept.append(request)
    waiting[:] = kept


def _sums(refunds: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Tags, rising, and for each how much was refunded below it; one more for what is above them all."""
    refunds.sort()
    totals = [0]
    for _, cost in refunds:
        totals.append(totals[-1] + cost)
    return [tag for tag, _ in refunds], totals


class Level:
    """One priority level."""

    __slots__ = ("delayed", "policy", "ready", "tags", "turn", "unserved")

    def __init__(self, policy: QueuePolicy) -> None:
        self.policy = policy
        self.ready: list[Request] = []
        self.delayed: list[Request] = []
        self.turn = 0
        """The tag of the request that left last: where a client that was idle joins in."""
        self.tags: dict[int, int] = {}
        """Client -> the tag of its newest request here. Empty when the level is."""
        self.unserved: list[tuple[int, int, int]] = []
        """(client, tag, cost) of those that left without being served; what they cost is still to be refunded."""

    def add(self, request: Request) -> None:
        tags = self.tags
        client = request.client.number
        last = tags.get(client, 0)
        turn = self.turn
        request.tag = tag = (last if last > turn else turn) + request.cost
        tags[client] = tag
        ready = self.ready
        if not ready or tag >= ready[-1].tag:
            ready.append(request)
        else:
            insort(ready, request, key=_by_tag)

    def remove(self, request: Request) -> None:
        if request.delayed:
            self.delayed.remove(request)
        else:
            self._drop(request)
        if self.ready:
            self.unserved.append((request.client.number, request.tag, request.cost))

    def put_back(self, request: Request) -> None:
        """It had been taken, and was not served: it keeps the place that it had."""
        if request.delayed:
            self.delayed.insert(0, request)
        else:
            insort(self.ready, request, key=_by_tag)

    def delay(self, request: Request) -> None:
        self._drop(request)
        request.delayed = True
        self.delayed.append(request)

    def _drop(self, request: Request) -> None:
        ready = self.ready
        at = bisect_left(ready, request.tag, key=_by_tag)
        while ready[at] is not request:
            at += 1
        del ready[at]
        if not ready:
            self._forget()

    def _forget(self) -> None:
        """Nobody waits: nobody is ahead or behind of others any more."""
        self.tags.clear()
        self.unserved.clear()

    def refund(self) -> None:
        """A client is not charged for what was not run: its later requests move up, but not before a newcomer's."""
        back: dict[int, list[tuple[int, int]]] = {}
        for client, tag, cost in self.unserved:
            back.setdefault(client, []).append((tag, cost))
        self.unserved.clear()
        sums = {client: _sums(refunds) for client, refunds in back.items()}
        newest = dict.fromkeys(back, 0)
        for request in self.ready:
            client = request.client.number
            if client in sums:
                tags, totals = sums[client]
                moved = totals[bisect_left(tags, request.tag)]
                tag = max(request.tag - moved, min(request.tag, self.turn + request.cost), newest[client])
                request.tag = newest[client] = tag
        for client, tag in newest.items():
            if tag:
                self.tags[client] = tag
            else:
                self.tags.pop(client, None)
        self.ready.sort(key=_by_tag)

    def take(self, count: int) -> list[Request]:
        """The first `count`, or all there are."""
        ready = self.ready
        taken = ready[:count]
        if taken:
            del ready[:count]
            self.turn = turn = taken[-1].tag
            tags = self.tags
            if not ready:
                self._forget()
            elif len(tags) > 64 and len(tags) > 2 * len(ready):  # most have nothing here any more
                self.tags = {client: tag for client, tag in tags.items() if tag > turn}
        if len(taken) < count and self.delayed:
            short = count - len(taken)
            taken += self.delayed[:short]
            del self.delayed[:short]
        return taken

    def pick(self, requests: list[Request]) -> None:
        """Takes these out, wherever they stand. A client that comes now joins behind those taken from the front."""
        numbers = {request.number for request in requests}
        ready = self.ready
        front = next((place for place, request in enumerate(ready) if request.number not in numbers), len(ready))
        if front:
            self.turn = ready[front - 1].tag
        _take_out(ready, numbers)
        if not ready:
            self._forget()
        _take_out(self.delayed, numbers)

    def __len__(self) -> int:
        return len(self.ready) + len(self.delayed)


class RequestQueue:
    """All levels. Level numbers are the caller's 1..n; without priorities there is one, number 0.

    Invariant: there may be 2^64 levels, so only those in use have a Level; its policy comes from the configuration.
    """

    def __init__(self, policy: BatchPolicy | None) -> None:
        self._policy = policy = policy or BatchPolicy()
        self.default_level = policy.default_level if policy.levels else 0
        self._levels: dict[int, Level] = {}
        """In the order of their numbers."""
        self._sweep_at = IDLE_LEVELS
        self._turn = 0
        """The highest turn of a level that was dropped: a new level begins there, so that a request that is put back
        stays ahead of later ones."""
        self.count = 0
        self.bytes = 0
        """Inside the messages of what waits."""
        self.timed = 0
        """Of those that wait, how many have a deadline."""

    def level_of(self, priority: int) -> int:
        """The level for a caller's priority: 0 and numbers that are no level mean the default."""
        levels = self._policy.levels
        return priority if 1 <= priority <= levels else self.default_level

    def level(self, number: int) -> Level:
        found = self._levels.get(number)
        return self._new(number) if found is None else found

    def policy(self, number: int) -> QueuePolicy:
        return self._policy.level_policies.get(number, self._policy.default_policy)

    def _new(self, number: int) -> Level:
        if len(self._levels) >= self._sweep_at:
            self._drop_idle()
        made = self._levels[number] = Level(self.policy(number))
        made.turn = self._turn
        self._levels = dict(sorted(self._levels.items()))
        return made

    def _drop_idle(self) -> None:
        """Callers choose the numbers: without this, each that was ever used would stay."""
        idle = [number for number, level in self._levels.items() if not len(level)]
        for number in idle:
            self._turn = max(self._turn, self._levels.pop(number).turn)
        self._sweep_at = max(IDLE_LEVELS, 2 * len(self._levels))

    def add(self, request: Request) -> None:
        self.level(request.level).add(request)
        self.count += 1
        self.bytes += request.inline
        if request.deadline:
            self.timed += 1

    def put_back(self, request: Request) -> None:
        self.level(request.level).put_back(request)
        self.count += 1
        self.bytes += request.inline
        if request.deadline:
            self.timed += 1

    def remove(self, request: Request) -> None:
        self.level(request.level).remove(request)
        self.count -= 1
        self.bytes -= request.inline
        if request.deadline:
            self.timed -= 1

    def expire(self, request: Request) -> bool:
        """The queue timeout has passed. True: it must be rejected (and has been taken out). False: it waits on."""
        level = self.level(request.level)
        if level.policy.action is TimeoutAction.REJECT:
            self.remove(request)
            return True
        level.delay(request)
        return False

    def in_order(self) -> list[Request]:
        """Everything, in the order in which it would run. Not to be changed by the caller."""
        levels = self._levels.values()
        for level in levels:
            if level.unserved:
                level.refund()
        if len(levels) == 1:
            (first,) = levels
            if not first.delayed:
                return first.ready
        found: list[Request] = []
        for level in levels:
            found += level.ready
            found += level.delayed
        return found

    def take(self, count: int) -> list[Request]:
        """Removes and gives the first `count` in order (of `in_order`, with nothing added or removed since)."""
        taken: list[Request] = []
        for level in self._levels.values():
            taken += level.take(count - len(taken))
            if len(taken) == count:
                break
        self._gone(taken)
        return taken

    def pick(self, places: Sequence[int]) -> list[Request]:
        """Removes and gives those at these places, rising (of `in_order`, with nothing added or removed since). Each
        that is passed over so keeps count by how many rows."""
        waiting = self.in_order()
        taken = [waiting[place] for place in places]
        behind = sum([request.cost for request in taken])
        chosen = set(places)
        for place, request in enumerate(waiting[: places[-1]]):
            if place in chosen:
                behind -= request.cost
            else:
                request.passed += behind
        for number in {request.level for request in taken}:
            self.level(number).pick([request for request in taken if request.level == number])
        self._gone(taken)
        return taken

    def _gone(self, taken: list[Request]) -> None:
        self.count -= len(taken)
        for request in taken:
            self.bytes -= request.inline
            if request.deadline:
                self.timed -= 1
