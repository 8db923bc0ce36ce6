"""TRITONSERVER_DELAY_SCHEDULER and TRITONSERVER_BACKLOG_DELAY_SCHEDULER, variables for Triton's own tests: the
scheduler of each version runs nothing until that many requests wait, the second in the backlog of sequences.

shmserve has no such setting, so this module wraps its core.
"""

from __future__ import annotations

from collections.abc import Mapping

from shmserve.core.batching import dispatch, sequence_scheduler
from shmserve.core.records import Instance, SequenceSlots, Version
from shmserve.core.state import State

REQUESTS, BACKLOG = "TRITONSERVER_DELAY_SCHEDULER", "TRITONSERVER_BACKLOG_DELAY_SCHEDULER"


class Delay:
    def __init__(self, requests: int, backlog: int) -> None:
        self._requests = requests
        self._backlog = backlog
        self._over: set[Version] = set()

    def holds(self, version: Version) -> bool:
        """Whether the scheduler still waits. After enough requests it never waits again. Only batchers wait, as in
        Triton."""
        if version in self._over:
            return False
        policy, slots = version.policy, version.service.sequence_slots
        if slots is not None:
            bound = sum(len(one.requests) for one in slots.all() if one.instance is not None)
            backlog = sum(len(one.requests) for one in slots.backlog)
            held = bound < self._requests or backlog < self._backlog
        else:
            held = policy is not None and policy.batching is not None and version.service.queue.count < self._requests
        if not held:
            self._over.add(version)
        return held


def install(environment: Mapping[str, str]) -> None:
    delay = Delay(int(environment.get(REQUESTS) or 0), int(environment.get(BACKLOG) or 0))
    immediately, run = dispatch.dispatch, sequence_scheduler._run  # noqa: SLF001 - replaced for this server

    def delayed_dispatch(state: State, version: Version, now: int) -> None:
        if version.service.sequence_slots is not None or not delay.holds(version):
            immediately(state, version, now)

    def delayed_run(state: State, version: Version, slots: SequenceSlots, instance: Instance, now: int) -> None:
        if not delay.holds(version):
            run(state, version, slots, instance, now)

    dispatch.dispatch = delayed_dispatch
    sequence_scheduler._run = delayed_run  # noqa: SLF001 - replaced for this server
