"""How long to poll for input before sleeping, adapted to the traffic (like KVM's halt polling).

If a process sleeps when a message arrives, its peer spends a system call to wake it (2 to 10 us on bare metal, 50 to
150 us on a virtual machine), and the process starts late. Polling briefly avoids both, but costs CPU time:

- The budget grows if a message arrives soon after the process fell asleep, and shrinks to zero otherwise. An idle
  process does not poll.
- Each poll yields the core. If another process takes it and no message arrives in consequence, polling is suspended for
  some time.
"""

from __future__ import annotations

import os
from time import monotonic_ns
from typing import Any

POLL_NS = 200_000
"""Longest time to poll. Compared to longer waits, the cost of a wake-up is too small to justify polling."""
MIN_CORES = 4
"""With fewer cores, polling is off. The broker, workers and clients then share cores, which avoids wake-ups
anyway, and polling takes CPU time from engines and clients."""
FIRST_NS = 20_000
"""The first budget above zero."""
PREEMPTED_NS = 20_000
"""If a yield takes longer than this, another process took the core."""
SUSPEND_NS = 10_000_000
SUSPEND_MAX_NS = 640_000_000
"""Polling is suspended for SUSPEND_NS after another process took the core, and for twice as long each further time, up
to SUSPEND_MAX_NS. Receiving PAID_OFF messages by polling resets this."""
PAID_OFF = 100


class PollBudget:
    """`ns`: poll for this long before sleeping; 0: sleep at once."""

    __slots__ = ("_hits", "_longest_ns", "_suspend_ns", "_suspended_until", "ns")

    def __init__(self, longest_ns: int) -> None:
        self.ns = 0
        self._longest_ns = longest_ns
        self._suspended_until = 0
        self._suspend_ns = SUSPEND_NS
        self._hits = 0

    def waited(self, ns: int, now: int, polled: bool) -> None:
        """Records that a message arrived after `ns` of polling and sleeping. `polled`: it was not available at once,
        and the process polled for it."""
        if ns <= self.ns:
            self._hits += polled
            if self._hits >= PAID_OFF:
                self._hits = 0
                self._suspend_ns = SUSPEND_NS
        elif ns > self._longest_ns:
            self.ns = self.ns // 2 if self.ns > FIRST_NS else 0
        elif now >= self._suspended_until:
            self.ns = min(self._longest_ns, max(FIRST_NS, 2 * self.ns))

    def preempted(self, now: int) -> None:
        """Records that another process took the core, other than the peer that sends the next message."""
        self.ns = 0
        self._hits = 0
        self._suspended_until = now + self._suspend_ns
        self._suspend_ns = min(SUSPEND_MAX_NS, 2 * self._suspend_ns)


def core_is_free(since: int) -> bool:
    """Yields the core. False if another process took it. `since`: monotonic_ns() just before the call."""
    os.sched_yield()
    return monotonic_ns() - since < PREEMPTED_NS


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
        """Called at the end of a turn, when the loop is about to wait for input."""
        if not self._on:
            return
        self._since = monotonic_ns()
        budget = self._budget = self._in_flight if in_flight else self._idle
        if budget.ns and not self._scheduled:
            self._scheduled = True
            self._call_soon(self._poll)

    def wake(self, now: int) -> None:
        """Called at the start of a turn."""
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
