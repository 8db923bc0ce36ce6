"""Measures whether a version has enough instances. `scaling` acts on the result.

Everything is derived from existing counters, a few times a second, and only while there is something to measure.
"""

from __future__ import annotations

from math import sqrt

from msgspec import Struct

from shmserve.core.limits import Limits, pause_ns
from shmserve.core.policy import ScalingPolicy

WINDOW_NS = 250_000_000
"""How often a version is measured."""
SLOW_WINDOW_NS = 1_000_000_000
"""How often a version is measured while it is idle and has more instances than it needs."""
SUSTAINED = 3
"""Consecutive windows in which requests must have waited too long. A single burst is over sooner."""
FALLING_RATIO = 0.9
"""If the time in the queue falls below this fraction of that in the previous window, the instances are catching up."""
MAX_UTILIZATION = 0.8
"""Maximum utilization of the remaining instances after one is removed."""
NORMAL_QUEUE_NS = 1_000_000
"""Time in the queue that is caused by messages and turns, not by busy instances."""
MAX_PATIENCE = 16
"""Upper limit of `Scaler.patience`."""


class Reading(Struct, frozen=True):
    """The counters and the state of a version at the end of a window."""

    at: int
    busy_ns: int
    """Total time that all instances have run batches."""
    queue_ns: int
    """Total time that all requests were queued."""
    requests: int
    oldest_ns: int
    """How long the oldest request that has not started has been queued."""
    instances: int
    spare: bool
    """An instance is idle or, for sequences, has a free slot."""
    needed: int
    """Instances that are needed for streams and sequences in progress."""
    service_ns: int
    """Mean time of a batch."""
    prompts_ns: int = 0
    """For language models: how long it will take to compute the prompts that wait behind others."""


class Measured(Struct, frozen=True):
    """The result of a window. `wait_ns`: mean time in the queue. `prompts_wait_ns`: mean time that the waiting prompts
    of a language model will wait. `busy`: mean number of instances that ran a batch."""

    wait_ns: int
    prompts_wait_ns: int
    busy: float
    is_falling: bool


def expected_wait(service_ns: int, busy: float, instances: int) -> float:
    """The mean time in the queue, in ns, if `busy` of this many instances are busy on average. Sakasegawa's
    approximation, for random arrival and batch times."""
    share = busy / instances
    if share >= 1:
        return float("inf")
    return float(service_ns * share ** (sqrt(2 * (instances + 1)) - 1) / (instances * (1 - share)))


class Scaler(Struct):
    """The measurements of a version whose number of instances follows the load."""

    policy: ScalingPolicy
    watched: bool = False
    """Its timer is set."""
    last: Reading | None = None
    """The end of the last window; None: the version has not been measured since its bounds last changed."""
    last_wait_ns: int = 0
    short: int = 0
    """Consecutive windows in which requests waited too long."""
    calm_since: int = 0
    """Since when one instance fewer would have been enough; 0: it would not."""
    patience: int = 1
    """Multiple of `down_ns` for which this must hold. Doubles if an instance was needed again soon after a removal."""
    shrunk_at: int = 0
    failures: int = 0
    """Number of consecutive added instances that could not load."""
    retry_at: int = 0
    """When the next instance may be added after such a failure."""

    def change(self, policy: ScalingPolicy) -> None:
        self.policy = policy
        if not self.watched:
            self.last = None

    def begin(self, reading: Reading) -> None:
        """Begins the first window."""
        self.last, self.last_wait_ns, self.short, self.calm_since = reading, 0, 0, 0
        self.watched = True

    def stop(self) -> None:
        """The version is not measured until the next `begin`, because it does not serve."""
        self.watched, self.last = False, None

    def measure(self, now: Reading, delay_ns: int) -> Measured:
        """Evaluates a window. `delay_ns`: how long requests are queued on purpose, to form larger batches."""
        before = self.last or now
        self.last = now
        limit_ns = self.policy.up_ns + delay_ns
        passed = max(1, now.at - before.at)
        busy = max(0.0, (now.busy_ns - before.busy_ns) / passed)
        started = now.requests - before.requests
        # Queued requests have waited, on average, half as long as the oldest one.
        wait_ns = max((now.queue_ns - before.queue_ns) // started if started > 0 else 0, now.oldest_ns // 2)
        prompts_wait_ns = now.prompts_ns // 2
        # Requests wait too long although all instances are busy.
        is_short = prompts_wait_ns > limit_ns or (wait_ns > limit_ns and not now.spare)
        wait_ns = max(wait_ns, prompts_wait_ns)
        is_falling, self.last_wait_ns = wait_ns < FALLING_RATIO * self.last_wait_ns, wait_ns
        self.short = self.short + 1 if is_short else 0
        is_calm = wait_ns <= limit_ns // 2 and now.needed < now.instances and self._is_enough(now, busy)
        if not is_calm:
            self.calm_since = 0
        elif not self.calm_since:
            self.calm_since = before.at
        return Measured(wait_ns, prompts_wait_ns, busy, is_falling)

    def _is_enough(self, now: Reading, busy: float) -> bool:
        """True if one instance fewer would be enough: if one was idle and nothing waited, as with callers that send
        one request at a time, or if the expected time in the queue is far below the limit."""
        fewer = now.instances - 1
        if fewer < 1:
            return False
        if busy <= MAX_UTILIZATION * fewer and expected_wait(now.service_ns, busy, fewer) <= self.policy.up_ns / 2:
            return True
        return now.spare and self.last_wait_ns <= max(now.service_ns // 20, NORMAL_QUEUE_NS)

    @property
    def down_ns(self) -> int:
        return self.policy.down_ns * self.patience

    def joined(self) -> None:
        """An added instance is READY."""
        self.failures = self.short = 0

    def did_not_join(self, now: int, limits: Limits) -> None:
        """An added instance could not load."""
        self.failures, self.short = self.failures + 1, 0
        self.retry_at = now + pause_ns(self.failures + 1, limits.backoff_ns, limits.backoff_max_ns)

    def has_grown(self, now: int) -> None:
        soon = self.shrunk_at and now - self.shrunk_at < 2 * self.down_ns
        self.patience = min(2 * self.patience, MAX_PATIENCE) if soon else 1
        self.short = self.calm_since = 0

    def has_shrunk(self, now: int) -> None:
        self.shrunk_at = now
        self.short = self.calm_since = 0
