"""Measures the memory of workers for the memory budgets, and reports changes to the core.

Measures every LOADING_S while a worker loads, otherwise every POLL_S. A thread reads the values, as this takes
milliseconds for processes with much memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shmserve.broker.processes.reader import PeriodicReader
from shmserve.core.events import Measured
from shmserve.core.state import State
from shmserve.core.states import InstanceState
from shmserve.system import procfs

POLL_S = 2.0
LOADING_S = 0.05
MIN_CHANGE = 1 << 20
"""Smaller changes are not reported. This amount is therefore added to reported sizes."""
_Reading = tuple[dict[int, int], dict[int, tuple[int, int]]]
"""The workers' processes, and the size and peak of each."""


class MemoryMeter:
    def __init__(
        self,
        loop: Any,
        state: State,
        process_of: Callable[[int], int],
        used_on_gpu: Callable[[int], int],
        report: Callable[[Measured], None],
    ) -> None:
        """`process_of(peer)` returns the pid of a worker, or 0; `used_on_gpu(pid)` the last sample of its GPU
        memory."""
        self._state = state
        self._process_of = process_of
        self._used_on_gpu = used_on_gpu
        self._report = report
        self._reported: dict[int, tuple[Measured, bool]] = {}
        """Worker -> its last report, and whether it was READY then."""
        self._reader = PeriodicReader(loop, "memory-meter", self._begin, self._handle, self._pause)

    def measure(self) -> None:
        """Reads the memory of all workers now."""
        self._reader.read()

    def worker_started(self) -> None:
        """Starts to measure every LOADING_S, until the worker has loaded."""
        self._reader.read_later(LOADING_S)

    def close(self) -> None:
        self._reader.close()

    def _begin(self) -> Callable[[], _Reading]:
        pids = {peer: pid for peer in self._state.instances if (pid := self._process_of(peer))}
        self._reported = {peer: event for peer, event in self._reported.items() if peer in pids}
        return lambda: (pids, {peer: procfs.anonymous_bytes(pid) for peer, pid in pids.items()})

    def _pause(self) -> float:
        is_loading = any(instance.state is InstanceState.STARTING for _, instance in self._state.instances.values())
        return LOADING_S if is_loading else POLL_S

    def _handle(self, reading: _Reading) -> None:
        pids, sizes = reading
        shared = self._shared()
        for peer, (own, peak) in sizes.items():
            known = self._state.instances.get(peer)
            if known is None or not own:  # the worker has exited
                continue
            more = shared.get(peer, 0) + MIN_CHANGE
            on_gpu = known[1].spec.kind == "KIND_GPU"
            gpu = self._used_on_gpu(pids[peer]) if on_gpu else 0
            self._report_change(Measured(peer, own + more, peak + more, gpu), known[1].state is InstanceState.READY)

    def _shared(self) -> dict[int, int]:
        """Worker -> size of its segments in host memory."""
        sizes: dict[int, int] = {}
        for segment in self._state.ledger.segments.values():
            if not (segment.orphan or segment.on_device):
                sizes[segment.owner] = sizes.get(segment.owner, 0) + segment.size
        return sizes

    def _report_change(self, event: Measured, is_ready: bool) -> None:
        last, was_ready = self._reported.get(event.peer, (None, False))
        if last is None or is_ready != was_ready or _differs(last, event):
            self._reported[event.peer] = event, is_ready
            self._report(event)


def _differs(one: Measured, other: Measured) -> bool:
    return max(abs(one.host - other.host), other.peak - one.peak, abs(one.gpu - other.gpu)) >= MIN_CHANGE
