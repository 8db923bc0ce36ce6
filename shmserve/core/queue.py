"""The requests of one model version that wait here, in the order in which they would run.

Priority levels come strictly one after the other. Within a level clients share fairly: a request's `tag` is the
virtual time at which its client's turn comes (start-time fair queueing; cost is in rows), so that a client which
offers more does not get more. With one client that is the order of arrival. Requests whose queue timeout has passed
under the DELAY action stand behind all unexpired ones of their level.
"""

from __future__ import annotations

from bisect import insort
from operator import attrgetter

from shmserve.core.policy import BatchPolicy, QueuePolicy, TimeoutAction
from shmserve.core.request import Request

_by_tag = attrgetter("tag")


class Level:
    """One priority level."""

    __slots__ = ("delayed", "policy", "ready", "tags", "turn")

    def __init__(self, policy: QueuePolicy) -> None:
        self.policy = policy
        self.ready: list[Request] = []
        self.delayed: list[Request] = []
        self.turn = 0
        """The tag of the request that left last: where a client that was idle joins in."""
        self.tags: dict[int, int] = {}
        """Client -> the tag of its newest request here. Empty when the level is."""

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
        (self.delayed if request.delayed else self.ready).remove(request)
        if not self.ready:
            self.tags.clear()

    def delay(self, request: Request) -> None:
        self.ready.remove(request)
        request.delayed = True
        self.delayed.append(request)

    def take(self, count: int) -> list[Request]:
        """The first `count`, or all there are."""
        ready = self.ready
        taken = ready[:count]
        if taken:
            del ready[:count]
            self.turn = taken[-1].tag
            if not ready:
                self.tags.clear()
        if len(taken) < count and self.delayed:
            short = count - len(taken)
            taken += self.delayed[:short]
            del self.delayed[:short]
        return taken

    def __len__(self) -> int:
        return len(self.ready) + len(self.delayed)


class RequestQueue:
    """All levels. Level numbers are the caller's 1..n; without priorities there is one, number 0."""

    def __init__(self, policy: BatchPolicy | None) -> None:
        policy = policy or BatchPolicy()
        self._first = 1 if policy.levels else 0
        self.default_level = policy.default_level if policy.levels else 0
        self.levels = [
            Level(policy.level_policies.get(number, policy.default_policy))
            for number in range(self._first, self._first + max(1, policy.levels))
        ]
        self.count = 0

    def level_of(self, priority: int) -> int:
        """The level for a caller's priority: 0 and numbers that are no level mean the default."""
        if self._first == 0:
            return 0
        return priority if 1 <= priority <= len(self.levels) else self.default_level

    def level(self, number: int) -> Level:
        return self.levels[number - self._first]

    def add(self, request: Request) -> None:
        self.levels[request.level - self._first].add(request)
        self.count += 1

    def remove(self, request: Request) -> None:
        self.level(request.level).remove(request)
        self.count -= 1

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
        first = self.levels[0]
        if len(self.levels) == 1 and not first.delayed:
            return first.ready
        found: list[Request] = []
        for level in self.levels:
            found += level.ready
            found += level.delayed
        return found

    def take(self, count: int) -> list[Request]:
        """Removes and gives the first `count` in order."""
        taken = self.levels[0].take(count)
        for level in self.levels[1:]:
            if len(taken) == count:
                break
            taken += level.take(count - len(taken))
        self.count -= len(taken)
        return taken
