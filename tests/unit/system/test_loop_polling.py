"""The event loop polls after a turn while its budget lasts, and sleeps otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shmserve.system import polling as system_polling
from shmserve.system.polling import LoopPolling

LONGEST = 200_000


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
