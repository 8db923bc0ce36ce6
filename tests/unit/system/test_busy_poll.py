"""The polling budget grows with short waits, shrinks with long ones, and is suspended while others want the core."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.system.polling import FIRST_NS, PAID_OFF, SUSPEND_MAX_NS, SUSPEND_NS, PollBudget

LONGEST = 200_000
LONG = 5_000_000


def grown() -> PollBudget:
    budget = PollBudget(LONGEST)
    while budget.ns < LONGEST:
        before = budget.ns
        budget.waited(before + 1, now=0, polled=True)
        assert before < budget.ns <= LONGEST
    return budget


def test_the_budget_grows_from_nothing_to_the_limit_and_an_idle_process_stops_polling() -> None:
    budget = PollBudget(LONGEST)
    assert budget.ns == 0
    budget.waited(50_000, now=0, polled=True)
    assert budget.ns == FIRST_NS
    budget.waited(FIRST_NS, now=0, polled=True)
    assert budget.ns == FIRST_NS, "a wait that ends within the budget keeps it"
    budget, waits = grown(), 0
    assert budget.ns == LONGEST
    while budget.ns:
        budget.waited(LONG, now=0, polled=True)
        waits += 1
    assert waits <= 6


def test_suspended_while_another_process_wants_the_core() -> None:
    budget = grown()
    budget.preempted(now=0)
    assert budget.ns == 0
    budget.waited(50_000, now=SUSPEND_NS - 1, polled=True)
    assert budget.ns == 0
    budget.waited(50_000, now=SUSPEND_NS, polled=True)
    assert budget.ns == FIRST_NS


@pytest.mark.parametrize("polled", [True, False])
def test_each_further_suspension_is_longer_until_polling_pays_off(polled: bool) -> None:
    """Messages that were there at once do not count as success."""
    budget = PollBudget(LONGEST)
    budget.preempted(now=0)
    budget.preempted(now=0)
    budget.waited(50_000, now=2 * SUSPEND_NS - 1, polled=True)
    assert budget.ns == 0
    for _ in range(20):
        budget.preempted(now=0)
    budget.waited(50_000, now=SUSPEND_MAX_NS, polled=True)
    assert budget.ns == FIRST_NS
    for _ in range(PAID_OFF):
        budget.waited(1, now=SUSPEND_MAX_NS, polled=polled)
    budget.preempted(now=SUSPEND_MAX_NS)
    budget.waited(50_000, now=SUSPEND_MAX_NS + SUSPEND_NS, polled=True)
    assert budget.ns == (FIRST_NS if polled else 0)


@given(st.integers(1, 10**6), st.lists(st.one_of(st.integers(0, 10**9), st.none())))
def test_never_exceeds_the_limit_and_ends_at_zero_when_idle(longest: int, waits: list[int | None]) -> None:
    budget, now = PollBudget(longest), 0
    for wait in waits:
        if wait is None:
            budget.preempted(now)
        else:
            now += wait
            budget.waited(wait, now, True)
        assert 0 <= budget.ns <= longest
    for _ in range(20):
        budget.waited(longest + 10**9, now, True)
    assert budget.ns == 0
