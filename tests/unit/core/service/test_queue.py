"""The queue: levels, delayed requests, and shares of clients whatever they add, cancel or let expire."""

from __future__ import annotations

from collections import Counter
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from shmserve.core.policy import BatchPolicy, QueuePolicy, TimeoutAction
from shmserve.core.service.queue import IDLE_LEVELS, IDLE_USERS, UNSERVED, PriorityLevel, RequestQueue
from tests.support.hypothesis_profiles import examples

CLIENTS = [SimpleNamespace(number=number, user="ann") for number in range(1, 5)]
OTHERS = [SimpleNamespace(number=number, user="bob" if number < 8 else "cid") for number in range(5, 10)]


def request(client: int = 1, cost: int = 1, level: int = 0, name: int = 0) -> Any:
    """A fake request with the attributes that the queue uses."""
    payer = (CLIENTS + OTHERS)[client - 1]
    return SimpleNamespace(inline=0, deadline=0, payer=payer, cost=cost, level=level, tag=0, delayed=False, name=name)


def queue(policy: BatchPolicy | None = None) -> RequestQueue[Any]:
    return RequestQueue(policy)


def fill(waiting: RequestQueue[Any], client: int, names: range, cost: int = 1) -> list[Any]:
    made = [request(client, cost, name=name) for name in names]
    for each in made:
        waiting.add(each)
    return made


def names(requests: list[Any]) -> list[int]:
    return [each.name for each in requests]


def test_a_user_that_was_served_alone_gets_an_equal_share_afterwards() -> None:
    waiting = queue()
    fill(waiting, 1, range(100), cost=8)
    waiting.take(50)
    fill(waiting, 5, range(1000, 1100), cost=8)
    assert sum(each.payer.user == "bob" for each in waiting.take(20)) == 10


def test_requests_put_back_are_not_charged_twice() -> None:
    waiting = queue()
    for name in range(20):
        waiting.add(request(1, name=name))
        waiting.add(request(5, name=100 + name))
    taken = waiting.take(8)
    for each in reversed(taken):
        waiting.put_back(each)
    assert sorted(names(waiting.in_order()[:8])) == sorted(names(taken))
    assert names(waiting.take(20)) == [name for pair in range(10) for name in (pair, 100 + pair)]


def test_a_request_put_back_is_first_and_gives_its_user_no_further_precedence() -> None:
    waiting = queue()
    waiting.add(request(1, cost=4, name=1))
    (early,) = waiting.take(1)
    fill(waiting, 5, range(100, 200))
    waiting.take(50)
    waiting.put_back(early)
    fill(waiting, 1, range(2, 50))
    assert waiting.take(1) == [early]
    assert sum(each.payer.user == "ann" for each in waiting.take(20)) == 10


def test_a_user_who_keeps_an_instance_waiting_comes_after_others() -> None:
    """Although its requests were put back meanwhile."""
    waiting = queue()
    fill(waiting, 1, range(12))
    running, ahead = waiting.take(4), waiting.take(4)
    for each in reversed(ahead):
        waiting.put_back(each)
    waiting.charge(running[0], 2)
    fill(waiting, 5, range(100, 104))
    assert names(waiting.take(3)) == [100, 101, 4]


def test_priority_levels_reach_up_to_64_bits() -> None:
    last = 2**64 - 1
    waiting = queue(BatchPolicy(levels=last, default_level=last, level_policies={7: QueuePolicy(max_size=3)}))
    assert [waiting.level_of(given) for given in (0, 1, 2**40, last, last + 1)] == [last, 1, 2**40, last, last]
    for name, level in enumerate((last, 2**40, 1, 2**40, 7)):
        waiting.add(request(level=level, name=name))
    assert waiting.level(7).policy.max_size == 3
    assert names(waiting.in_order()) == [2, 4, 1, 3, 0]
    assert names(waiting.take(3)) == [2, 4, 1]
    assert names(waiting.take(3)) == [3, 0]


def test_empty_levels_are_dropped_and_a_request_put_back_stays_first() -> None:
    waiting = queue(BatchPolicy(levels=2**64 - 1, default_level=1))
    early = request(level=5, name=1, cost=9)
    waiting.add(early)
    assert waiting.take(1) == [early]
    for level in range(1000, 3000):
        waiting.add(request(level=level))
        waiting.take(1)
    assert len(waiting._levels) <= IDLE_LEVELS  # noqa: SLF001 - only memory would show it
    waiting.put_back(early)
    waiting.add(request(level=5, name=2))
    assert names(waiting.in_order()) == [1, 2]


def test_cancelled_requests_are_not_charged() -> None:
    """A client that sends a thousand requests and cancels 999 gets one turn, like another client's first request."""
    waiting = queue()
    piled = fill(waiting, 1, range(1000))
    fill(waiting, 2, range(2000, 2050))
    for each in piled[:-1]:
        waiting.remove(each)
    assert 999 in names(waiting.in_order())[:2]
    waiting.add(request(1, name=3000))
    assert 3000 in names(waiting.in_order())[:4]


def test_cancelling_requests_gives_no_precedence() -> None:
    waiting = queue()
    mine = [request(1, name=name) for name in range(100)]
    for each in mine:
        waiting.add(each)
        waiting.add(request(2, name=500 + each.name))
    for each in mine[:50]:
        waiting.remove(each)
    first = waiting.in_order()[:20]
    assert sum(each.payer.number == 1 for each in first) <= 10


def test_what_a_level_remembers_is_bounded() -> None:
    """Idle users, idle clients of a user, and refunds for cancelled requests, even while nothing is dequeued."""
    users, clients, cancelled = (PriorityLevel[Any](QueuePolicy()) for _ in range(3))

    def of(number: int, user: str) -> Any:
        return SimpleNamespace(**{**vars(request()), "payer": SimpleNamespace(number=number, user=user)})

    clients.add(of(0, "ann"))
    cancelled.add(request(1))
    for number in range(1, 2000):
        for level, user in ((users, f"user {number}"), (clients, "ann")):
            level.add(of(number, user))
            level.take(1)
        one = request(2)
        cancelled.add(one)
        cancelled.remove(one)
    assert len(users.shares) <= IDLE_USERS
    assert len(clients.share("ann").tags) < 200
    assert len(cancelled.share("ann").unserved) <= 2 * UNSERVED


class QueueMachine(RuleBasedStateMachine):
    """Compared with a plain list: contents, order per client, order of levels, delayed requests last."""

    def __init__(self) -> None:
        super().__init__()
        policy = BatchPolicy(levels=2, default_level=1, default_policy=QueuePolicy(TimeoutAction.DELAY, 1))
        self.queue: RequestQueue[Any] = RequestQueue(policy)
        self.here: list[Any] = []
        self.delayed: list[Any] = []
        self.count = 0

    @rule(client=st.integers(1, 9), cost=st.integers(1, 5), level=st.integers(1, 2), times=st.integers(1, 4))
    def add(self, client: int, cost: int, level: int, times: int) -> None:
        for _ in range(times):
            self.count += 1
            each = request(client, cost, level, self.count)
            self.queue.add(each)
            self.here.append(each)

    @precondition(lambda self: self.here)
    @rule(which=st.integers(0, 99))
    def remove(self, which: int) -> None:
        each = self.here.pop(which % len(self.here))
        self.queue.remove(each)
        if each.delayed:
            self.delayed.remove(each)

    @precondition(lambda self: any(not each.delayed for each in self.here))
    @rule(which=st.integers(0, 99))
    def delay(self, which: int) -> None:
        ready = [each for each in self.here if not each.delayed]
        each = ready[which % len(ready)]
        self.queue.expire(each)
        self.delayed.append(each)

    @rule(count=st.integers(1, 6))
    def take(self, count: int) -> None:
        expected = self.queue.in_order()[:count]
        taken = self.queue.take(count)
        assert taken == expected
        for each in taken:
            self.here.remove(each)
            if each.delayed:
                self.delayed.remove(each)

    @invariant()
    def in_order(self) -> None:
        found: list[Any] = list(self.queue.in_order())
        assert self.queue.count == len(found) == len(self.here)
        assert sorted(names(found)) == sorted(names(self.here))
        places = [(each.level, each.delayed) for each in found]
        assert places == sorted(places), "levels in order, in each the delayed ones last"
        for level in (1, 2):
            late = [each for each in found if each.level == level and each.delayed]
            assert late == [each for each in self.delayed if each.level == level]
            for client in CLIENTS + OTHERS:
                mine = [each.name for each in found if not each.delayed and (each.level, each.payer) == (level, client)]
                assert mine == sorted(mine), "a client's own requests keep their order"


@pytest.mark.hypothesis
def test_queue_machine() -> None:
    run_state_machine_as_test(QueueMachine, settings=settings(max_examples=examples(60)))


@pytest.mark.parametrize(("clients", "whose"), [(3, "number"), (9, "user")])
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 6)), min_size=30, max_size=60), st.integers(1, 7))
def test_backlogged_clients_and_users_get_equal_rows(
    clients: int, whose: str, offers: list[tuple[int, int]], most: int
) -> None:
    """While all have waiting requests, no two differ by more than two of the largest requests, for any number of
    connections per user."""
    waiting = queue()
    for client, cost in offers * 10:
        waiting.add(request(1 + client % clients, cost))
    owner = attrgetter(f"payer.{whose}")
    remaining = Counter(map(owner, waiting.in_order()))
    served = dict.fromkeys(remaining, 0)
    while True:
        taken = waiting.take(most)
        remaining.subtract(map(owner, taken))
        if not all(remaining.values()):
            break
        for each in taken:
            served[owner(each)] += each.cost
        assert max(served.values()) - min(served.values()) <= 12
