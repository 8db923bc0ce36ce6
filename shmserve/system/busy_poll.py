"""How long to poll for input before sleeping, adapted to the traffic (as KVM's halt polling does).

A process that sleeps when a message arrives costs its peer a system call that wakes it, 2 to 10 us on bare metal and 50
to 150 us on a virtual machine, and starts late itself. Polling for a moment avoids both, and costs processor time:

- The budget grows if a message arrived soon after the process fell asleep, and shrinks to nothing if none did. An idle
  process does not poll.
- Each poll yields the core. If another process took it and no message came of that, polling is suspended for a while.
"""

from __future__ import annotations

import os
from time import monotonic_ns

LONGEST_US = 200
"""Default of --busy-poll-us: longer waits are not worth polling, as the cost of a wake-up is small beside them."""
LEAST_CORES = 4
"""Polling is off by default with fewer: broker, worker and client then share cores, which saves the wake-ups anyway,
and polling takes time from engines and clients."""
FIRST_NS = 20_000
"""The first step from zero."""
PREEMPTED_NS = 20_000
"""A yield that takes longer than this gave the core to another process."""
SUSPEND_NS = 10_000_000
SUSPEND_MAX_NS = 640_000_000
"""Polling is suspended for SUSPEND_NS after another process wanted the core, and for twice as long each further time
until polling has received PAID_OFF messages."""
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
        """A message has arrived after `ns`, polling and sleeping together. `polled`: it was not there at once, and the
        process polled for it."""
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
        """Another process wanted the core, and it was not the peer that sends the next message."""
        self.ns = 0
        self._hits = 0
        self._suspended_until = now + self._suspend_ns
        self._suspend_ns = min(SUSPEND_MAX_NS, 2 * self._suspend_ns)


def core_is_free(since: int) -> bool:
    """Yields the core. False if another process took it. `since`: the time by monotonic_ns, read just before."""
    os.sched_yield()
    return monotonic_ns() - since < PREEMPTED_NS
