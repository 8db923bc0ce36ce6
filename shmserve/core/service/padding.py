"""Batching by length: which waiting requests of different lengths run together, padded to the longest.

A batch costs rows x padded length, plus `batch_cost`. The waiting requests, sorted by length, are partitioned into
groups with the least total cost, and the group that contains the head of the queue runs. So a request may overtake
earlier ones. Invariant: no request is overtaken by more than `max_batch` rows in total, so it waits at most one batch
longer than in arrival order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shmserve.core.policy import PaddingPolicy
from shmserve.core.service.form import BatchItem, BatchPlan, BatchRules, Reason, form

_WASTE = 4
"""Groups whose padding costs more than this many batches are not considered: two groups nearly always cost less."""


class WaitingPadded(BatchItem, Protocol):
    """The additional fields that padding reads."""

    @property
    def length(self) -> int: ...
    @property
    def level(self) -> int: ...
    @property
    def delayed(self) -> bool: ...
    @property
    def deadline(self) -> int: ...
    @property
    def queue_expires(self) -> int: ...
    @property
    def passed(self) -> int: ...


def rounded(length: int, policy: PaddingPolicy) -> int:
    """The padded length of a batch whose longest request has this length."""
    return -(-length // policy.multiple) * policy.multiple


def form_padded(
    waiting: Sequence[WaitingPadded],
    rules: BatchRules,
    policy: PaddingPolicy,
    now: int,
    urgent: int = 0,
    base: int = 0,
    signature: object = None,
    length: int = 0,
    useful: int = 0,
) -> BatchPlan:
    """Like `form`, but chooses among the first `lookahead` requests: `BatchPlan.chosen` contains their queue positions.

    `base` rows with `signature` already wait at a worker, with a maximum length of `length` and `useful` elements in
    total. A request that expires before `urgent` is not overtaken.
    """
    window = waiting[: policy.lookahead]
    if base:
        places = _joining(window, rules, policy, base, signature, length, useful)
    else:
        signature = waiting[0].signature
        places = _group(window, rules, policy)
    places = _in_turn(window, places, rules, urgent)
    if not places:
        return BatchPlan(0, 0, Reason.SHAPE)
    members = [window[place] for place in places]
    plan = form(members, rules, now, base, signature)
    if len(places) < len(window):
        if plan.reason is Reason.IDLE:
            plan.reason = Reason.SHAPE
        elif not plan.count and not base and _enough(window, rules, policy):
            plan = BatchPlan(len(members), sum([request.cost for request in members]), Reason.SHAPE)
    if plan.count and places[plan.count - 1] >= plan.count:
        plan.chosen = places[: plan.count]
    return plan


def _enough(window: Sequence[WaitingPadded], rules: BatchRules, policy: PaddingPolicy) -> bool:
    """True if waiting gains nothing: the window is full, or its requests would fill a batch if their lengths were
    equal."""
    return len(window) == policy.lookahead or sum([request.cost for request in window]) >= rules.largest_preferred


def _group(window: Sequence[WaitingPadded], rules: BatchRules, policy: PaddingPolicy) -> list[int]:
    """The queue positions of the head's group, in order, including the first request that no longer fits, which `form`
    needs to see."""
    multiple, signature = policy.multiple, window[0].signature
    sizes = [-(-request.length // multiple) * multiple for request in window]  # `rounded`
    alike = [place for place, request in enumerate(window) if request.signature == signature]
    items = sorted([(sizes[place], window[place].cost) for place in alike])
    head = items.index((sizes[0], window[0].cost))
    low, high = group_of(items, head, rules.max_batch, policy.batch_cost)
    group, rows = [], 0
    for place in alike:
        if low <= sizes[place] <= high:
            group.append(place)
            rows += window[place].cost
            if rows > rules.max_batch:
                break
    return group


def _joining(
    window: Sequence[WaitingPadded],
    rules: BatchRules,
    policy: PaddingPolicy,
    rows: int,
    signature: object,
    length: int,
    useful: int,
) -> list[int]:
    """The queue positions, in order, of requests that can join a batch while its total padding costs no more than
    another batch. Runs on every arrival, so it does not search for the cheapest groups."""
    longest = rounded(length, policy)
    padding = rows * longest - useful
    joining = []
    for place, request in enumerate(window):
        if request.signature != signature:
            continue
        size = max(longest, rounded(request.length, policy))
        then = (rows + request.cost) * size - useful - request.cost * request.length
        if then > policy.batch_cost and then > padding:
            continue
        joining.append(place)
        rows += request.cost
        if rows > rules.max_batch:
            break
        longest, padding = size, then
        useful += request.cost * request.length
    return joining


def group_of(items: Sequence[tuple[int, int]], anchor: int, max_rows: int, batch_cost: int) -> tuple[int, int]:
    """The shortest and longest length in the anchor's group, when all items are partitioned into the cheapest groups of
    at most `max_rows` rows. `items` are (length, rows), increasing. Takes 0.2 ms for 64 items, once per batch."""
    if items[0][0] == items[-1][0]:
        return items[0][0], items[0][0]
    limit = _WASTE * batch_cost
    costs, cuts = [0], [0]  # for the first n items: minimum cost, and start of the last group
    for last, (longest, _) in enumerate(items):
        rows = waste = minimum = cut = 0
        for first in range(last, -1, -1):
            length, own = items[first]
            rows += own
            waste += own * (longest - length)
            if first < last and (rows > max_rows or waste > limit):
                break
            cost = costs[first] + batch_cost + rows * longest
            if first == last or cost <= minimum:
                minimum, cut = cost, first
        costs.append(minimum)
        cuts.append(cut)
    end = len(items)
    while cuts[end] > anchor:
        end = cuts[end]
    return items[cuts[end]][0], items[end - 1][0]


def _in_turn(window: Sequence[WaitingPadded], places: list[int], rules: BatchRules, urgent: int) -> list[int]:
    """The leading part of `places` that may run before the requests left out."""
    if not places or places[-1] < len(places):
        return places
    chosen = set(places)
    kept: list[int] = []
    slack = rules.max_batch
    waits = False
    previous = window[0]
    for place, request in enumerate(window[: places[-1] + 1]):
        if request.level != previous.level or request.delayed != previous.delayed:
            slack = 0 if waits else slack
        previous = request
        if place not in chosen:
            waits = True
            slack = min(slack, _may_be_passed(request, rules, urgent))
        elif waits and request.cost > slack:
            break
        else:
            kept.append(place)
            slack -= request.cost if waits else 0
    return kept


def _may_be_passed(request: WaitingPadded, rules: BatchRules, urgent: int) -> int:
    """The number of rows that may overtake the request."""
    if not rules.may_overtake or 0 < request.deadline < urgent or 0 < request.queue_expires < urgent:
        return 0
    return max(0, rules.max_batch - request.passed)
