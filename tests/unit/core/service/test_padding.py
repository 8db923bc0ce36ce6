"""Groups of requests of different lengths: compared with all possible groupings, and properties that every plan must
have."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shmserve.core.policy import BatchPolicy, PaddingPolicy
from shmserve.core.service.form import BatchPlan, BatchRules, Reason
from shmserve.core.service.padding import form_padded, group_of

MAX = 6
NOW = 100


@dataclass
class Waiting:
    length: int
    cost: int = 1
    signature: str = "s"
    arrived: int = NOW
    level: int = 0
    deadline: int = 0
    queue_expires: int = 0
    delayed: bool = False
    passed: int = 0


REQUESTS = st.builds(
    Waiting,
    st.integers(0, 40),
    st.integers(1, 3),
    st.sampled_from(["s", "s", "s", "t"]),
    st.integers(80, NOW),
    st.just(0),
    st.sampled_from([0, 0, 0, 110, 200]),
    passed=st.sampled_from([0, 0, 0, 2, MAX]),
)
QUEUES = st.lists(REQUESTS, min_size=1, max_size=12)
PADDINGS = st.builds(
    PaddingPolicy, st.just(()), st.integers(1, 14), st.sampled_from([1, 1, 4]), st.sampled_from([0, 5, 20, 1000])
)
POLICIES = st.builds(
    BatchPolicy,
    preferred=st.sampled_from([(), (), (2, 4)]),
    delay_ns=st.sampled_from([0, 0, 5, 30]),
    preserve_ordering=st.booleans(),
)
ITEMS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 3)), min_size=1, max_size=7)


def cost_of(cuts: list[int], items: list[tuple[int, int]], most: int, batch_cost: int) -> int | None:
    """The cost of the groups between these cuts; None if a group has too many rows."""
    total = 0
    for first, end in pairwise(cuts):
        rows = sum(rows for _, rows in items[first:end])
        if rows > most and end - first > 1:
            return None
        total += batch_cost + rows * items[end - 1][0]
    return total


@given(ITEMS, st.integers(1, 8), st.integers(0, 60), st.integers(0, 6))
def test_the_group_is_one_of_the_cheapest_ones(items: list[tuple[int, int]], most: int, cost: int, which: int) -> None:
    items.sort()
    anchor = which % len(items)
    low, high = group_of(items, anchor, most, cost)
    ways = [[0, *[at for at in range(1, len(items)) if mask >> at & 1], len(items)] for mask in range(0, 128, 2)]
    known = {tuple(way): cost_of(way, items, most, cost) for way in ways if way == sorted(set(way))}
    least = min(total for total in known.values() if total is not None)
    best = [way for way, total in known.items() if total == least]
    groups = [(first, end) for way in best for first, end in pairwise(way) if first <= anchor < end]
    assert (low, high) in {(items[first][0], items[end - 1][0]) for first, end in groups}


def chosen(plan: BatchPlan) -> list[int]:
    return plan.chosen if plan.chosen is not None else list(range(plan.count))


def may_be_passed(request: Waiting, policy: BatchPolicy, urgent: int) -> int:
    if policy.preserve_ordering or 0 < request.deadline < urgent:
        return 0
    return MAX - request.passed


@given(QUEUES, POLICIES, PADDINGS, st.sampled_from([0, 150]))
def test_plans_are_consistent(waiting: list[Any], policy: BatchPolicy, padding: PaddingPolicy, urgent: int) -> None:
    rules = BatchRules.of(MAX, policy, True)
    plan = form_padded(waiting, rules, padding, NOW, urgent)
    if not plan.count:
        assert policy.delay_ns
        assert plan.wake > NOW
        return
    places = chosen(plan)
    assert places[0] == 0, "the head is in each batch"
    assert places == sorted(set(places))
    assert len(places) == plan.count
    assert places[-1] < padding.lookahead
    assert len({waiting[place].signature for place in places}) == 1
    assert plan.rows == sum(waiting[place].cost for place in places) <= MAX
    for place, request in enumerate(waiting):
        behind = sum(waiting[other].cost for other in places if other > place)
        assert place in places or not behind or behind <= may_be_passed(request, policy, urgent)
    if plan.reason is Reason.SHAPE:
        assert len(places) < len(waiting)
    if plan.reason is Reason.IDLE:
        assert len(places) == min(len(waiting), padding.lookahead)


@given(QUEUES, POLICIES, PADDINGS, st.integers(1, MAX - 1), st.integers(0, 40))
def test_an_extension_respects_the_size_and_padding_limits(
    waiting: list[Any], policy: BatchPolicy, padding: PaddingPolicy, base: int, length: int
) -> None:
    useful = base * length
    plan = form_padded(waiting, BatchRules.of(MAX, policy, True), padding, NOW, 0, base, "s", length, useful)
    places = chosen(plan)
    taken = [waiting[place] for place in places]
    rows = base + sum(request.cost for request in taken)
    longest = -(-max([length, *[request.length for request in taken]]) // padding.multiple) * padding.multiple
    before = base * (-(-length // padding.multiple) * padding.multiple) - useful
    after = rows * longest - useful - sum(request.cost * request.length for request in taken)
    if padding.multiple == 1:
        assert after <= max(padding.batch_cost, before), "padding costs no more than another batch would"
    assert all(waiting[place].signature == "s" for place in places)
    assert base + sum(waiting[place].cost for place in places) <= MAX
    for place, request in enumerate(waiting):
        behind = sum(waiting[other].cost for other in places if other > place)
        assert place in places or not behind or behind <= may_be_passed(request, policy, 0)
