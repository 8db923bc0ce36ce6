"""`form` compared with a slow, literal implementation of its rules; properties that every plan must have; and the time
in which a batch waits for callers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock

from hypothesis import given
from hypothesis import strategies as st

from shmserve.core.policy import BatchPolicy
from shmserve.core.records import Batch, Request
from shmserve.core.service.form import BatchPlan, BatchRules, Reason, form


@dataclass
class Waiting:
    cost: int
    signature: str
    arrived: int


NOW = 100
MAX = 8
QUEUES = st.lists(
    st.builds(Waiting, st.integers(1, MAX), st.sampled_from(["s", "s", "s", "t"]), st.integers(80, NOW)),
    min_size=1,
    max_size=14,
)
POLICIES = st.builds(
    BatchPolicy,
    preferred=st.lists(st.integers(1, MAX), max_size=3, unique=True).map(tuple),
    delay_ns=st.sampled_from([0, 0, 5, 12, 30]),
)


def rules_of(policy: BatchPolicy, varies: bool) -> BatchRules:
    return BatchRules.of(MAX, policy, varies)


def run(waiting: list[Any], rules: BatchRules, *base: Any) -> BatchPlan:
    return form(waiting, rules, NOW, *base)


def rules(waiting: list[Waiting], policy: BatchPolicy, varies: bool) -> tuple[int, int]:
    """(number of requests to send now, time of the next check), according to the rules."""
    preferred = policy.preferred or (MAX,)
    pending: list[Waiting] = []
    best: int | None = None
    send_now = False
    for request in waiting:
        rows = sum(each.cost for each in pending)
        if pending:
            if rows + request.cost > max(preferred) and best is None:
                best = len(pending)
            if rows + request.cost > MAX:
                send_now = True
                break
            if varies and request.signature != pending[0].signature:
                send_now = True
                break
        pending.append(request)
        if rows + request.cost in preferred:
            best = len(pending)
    age = NOW - min(each.arrived for each in pending)
    delay = policy.delay_ns
    if best is not None and not (delay != 0 and age >= delay):
        return best, 0
    if send_now or sum(each.cost for each in pending) >= max(preferred):
        return len(pending), 0
    if age >= delay or delay == 0:
        return len(pending), 0
    return 0, NOW + delay - age


@given(QUEUES, POLICIES, st.booleans())
def test_plans_match_the_reference_rules(waiting: list[Waiting], policy: BatchPolicy, varies: bool) -> None:
    plan = run(waiting, rules_of(policy, varies))
    assert (plan.count, plan.wake if not plan.count else 0) == rules(waiting, policy, varies)


@given(QUEUES, POLICIES, st.booleans(), st.integers(1, MAX - 1), st.sampled_from(["s", "t"]))
def test_an_extension_respects_the_size_limits_of_the_batch(
    waiting: list[Waiting], policy: BatchPolicy, varies: bool, base: int, signature: str
) -> None:
    rules = rules_of(policy, varies)
    plan = run(waiting, rules, base, signature if varies else None)
    taken = waiting[: plan.count]
    assert plan.rows == sum(request.cost for request in taken)
    assert base + plan.rows <= MAX
    assert not varies or all(request.signature == signature for request in taken)
    if plan.count and base + plan.rows > rules.largest_preferred:
        assert base > rules.largest_preferred, "it grows over the largest preferred size only if it was over it already"
    if plan.count < len(waiting):
        stopper = waiting[plan.count]
        total = base + plan.rows + stopper.cost
        other = varies and stopper.signature != signature
        assert total > min(MAX, rules.largest_preferred) or other or base + plan.rows in rules.preferred


def test_meaningless_preferred_sizes_are_ignored() -> None:
    assert BatchRules.of(8, BatchPolicy(preferred=(0,)), False) == BatchRules.of(8, BatchPolicy(), False)


def test_time_in_which_a_batch_waits_for_several_callers_counts_once() -> None:
    batch, first, second = Batch([(1, [])], 2, Reason.FULL, None, 0), Mock(Request), Mock(Request)
    batch.stall(first, 10)
    batch.stall(second, 15)
    assert batch.resume(first, 20) == 10
    assert batch.resume(second, 30) == 15
    assert batch.waited_for_callers(40) == 20
    assert batch.worked(40) == 20
