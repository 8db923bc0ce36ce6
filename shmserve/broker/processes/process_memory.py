"""The memory of workers as shown to users: proportional (PSS), as instances share mapped weights and forked pages.

The kernel visits every page of a process to compute it, which takes milliseconds for large processes. Therefore a
thread measures a worker when its model has loaded, and then rarely: at most for SHARE of the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from msgspec import Struct

from shmserve.broker.processes.reader import PeriodicReader
from shmserve.system import procfs

INTERVAL_S = 10.0
"""Minimum time between two measurements of a process."""
PASS_S = INTERVAL_S / 2
"""Minimum time between two looks at all processes."""
SHARE = 0.01


class _Measured(Struct):
    size: int
    took_s: float
    at: float


class ProcessMemory:
    """`pids` returns the processes to measure."""

    def __init__(self, loop: Any, pids: Callable[[], Collection[int]]) -> None:
        self._pids = pids
        self._measured: dict[int, _Measured] = {}
        self._loaded: list[int] = []
        self._pass_at = time.monotonic() + PASS_S
        """When all processes are looked at again; until then only those that have loaded."""
        self._reader = PeriodicReader(loop, "process-memory", self._begin, self._handle, lambda: INTERVAL_S)

    def bytes_of(self, pid: int) -> int:
        """The last measured size; the resident memory, an upper bound, of a process that has not been measured."""
        known = self._measured.get(pid)
        return known.size if known is not None else procfs.usage(pid).resident_bytes

    def loaded(self, pid: int) -> None:
        """Measures a worker that has loaded its model."""
        self._loaded.append(pid)
        self._reader.read()

    def close(self) -> None:
        self._reader.close()

    def _begin(self) -> Callable[[], dict[int, _Measured]] | None:
        now = time.monotonic()
        loaded, self._loaded = self._loaded, []
        if now < self._pass_at:
            return partial(_read, loaded) if loaded else None
        self._pass_at = now + PASS_S
        pids = self._pids()
        self._measured = {pid: known for pid, known in self._measured.items() if pid in pids and pid not in loaded}
        pause = max(INTERVAL_S, sum(known.took_s for known in self._measured.values()) / SHARE)
        due = [pid for pid in pids if (known := self._measured.get(pid)) is None or known.at + pause <= now]
        return partial(_read, due) if due else None

    def _handle(self, measured: dict[int, _Measured]) -> None:
        self._measured |= measured


def _read(pids: list[int]) -> dict[int, _Measured]:
    measured: dict[int, _Measured] = {}
    for pid in pids:
        began = time.monotonic()
        size = procfs.proportional_bytes(pid)
        ended = time.monotonic()
        if size:
            measured[pid] = _Measured(size, ended - began, ended)
    return measured
