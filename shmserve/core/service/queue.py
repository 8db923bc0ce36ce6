"""The request queue of a model version, in the order in which the requests would run.

Priority levels are strict. Within a level, start-time fair queueing in rows divides capacity twice: between users, and
within a user between its payers, which are clients or the callers of a client. So a user gains nothing from more
connections, and a payer gains nothing from sending more. With a single payer, requests run in order of arrival.
Requests whose queue timeout has passed under the DELAY action come after all unexpired ones of their level.

A user is charged when a request is taken: requests that are cancelled or expire cost nothing. Time in which the user
keeps an instance waiting is charged, too, as the rows that the instance could have run. A payer is charged when its
request arrives, so that the user's requests have an order, and refunded if it is not run.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

from shmserve.core.policy import BatchPolicy, QueuePolicy, TimeoutAction

_by_tag = attrgetter("tag")
IDLE_LEVELS = 64
"""Priority levels kept before empty ones are dropped."""
UNSERVED = 64
"""Entries of `Share.unserved` kept before a refund, in addition to the number of requests in the share. Usually they
are refunded earlier, when the order is next read."""
IDLE_USERS = 64
"""Users of a level kept before idle ones are dropped."""


class QueuePayer(Protocol):
    """The caller whose share a request uses. Its `number` is unique among those of its user."""

    @property
    def number(self) -> int: ...
    @property
    def user(self) -> str: ...


class Queued(Protocol):
    """The fields of a request that the queue reads, and those in which it stores its own state."""

    @property
    def number(self) -> int: ...
    @property
    def payer(self) -> QueuePayer: ...
    @property
    def cost(self) -> int: ...
    @property
    def level(self) -> int: ...
    @property
    def inline(self) -> int: ...
    @property
    def deadline(self) -> int: ...

    tag: int
    delayed: bool
    passed: int


R = TypeVar("R", bound=Queued)


def _take_out(waiting: list[R], numbers: set[int]) -> None:
    """Removes the requests with these numbers, which are near the front, and their numbers from the set."""
    remaining: list[R] = []
    for place, request in enumerate(waiting):
        if not numbers:
            waiting[:place] = remaining
            return
        if request.number in numbers:
            numbers.remove(request.number)
        else:
            remaining.append(request)
    waiting[:] = remaining


def _sums(refunds: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Returns the tags in increasing order, and for each the sum refunded below it. The last sum is for tags above all
    of them."""
    refunds.sort()
    totals = [0]
    for _, cost in refunds:
        totals.append(totals[-1] + cost)
    return [tag for tag, _ in refunds], totals


class Share(Generic[R]):
    """The queued requests of one user in a level."""

    __slots__ = ("charged", "ready", "tags", "turn", "unserved")

    def __init__(self, turn: int) -> None:
        self.ready: list[R] = []
        """Ordered by tag."""
        self.turn = turn
        """The tag of the last request that was taken. A client that was idle continues from here."""
        self.charged = 0
        """The virtual time of the level up to which the user has been served."""
        self.tags: dict[int, int] = {}
        """Client -> the tag of its newest request here. Empty if `ready` is."""
        self.unserved: list[tuple[int, int, int]] = []
        """(client, tag, cost) of requests that left without being served, still to be refunded."""

    def drop(self, request: R) -> None:
        ready = self.ready
        at = bisect_left(ready, request.tag, key=_by_tag)
        while ready[at] is not request:
            at += 1
        del ready[at]
        if not ready:
            self._forget()

    def _forget(self) -> None:
        """Forgets tags and refunds. Nothing is queued, so no client is ahead of or behind another."""
        self.tags.clear()
        self.unserved.clear()

    def refund(self) -> None:
        """Refunds clients for requests that were not run: their later requests move up, but not ahead of a
        newcomer's."""
        back: dict[int, list[tuple[int, int]]] = {}
        for client, tag, cost in self.unserved:
            back.setdefault(client, []).append((tag, cost))
        self.unserved.clear()
        sums = {client: _sums(refunds) for client, refunds in back.items()}
        newest = dict.fromkeys(back, 0)
        for request in self.ready:
            client = request.payer.number
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

    def take(self, count: int) -> list[R]:
        """Removes and returns up to `count` requests from the front."""
        ready = self.ready
        taken = ready[:count]
        del ready[:count]
        self.turn = turn = taken[-1].tag
        tags = self.tags
        if not ready:
            self._forget()
        elif len(tags) > 64 and len(tags) > 2 * len(ready):  # most clients have nothing queued here
            self.tags = {client: tag for client, tag in tags.items() if tag > turn}
        return taken

    def pick(self, numbers: set[int]) -> None:
        """Removes the requests with these numbers. New clients queue behind those removed from the front."""
        ready = self.ready
        front = next((place for place, request in enumerate(ready) if request.number not in numbers), len(ready))
        if front:
            self.turn = ready[front - 1].tag
        _take_out(ready, numbers)
        if not ready:
            self._forget()


class PriorityLevel(Generic[R]):
    """One priority level. Invariant: `active` are those of `shares` with requests in `ready`."""

    __slots__ = ("active", "delayed", "dropped", "policy", "shares", "turn", "unserved")

    def __init__(self, policy: QueuePolicy, dropped: int = 0) -> None:
        self.policy = policy
        self.delayed: list[R] = []
        self.shares: dict[str, Share[R]] = {}
        """By user."""
        self.active: list[Share[R]] = []
        self.turn = 0
        """The virtual time up to which the user of the last taken request has been served. Users that were idle
        continue from here."""
        self.dropped = dropped
        """The highest turn of a dropped share. New shares start there, so that a request that is put back stays ahead
        of later ones."""
        self.unserved: dict[Share[R], None] = {}
        """Shares that may have refunds to apply."""

    def share(self, user: str) -> Share[R]:
        share = self.shares.get(user)
        return self._new(user) if share is None else share

    def _new(self, user: str) -> Share[R]:
        if len(self.shares) >= IDLE_USERS + 2 * len(self.active):
            self.dropped = self.last_turn()
            self.shares = {user: share for user, share in self.shares.items() if share.ready}
        created: Share[R] = Share(self.dropped)
        self.shares[user] = created
        return created

    def users(self) -> set[str]:
        waiting = {user for user, share in self.shares.items() if share.ready}
        return waiting.union(request.payer.user for request in self.delayed)

    def last_turn(self) -> int:
        return max([self.dropped, *[share.turn for share in self.shares.values()]])

    def add(self, request: R) -> None:
        payer = request.payer
        share = self.shares.get(payer.user)
        if share is None:
            share = self._new(payer.user)
        tags = share.tags
        number = payer.number
        last = tags.get(number, 0)
        turn = share.turn
        request.tag = tag = (last if last > turn else turn) + request.cost
        tags[number] = tag
        ready = share.ready
        if not ready:
            ready.append(request)
            if share.charged < self.turn:
                share.charged = self.turn
            self.active.append(share)
        elif tag >= ready[-1].tag:
            ready.append(request)
        else:
            insort(ready, request, key=_by_tag)

    def add_all(self, requests: list[R]) -> None:
        """Adds requests of one payer, in order."""
        first = requests[0]
        self.add(first)
        payer = first.payer
        ready, tag = self.shares[payer.user].ready, first.tag
        if ready[-1] is not first:  # requests of others are behind it
            for request in requests[1:]:
                self.add(request)
            return
        for request in requests[1:]:
            tag += request.cost
            request.tag = tag
        ready += requests[1:]
        self.shares[payer.user].tags[payer.number] = tag

    def remove(self, request: R) -> None:
        if request.delayed:
            self.delayed.remove(request)
        else:
            self._drop(request)
        share = self.shares.get(request.payer.user)
        if share is not None and share.ready:
            share.unserved.append((request.payer.number, request.tag, request.cost))
            self.unserved[share] = None
            if len(share.unserved) > UNSERVED + len(share.ready):
                share.refund()

    def put_back(self, request: R) -> None:
        """Returns a request that was taken but not served: it keeps its place, and its user is refunded."""
        if request.delayed:
            self.delayed.insert(0, request)
            return
        share = self.share(request.payer.user)
        if not share.ready:
            share.charged = max(share.charged, self.turn)
            self.active.append(share)
        share.charged -= request.cost
        insort(share.ready, request, key=_by_tag)

    def charge(self, user: str, rows: int) -> None:
        share = self.share(user)
        share.charged = max(share.charged, self.turn) + rows

    def delay(self, request: R) -> None:
        self._drop(request)
        request.delayed = True
        self.delayed.append(request)

    def _drop(self, request: R) -> None:
        share = self.shares[request.payer.user]
        share.drop(request)
        if not share.ready:
            self.active.remove(share)

    def refund(self) -> None:
        for share in self.unserved:
            if share.unserved:
                share.refund()
        self.unserved.clear()

    def first(self, count: int) -> list[R]:
        """The first requests, at most `count`."""
        first = self._merged(count)
        return first + self.delayed[: count - len(first)] if len(first) < count else first

    def _merged(self, count: int) -> list[R]:
        """The first `count` requests of all users: the next one is always the request after which its user has been
        served least."""
        active = self.active
        if len(active) == 1:
            return active[0].ready[:count]
        heads = [(share.charged + share.ready[0].cost, order, 0, share.ready) for order, share in enumerate(active)]
        heapify(heads)
        merged: list[R] = []
        for _ in range(count):
            if not heads:
                break
            charged, order, place, ready = heappop(heads)
            merged.append(ready[place])
            place += 1
            if place < len(ready):
                heappush(heads, (charged + ready[place].cost, order, place, ready))
        return merged

    def take(self, count: int) -> list[R]:
        """Removes and returns up to `count` of `first`."""
        active = self.active
        if len(active) == 1:
            share = active[0]
            taken = share.take(count)
            share.charged = self.turn + 1  # a newcomer comes first, whatever a single user has taken
            if not share.ready:
                active.clear()
            if not self.delayed:
                return taken
        else:
            taken = self._merged(count)
            if taken:
                self._take(taken)
        if len(taken) < count and self.delayed:
            short = count - len(taken)
            taken += self.delayed[:short]
            del self.delayed[:short]
        return taken

    def _take(self, taken: list[R]) -> None:
        """Charges and removes the first requests, of several users."""
        counts: dict[Share[R], int] = {}
        shares = self.shares
        for request in taken:
            share = shares[request.payer.user]
            share.charged += request.cost
            counts[share] = counts.get(share, 0) + 1
        self.turn = max(self.turn, share.charged)
        for share, count in counts.items():
            share.take(count)
            if not share.ready:
                self.active.remove(share)

    def pick(self, requests: list[R]) -> None:
        """Removes these requests from any position. New users start at the virtual time of the least served waiting
        user."""
        chosen: dict[Share[R], set[int]] = {}
        for request in requests:
            if not request.delayed:
                share = self.shares[request.payer.user]
                share.charged += request.cost
                chosen.setdefault(share, set()).add(request.number)
        for share, numbers in chosen.items():
            share.pick(numbers)
        self.active = [share for share in self.active if share.ready]
        charged = [share.charged for share in self.active] or [max([share.charged for share in chosen], default=0)]
        self.turn = max(self.turn, min(charged))
        _take_out(self.delayed, {request.number for request in requests if request.delayed})

    def __len__(self) -> int:
        return sum([len(share.ready) for share in self.active]) + len(self.delayed)


class RequestQueue(Generic[R]):
    """All priority levels. Level numbers are the caller's 1..n; without priorities there is only level 0.

    Invariant: there may be 2^64 levels, so only levels in use have a PriorityLevel; its policy comes from the
    configuration.
    """

    def __init__(self, policy: BatchPolicy | None) -> None:
        self._policy = policy = policy or BatchPolicy()
        self.default_level = policy.default_level if policy.levels else 0
        self._levels: dict[int, PriorityLevel[R]] = {}
        """In ascending order of level."""
        self._sweep_at = IDLE_LEVELS
        self._turn = 0
        """The highest turn of a share in a dropped level, for new levels."""
        self.count = 0
        self.bytes = 0
        """Bytes inside the messages of queued requests."""
        self.timed = 0
        """Queued requests that have a deadline."""

    def level_of(self, priority: int) -> int:
        """The level for a caller's priority: 0 and numbers out of range mean the default."""
        levels = self._policy.levels
        return priority if 1 <= priority <= levels else self.default_level

    def level(self, number: int) -> PriorityLevel[R]:
        level = self._levels.get(number)
        return self._new(number) if level is None else level

    def users(self) -> set[str]:
        """The users who have requests queued."""
        return {user for level in self._levels.values() for user in level.users()}

    def policy(self, number: int) -> QueuePolicy:
        return self._policy.level_policies.get(number, self._policy.default_policy)

    def _new(self, number: int) -> PriorityLevel[R]:
        if len(self._levels) >= self._sweep_at:
            self._drop_idle()
        created: PriorityLevel[R] = PriorityLevel(self.policy(number), self._turn)
        self._levels[number] = created
        self._levels = dict(sorted(self._levels.items()))
        return created

    def _drop_idle(self) -> None:
        """Drops empty levels. Callers choose level numbers, so every level ever used would otherwise stay."""
        idle = [number for number, level in self._levels.items() if not len(level)]
        for number in idle:
            self._turn = max(self._turn, self._levels.pop(number).last_turn())
        self._sweep_at = max(IDLE_LEVELS, 2 * len(self._levels))

    def add(self, request: R) -> None:
        level = self._levels.get(request.level)
        if level is None:
            level = self._new(request.level)
        level.add(request)
        self.count += 1
        self.bytes += request.inline
        if request.deadline:
            self.timed += 1

    def add_all(self, requests: list[R]) -> None:
        """Adds requests of one payer, level and deadline, which arrived together."""
        first = requests[0]
        level = self._levels.get(first.level)
        if level is None:
            level = self._new(first.level)
        level.add_all(requests)
        self.count += len(requests)
        self.bytes += sum([request.inline for request in requests])
        if first.deadline:
            self.timed += len(requests)

    def put_back(self, request: R) -> None:
        self.level(request.level).put_back(request)
        self.count += 1
        self.bytes += request.inline
        if request.deadline:
            self.timed += 1

    def charge(self, request: R, rows: int) -> None:
        """Charges the user of this request, which has been taken, for more rows."""
        self.level(request.level).charge(request.payer.user, rows)

    def remove(self, request: R) -> None:
        self.level(request.level).remove(request)
        self.count -= 1
        self.bytes -= request.inline
        if request.deadline:
            self.timed -= 1

    def expire(self, request: R) -> bool:
        """Handles an expired queue timeout. True: the request was removed and must be rejected. False: it stays
        queued."""
        level = self.level(request.level)
        if level.policy.action is TimeoutAction.REJECT:
            self.remove(request)
            return True
        level.delay(request)
        return False

    def in_order(self) -> list[R]:
        """All requests in the order in which they would run. The caller must not change the list."""
        return self.first(self.count)

    def first(self, count: int) -> list[R]:
        """At least the first `count` of `in_order`, if there are that many. The caller must not change the list."""
        levels = self._levels.values()
        if len(levels) == 1:  # fast path for the common case
            (only,) = levels
            if only.unserved:
                only.refund()
            active = only.active
            return active[0].ready if len(active) == 1 and not only.delayed else only.first(count)
        first: list[R] = []
        for level in levels:
            if level.unserved:
                level.refund()
            first += level.first(count - len(first))
            if len(first) >= count:
                break
        return first

    def take(self, count: int) -> list[R]:
        """Removes and returns the first `count` of `in_order`, if nothing was added or removed since it was read."""
        taken: list[R] = []
        for level in self._levels.values():
            taken = taken + level.take(count - len(taken)) if taken else level.take(count)
            if len(taken) == count:
                break
        self._gone(taken)
        return taken

    def pick(self, places: Sequence[int]) -> list[R]:
        """Removes and returns the requests at these increasing positions of `in_order`, if nothing was added or removed
        since it was read. Each overtaken request counts the rows that overtook it."""
        waiting = self.first(places[-1] + 1)
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

    def _gone(self, taken: list[R]) -> None:
        inline = 0
        for request in taken:
            inline += request.inline
        self.count -= len(taken)
        self.bytes -= inline
        if self.timed:
            self.timed -= sum([request.deadline > 0 for request in taken])
