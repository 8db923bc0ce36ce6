"""The health of one GPU: whether its instances may run, and if not, why, and what an operator has to do.

A GPU is out of service while the driver cannot use it or recommends a reset or a reboot, and after a fatal Xid until
there is evidence that it has recovered. A GPU that fails again and again is out of service for longer each time.
"""

from __future__ import annotations

from collections.abc import Mapping

from shmserve.broker.processes.gpus import xids
from shmserve.repo.gpu_state import NO_ACTION, REBOOT, GpuProblem, GpuState

SETTLE_S = 10.0
"""Time after a fatal Xid in which the driver may still change the recovery action that it recommends. It doubles with
each further failure within REPEATED_S, up to MAX_SETTLE_S."""
MAX_SETTLE_S = 600.0
REPEATED_S = 3600.0


class GpuHealth:
    def __init__(self, pci: str, fixes: Mapping[int, str]) -> None:
        """`fixes`: the fatal Xids, and what to do."""
        self._pci = pci
        self._fixes = fixes
        self._xid = 0
        """The last fatal Xid; 0: none since the GPU has recovered."""
        self._xid_at = 0.0
        self._failures: list[float] = []
        """When fatal Xids took the GPU out of service, within REPEATED_S before the last time."""
        self._stuck_s = 0.0
        """For how long the driver has not answered a query; 0: it answers."""
        self._state = GpuState()
        self.has_failed = False
        """It is out of service."""

    def happened(self, xid: int, now: float) -> bool:
        """The driver has reported this Xid. True: it takes the GPU out of service."""
        if xid not in self._fixes:
            return False
        if not self._xid:
            self._failures = [*(then for then in self._failures if now - then < REPEATED_S), now]
        self._xid, self._xid_at = xid, now
        self.has_failed = True
        return True

    def does_not_answer(self, seconds: float) -> None:
        self._stuck_s = seconds
        self.has_failed = True

    def observe(self, state: GpuState, now: float) -> None:
        before, self._state = self._state, state
        self._stuck_s = 0.0
        if self._xid and not state.problem and self._has_recovered(before, now):
            self._xid = 0
        self.has_failed = bool(self._xid or state.problem)

    def _has_recovered(self, before: GpuState, now: float) -> bool:
        """Whether the GPU has recovered from a fatal Xid. Without recovery actions, only a reset counts."""
        if self._state.action is not None:
            return self._state.action == NO_ACTION and now - self._xid_at >= self._settle_s
        was_reset = 0 <= self._state.uncorrected < before.uncorrected or 0 <= self._state.energy < before.energy
        return was_reset or bool(before.lost)

    @property
    def _settle_s(self) -> float:
        """Time since the last fatal Xid after which the GPU has recovered, if the driver recommends nothing."""
        return min(SETTLE_S * 2.0 ** min(len(self._failures) - 1, 16), MAX_SETTLE_S)

    @property
    def reason(self) -> str:
        """Why the GPU is out of service, and what to do; "" if it is in service."""
        problem = self._problem() if self.has_failed else None
        if problem is None:
            return ""
        return f"{problem.what}; {problem.fix.format(pci=self._pci)}"

    @property
    def needs_reset(self) -> str:
        """Why the GPU should be reset when convenient."""
        return self._state.needs_reset

    def _problem(self) -> GpuProblem | None:
        if self._stuck_s:
            return GpuProblem(f"the driver has not answered for {self._stuck_s:.0f} s", REBOOT)
        if self._xid:
            what, count = xids.title(self._xid), len(self._failures)
            if count > 1:
                what += f", failure {count} within an hour"
                if self._state.action is not None:
                    what += f": it is back after {self._settle_s:.0f} s at the earliest"
            return GpuProblem(what, self._fixes[self._xid])
        return self._state.problem
