"""The desired number of servers, by the rule of Kubernetes' horizontal autoscaler applied to requests in flight."""

from __future__ import annotations

from collections import deque
from math import ceil

from shmserve.tools.plan.plan import Autoscale

TOLERANCE = 0.1
"""Relative difference from the target up to which nothing changes."""


class Scaler:
    def __init__(self, rules: Autoscale, instances: int) -> None:
        self._rules = rules
        self._instances = instances
        self._wanted: deque[tuple[int, int]] = deque()
        self._in_flight = 0.0
        self._since = self._seen = 0
        self._level = 0

    def count(self, in_flight: int, now: int) -> None:
        """The number of requests in flight has changed."""
        self._in_flight += self._level * (now - self._seen)
        self._level, self._seen = in_flight, now

    def wanted(self, ready: int, coming: int, now: int) -> int:
        """The number of servers wanted from now on. `ready`: servers that share the load; `coming`: servers that are
        starting."""
        rules = self._rules
        self.count(self._level, now)
        mean = self._in_flight / max(now - self._since, 1)
        self._in_flight, self._since = 0.0, now
        share = mean / (max(ready, 1) * self._instances * rules.target)
        number = ready if abs(share - 1) <= TOLERANCE else ceil(max(ready, 1) * share)
        number = min(max(number, rules.least), rules.most)
        self._wanted.append((now, number))
        while self._wanted[0][0] < now - rules.down_ns:
            self._wanted.popleft()
        present = ready + coming
        return number if number >= present else min(present, max(number for _, number in self._wanted))
