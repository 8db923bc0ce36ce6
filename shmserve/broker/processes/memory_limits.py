"""Memory limits of workers, enforced by control groups if possible, otherwise by polling; on GPUs always by polling.

Invariant: polling counts only private memory, not mapped tensors of other processes or files shared with other workers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from shmserve.broker.processes.cgroups import ControlGroup, ControlGroups
from shmserve.system import procfs

POLL_S = 1.0
NEAR_S = 0.1
"""Polling interval while a worker uses more than NEAR of its limit."""
NEAR = 0.75
SETTINGS = "--instance-memory-limit, memory_limit_mb"
GPU_SETTINGS = "--instance-gpu-memory-limit, gpu_memory_limit_mb"


class Watched(Struct):
    peer: int
    pid: int
    limit: int


class MemoryLimits:
    """Enforces the limits of all workers: one object for host memory, and one for GPU memory."""

    def __init__(
        self,
        loop: Any,
        kill: Callable[[int, str], None],
        used: Callable[[int], int] = procfs.own_bytes,
        groups: ControlGroups | None = None,
        what: str = "private memory",
        settings: str = SETTINGS,
    ) -> None:
        """`kill(peer, reason)` kills a worker that exceeds its limit. `used(pid)` returns its memory in bytes.

        `groups` None: always poll. `what` and `settings` name the kind of memory and its settings in error texts.
        """
        self._what = what
        self._settings = settings
        self._loop = loop
        self._kill = kill
        self._used = used
        self._watched: dict[int, Watched] = {}
        self._groups_of: dict[int, ControlGroup] = {}
        self._removing: list[ControlGroup] = []
        self._timer: Any = None
        self._groups = groups

    def group(self, peer: int, limit: int) -> ControlGroup | None:
        """Creates the control group for a worker that is about to start. None if it has no limit or is polled."""
        group = self._groups.make(peer, limit) if limit and self._groups is not None else None
        if group is not None:
            self._groups_of[peer] = group
        return group

    def started(self, peer: int, pid: int, limit: int) -> None:
        if limit and peer not in self._groups_of:
            self._watched[peer] = Watched(peer, pid, limit)
            self._arm(POLL_S)

    def ended(self, peer: int) -> str:
        """Stops watching the worker. Returns a reason if the kernel killed it for exceeding its limit; otherwise ""."""
        self._watched.pop(peer, None)
        group = self._groups_of.pop(peer, None)
        if group is None:
            return ""
        used_up = group.used_up()
        self._removing.append(group)
        self._tidy()
        return f"it exceeded its memory limit of {_mib(group.limit)} ({self._settings})" if used_up else ""

    def check(self) -> None:
        """Checks all polled workers, and retries the removal of old control groups."""
        near = False
        for worker in list(self._watched.values()):
            used = self._used(worker.pid)
            if used > worker.limit:
                del self._watched[worker.peer]
                text = f"it uses {_mib(used)} of {self._what}, limit {_mib(worker.limit)} ({self._settings})"
                self._kill(worker.peer, text)
            near |= used > worker.limit * NEAR
        self._tidy()
        if self._watched or self._removing:
            self._arm(NEAR_S if near else POLL_S)

    def _tidy(self) -> None:
        self._removing = [group for group in self._removing if not group.remove()]
        if self._removing:
            self._arm(POLL_S)

    def _arm(self, after: float) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(after, self._fire)

    def _fire(self) -> None:
        self._timer = None
        self.check()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _mib(count: int) -> str:
    return f"{count / (1 << 20):.0f} MiB"
