"""The health of one GPU: whether its instances may run, and if not, why, and what an operator has to do.

A GPU is out of service while the driver cannot use it or recommends a reset or a reboot, and after a fatal Xid until
there is evidence that it has recovered.
"""

from __future__ import annotations

from collections.abc import Mapping

from shmserve.broker.processes.gpus import xids
from shmserve.repo.gpu_state import NO_ACTION, REBOOT, GpuState, Problem

SETTLE_S = 10.0
"""Time after a fatal Xid in which the driver may still change the recovery action that it recommends."""


class GpuHealth:
    def __init__(self, pci: str, fixes: Mapping[int, str]) -> None:
        """`fixes`: the fatal Xids, and what to do."""
        self._pci = pci
        self._fixes = fixes
        self._xid = 0
        """The last fatal Xid; 0: none since the GPU has recovered."""
        self._xid_at = 0.0
        self._stuck_s = 0.0
        """For how long the driver has not answered a query; 0: it answers."""
        self._state = GpuState()
        self.has_failed = False
        """It is out of service."""

    def happened(self, xid: int, now: float) -> bool:
        """The driver has reported this Xid. True: it takes the GPU out of service."""
        if xid not in self._fixes:
            return False
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
            return self._state.action == NO_ACTION and now - self._xid_at >= SETTLE_S
        was_reset = 0 <= self._state.uncorrected < before.uncorrected or 0 <= self._state.energy < before.energy
        return was_reset or bool(before.lost)

    @property
    def reason(self) -> str:
        """Why the GPU is out of service, and what to do; "" if it is in service."""
        found = self._problem() if self.has_failed else None
        if found is None:
            return ""
        return f"{found.what}; {found.fix.format(pci=self._pci)}"

    @property
    def needs_reset(self) -> str:
        """Why the GPU should be reset when convenient."""
        return self._state.needs_reset

    def _problem(self) -> Problem | None:
        if self._stuck_s:
            return Problem(f"the driver has not answered for {self._stuck_s:.0f} s", REBOOT)
        if self._xid:
            return Problem(xids.title(self._xid), self._fixes[self._xid])
        return self._state.problem
