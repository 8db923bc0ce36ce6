"""Keeps the event loop polling briefly after a turn instead of sleeping, as long as that pays off."""

from __future__ import annotations

from time import monotonic_ns
from typing import Any

from shmserve.system.busy_poll import PollBudget, core_is_free


class LoopPolling:
    """An event loop with a scheduled callback polls its descriptors without waiting. Polling is therefore a callback
    that schedules itself until a turn begins or the budget is used up.

    There are two budgets, because waits are shorter while requests are in flight.
    """

    def __init__(self, loop: Any, longest_ns: int) -> None:
        self._call_soon = loop.call_soon
        self._in_flight = PollBudget(longest_ns)
        self._idle = PollBudget(longest_ns)
        self._budget = self._idle
        self._since = 0
        self._polled = 0
        """`_since` at the last poll. If they are equal, no turn has ended since then."""
        self._scheduled = False
        self._taken = False
        """Another process took the core at the last poll."""
        self._on = longest_ns > 0

    def wait(self, in_flight: bool) -> None:
        """Call at the end of a turn, when the loop is about to wait for input."""
        if not self._on:
            return
        self._since = monotonic_ns()
        budget = self._budget = self._in_flight if in_flight else self._idle
        if budget.ns and not self._scheduled:
            self._scheduled = True
            self._call_soon(self._poll)

    def wake(self, now: int) -> None:
        """Call at the start of a turn."""
        if self._on:
            self._budget.waited(now - self._since, now, self._polled == self._since)

    def _poll(self) -> None:
        now = monotonic_ns()
        since = self._since
        if since == self._polled:
            if self._taken:
                self._budget.preempted(now)
            if self._taken or now - since >= self._budget.ns:
                self._scheduled = self._taken = False
                return
            self._taken = not core_is_free(now)
        else:
            self._taken = False
        self._polled = since
        self._call_soon(self._poll)
