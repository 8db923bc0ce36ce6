"""The value of a version in memory: the load time that it saves per second.

The value is the rate at which the version is used, times the time that a load takes. `room` weighs it against the
memory that the version occupies, as GDSF does. The rate comes from counting batches while the version is in memory; all
counts are halved after every `EVICTIONS` evictions per version in memory, so that popularity may change. A version that
is used no more has at most `IDLE_USES` uses in the time since the last one.

`python -m bench.suites.eviction` compares the result with an LRU cache and with the best fixed choice of versions.
"""

from __future__ import annotations

from shmserve.core.records import Version
from shmserve.core.state import State

EVICTIONS = 8
IDLE_USES = 2
SHORTEST_LOAD_NS = 1_000_000
"""Shorter loads cost the same: starting the process takes longer."""


def count_uses(state: State) -> None:
    """Counts the batches that versions in memory have completed since the last call."""
    if not state.memory.uses_since:
        state.memory.uses_since = min((version.began for version in state.memory.holders.values()), default=0)
    for version in state.memory.holders.values():
        version.sleep_state.count_uses(version.statistics.execution_count)


def of_version(state: State, version: Version, last_used: int, now: int) -> float:
    """The time that loads would take, in ns per ns, if each use needed one."""
    sleep_state = version.sleep_state
    rate = sleep_state.uses / max(now - state.memory.uses_since, 1)
    idle = now - last_used
    if rate * idle > IDLE_USES:
        rate = IDLE_USES / idle
    return rate * max(sleep_state.load_ns, SHORTEST_LOAD_NS)


def has_evicted(state: State, count: int, now: int) -> None:
    """Counts evictions. From time to time, halves the counts of uses and the time in which they were counted."""
    state.memory.evictions += count
    if state.memory.evictions < EVICTIONS * len(set(state.memory.holders.values())):
        return
    state.memory.evictions = 0
    state.memory.uses_since += (now - state.memory.uses_since) // 2
    for model in state.models.values():
        for version in model.generations():
            version.sleep_state.age()
