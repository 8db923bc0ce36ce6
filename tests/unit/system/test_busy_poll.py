"""The polling budget grows with short waits, shrinks with long ones, and is suspended while others want the core. The
event loop polls after a turn while its budget lasts, and sleeps otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.system import polling as system_polling
from shmserve.system.polling import FIRST_NS, PAID_OFF, SUSPEND_MAX_NS, SUSPEND_NS, LoopPolling, PollBudget

LONGEST = 200_000
LONG = 5_000_000


def grown() -> PollBudget:
    budget = PollBudget(LONGEST)
    while budget.ns < LONGEST:
        budget.waited(budget.ns + 1, now=0, polled=True)
    return budget


def test_the_budget_grows_from_nothing_to_the_limit_and_an_idle_process_stops_polling() -> None:
    budget = PollBudget(LONGEST)
    assert budget.ns == 0
    budget.waited(50_000, now=0, polled=True)
    assert budget.ns == FIRST_NS
    budget.waited(FIRST_NS, now=0, polled=True)
    assert budget.ns == FIRST_NS, "a wait that ends within the budget keeps it"
    budget = grown()
    for _ in range(6):
        budget.waited(LONG, now=0, polled=True)
    assert budget.ns == 0


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


class Clock:
    """A clock, a scheduler and an event loop in one: `step` is the duration of a poll."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0
        self.is_free = True
        self.ready: list[Callable[[], Any]] = []
        monkeypatch.setattr(system_polling, "monotonic_ns", lambda: self.now)
        monkeypatch.setattr(system_polling, "core_is_free", lambda since: self.is_free)

    def call_soon(self, callback: Callable[[], Any]) -> None:
        self.ready.append(callback)

    def poll(self, ns: int = 10_000) -> None:
        """One iteration of the event loop."""
        self.now += ns
        ready, self.ready = self.ready, []
        for callback in ready:
            callback()

    def exchange(self, polling: LoopPolling, in_flight: bool, ns: int) -> None:
        """The end of a turn, a wait, and the start of the next turn."""
        polling.wait(in_flight)
        for _ in range(ns // 10_000):
            self.poll()
        polling.wake(self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def polling(clock: Clock) -> LoopPolling:
    found = LoopPolling(clock, LONGEST)
    for _ in range(10):
        clock.exchange(found, True, 100_000)
    return found


def test_waits_between_requests_have_a_budget_of_their_own(clock: Clock, polling: LoopPolling) -> None:
    while clock.ready:
        clock.poll()
    for _ in range(10):
        clock.exchange(polling, False, 5_000_000)
    polling.wait(False)
    assert not clock.ready
    polling.wait(True)
    assert clock.ready


def test_a_turn_prolongs_polling_without_a_second_callback(clock: Clock, polling: LoopPolling) -> None:
    for _ in range(5):
        polling.wait(True)
        clock.poll(50_000)
        polling.wake(clock.now)
        assert len(clock.ready) == 1


def test_stops_when_another_process_wants_the_core(clock: Clock, polling: LoopPolling) -> None:
    polling.wait(True)
    clock.poll()
    clock.is_free = False
    clock.poll()
    clock.poll()
    assert not clock.ready
    polling.wake(clock.now)
    polling.wait(True)
    assert not clock.ready


def test_a_peer_that_takes_the_core_and_sends_a_message_is_not_another_process(
    clock: Clock, polling: LoopPolling
) -> None:
    for _ in range(5):
        clock.is_free = False
        polling.wait(True)
        clock.poll()
        clock.poll()
        polling.wake(clock.now)
        clock.is_free = True
        polling.wait(True)
        clock.poll()
        assert clock.ready


def test_a_limit_of_zero_turns_polling_off(clock: Clock) -> None:
    polling = LoopPolling(clock, 0)
    for _ in range(10):
        clock.exchange(polling, True, 50_000)
        assert not clock.ready
