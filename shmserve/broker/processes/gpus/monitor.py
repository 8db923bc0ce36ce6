"""A thread that samples GPU metrics and the GPU memory of processes, by default every two seconds, and watches the
health of the GPUs.

Invariants: only the thread waits for the driver, except that `start` waits for the first samples. While a GPU is out
of service, the library is open only during a sample, because a GPU can be reset only if no process has it open.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from shmserve.broker.observability.metric_definitions import GPU, Page, labels
from shmserve.broker.processes.gpus import xids
from shmserve.broker.processes.gpus.health import GpuHealth
from shmserve.broker.processes.gpus.samples import SECOND_LABELS, GpuSample, process_memory, sample
from shmserve.repo.gpu_state import read_state
from shmserve.repo.gpus import SHOWN_METRICS, Gpu, text_of

INTERVAL_S = 2.0
RECHECK = 5
"""How many intervals pass between two samples while a GPU is out of service."""
STUCK_S = 30.0
"""A GPU is out of service if the driver has not answered a query about it for this time."""
SLICE_MS = 500
"""Longest wait for errors before the thread checks whether it must stop."""
MAX_PENDING = 64
"""How many Xids are read before the library is closed."""
JOIN_TIMEOUT_S = 2.0
_TIMEOUT = 10  # NVML_ERROR_TIMEOUT
_XID_EVENT = 8  # nvmlEventTypeXidCriticalError

log = logging.getLogger("shmserve")

Report = Callable[[int, str], None]
"""Called by the threads with the number of a GPU, and why it is out of service; "": it is in service again."""


class _Watched:
    """A whole GPU, and what the server uses of it: the GPU itself, or slices."""

    def __init__(self, gpus: Sequence[Gpu], fixes: dict[int, str]) -> None:
        self.gpus = gpus
        self.uuid = gpus[0].parent or gpus[0].uuid
        self.health = GpuHealth(gpus[0].pci, fixes)
        self.samples: list[GpuSample] = []
        self.needed_reset = ""
        self.handle: Any = None
        """The library's handle with which its errors were requested."""

    @property
    def title(self) -> str:
        numbers = ", ".join(str(gpu.number) for gpu in self.gpus)
        return f"GPU {numbers}" if not self.gpus[0].parent else f"GPU {numbers} (MIG slices of {self.uuid})"


class GpuMonitor:
    """The thread and its last samples. Without GPUs, `start` and `close` do nothing."""

    def __init__(
        self,
        gpus: Sequence[Gpu],
        shown: bool = True,
        interval_s: float = INTERVAL_S,
        report: Report | None = None,
        rules: Iterable[tuple[int, str]] = (),
    ) -> None:
        """`shown`: whether to sample metrics, which `used_by` does not need. `report`: None to ignore the health of
        GPUs. `rules`: changes to the fatal Xids."""
        self._gpus = gpus
        self._shown = shown
        self._interval_s = interval_s
        self._report = report
        fixes = xids.fixes(rules)
        groups: dict[str, list[Gpu]] = {}
        for gpu in gpus:
            groups.setdefault(gpu.parent or gpu.uuid, []).append(gpu)
        self._watched = [_Watched(group, fixes) for group in groups.values()]
        self._process_memory_used = False
        self._used: dict[int, int] = {}
        self._xids: Counter[tuple[str, int]] = Counter()
        self._reported: dict[int, str] = {}
        self._lock = threading.Lock()
        """Guards `_reported` and the health of GPUs, which both threads change."""
        self._asked: tuple[_Watched, float] | None = None
        """The GPU for which a query is running, and since when."""
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._nvml: Any = None
        self._is_open = False
        self._events: Any = None
        """The library's set of events to wait for. None: not open, not supported, or failed."""
        self._events_failed = False
        """The wait for events has failed since the library was opened."""

    # ------------------------------------------------------------------------------------ the broker's side

    def start(self) -> None:
        """Takes the first samples, then starts the threads."""
        if not self._gpus:
            return
        self._nvml = importlib.import_module("pynvml")
        if not self._open():
            self._nvml = None
            return  # NVML worked during discovery, but fails now: serve without GPU metrics
        self._update()
        self._start_thread("gpu-metrics", self._run)
        if self._report is not None:
            self._start_thread("gpu-watchdog", self._watch)

    def _start_thread(self, name: str, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        self._stop.set()
        for thread in list(self._threads):
            thread.join(JOIN_TIMEOUT_S)
            if thread.is_alive():
                return  # do not wait for a driver that does not respond
            self._threads.remove(thread)
        self._close_library()

    def out_of_service(self) -> dict[int, str]:
        """The numbers of the GPUs that are out of service, with the reasons."""
        with self._lock:
            return {number: reason for number, reason in self._reported.items() if reason}

    def text(self) -> str:
        """The last samples, in Prometheus format."""
        page = Page()
        for one in self._all_samples():
            names = (*GPU, SECOND_LABELS[one.name]) if one.name in SECOND_LABELS else GPU
            values = (one.uuid, one.more) if one.name in SECOND_LABELS else (one.uuid,)
            page.add(one.name, one.value, labels(names, values))
        return page.text()

    def document(self) -> list[dict[str, Any]]:
        """The last samples by GPU. Values that a GPU does not report are None."""
        reasons = self.out_of_service()
        entries: dict[str, dict[str, Any]] = {
            gpu.uuid: {
                "number": gpu.number,
                "uuid": gpu.uuid,
                "name": gpu.name,
                **dict.fromkeys(SHOWN_METRICS.values()),
                "throttled": [],
                "out_of_service": reasons.get(gpu.number, ""),
            }
            for gpu in self._gpus
        }
        for one in self._all_samples():
            entry = entries.get(one.uuid)
            if entry is None:  # a whole GPU, of which the server uses slices
                continue
            if one.name in SHOWN_METRICS:
                entry[SHOWN_METRICS[one.name]] = one.value
            elif one.name == "shmserve_gpu_throttled" and one.value:
                entry["throttled"].append(one.more)
        return list(entries.values())

    def used_by(self, pid: int) -> int:
        """The process's memory on all GPUs in the last sample, in bytes. The first call enables this sampling and
        returns 0."""
        self._process_memory_used = True
        return self._used.get(pid, 0)

    def _all_samples(self) -> list[GpuSample]:
        if not self._shown:
            return []
        samples = [one for watched in self._watched for one in watched.samples]
        if self._report is not None and self._nvml is not None:
            reasons = self.out_of_service()
            for gpu in self._gpus:
                samples.append(GpuSample("shmserve_gpu_out_of_service", gpu.uuid, float(gpu.number in reasons)))
            for watched in self._watched:
                needed = float(bool(watched.health.needs_reset))
                samples.append(GpuSample("shmserve_gpu_reset_needed", watched.uuid, needed))
        samples += [
            GpuSample("shmserve_gpu_xid_errors_total", uuid, count, str(xid))
            for (uuid, xid), count in sorted(self._xids.items())
        ]
        return samples

    # ------------------------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._is_open:
                self._wait(self._interval_s)
            else:
                self._stop.wait(RECHECK * self._interval_s)
            if not self._stop.is_set() and (self._is_open or self._open()):
                self._update()

    def _open(self) -> bool:
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError:
            return False  # the driver is being reloaded, or a GPU reset
        self._is_open = True
        self._events_failed = False
        if self._report is not None:
            self._register()
        return True

    def _register(self) -> None:
        nvml = self._nvml
        try:
            self._events = nvml.nvmlEventSetCreate()
        except nvml.NVMLError:
            return  # not supported
        for watched in self._watched:
            try:
                handle = nvml.nvmlDeviceGetHandleByUUID(watched.uuid)
                nvml.nvmlDeviceRegisterEvents(handle, _XID_EVENT, self._events)
                watched.handle = handle
            except nvml.NVMLError:
                continue  # lost, or too old: its state is still read

    def _close_library(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._free_events()
        try:
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError as error:
            log.warning("cannot close NVIDIA's management library: %s", error)

    def _free_events(self) -> None:
        events, self._events = self._events, None
        try:
            if events is not None:
                self._nvml.nvmlEventSetFree(events)
        except self._nvml.NVMLError as error:
            log.warning("cannot free a set of events of NVIDIA's management library: %s", error)

    def _wait(self, interval_s: float) -> None:
        """Waits for the next sample. An Xid that may take a GPU out of service ends the wait, and so does an error of
        it; then the next wait lasts the whole interval, and requests events again."""
        until = time.monotonic() + interval_s
        while not self._stop.is_set() and (remaining := until - time.monotonic()) > 0:
            if self._events is None:
                self._stop.wait(remaining)
                if self._events_failed and not self._stop.is_set():
                    self._register()
                return
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._events, max(1, min(SLICE_MS, int(remaining * 1000))))
            except self._nvml.NVMLError as error:
                if error.value == _TIMEOUT:
                    continue
                if not self._events_failed:
                    log.warning("waiting for Xids of GPUs failed, and is tried again every %g s: %s", interval_s, error)
                self._events_failed = True
                self._free_events()
                return  # probably a GPU was lost
            if event.eventType == _XID_EVENT and self._happened(event.device, int(event.eventData)):
                return

    def _happened(self, device: Any, xid: int) -> bool:
        """Handles an Xid. True: read the state of the GPUs now."""
        watched = self._find(device)
        if watched is None:
            log.error("%s on a GPU that the driver does not identify", xids.title(xid))
            return True
        self._xids[watched.uuid, xid] += 1
        with self._lock:
            is_fatal = watched.health.happened(xid, time.monotonic())
        if is_fatal:
            self._publish(watched)
        else:
            log.warning(
                "%s on %s: it affects at most the process that caused it, which the kernel's log names",
                xids.title(xid),
                watched.title,
            )
        return is_fatal or xid == xids.RECOVERY_ACTION_CHANGED

    def _find(self, device: Any) -> _Watched | None:
        """The GPU with this handle. The driver does not report the UUID of a GPU that it has lost."""
        try:
            uuid = text_of(self._nvml.nvmlDeviceGetUUID(device))
        except self._nvml.NVMLError:
            return next((one for one in self._watched if _address(one.handle) == _address(device)), None)
        return next((one for one in self._watched if one.uuid == uuid), None)

    def _update(self) -> None:
        used: Counter[int] = Counter()
        for watched in self._watched:
            self._asked = (watched, time.monotonic())
            if self._shown:
                watched.samples = sample(self._nvml, watched.gpus)
            if self._report is not None:
                self._observe(watched)
            if self._process_memory_used:
                used.update(process_memory(self._nvml, watched.gpus))
            self._asked = None
        self._used = used
        if any(watched.health.has_failed for watched in self._watched):
            self._take_pending()
            self._close_library()

    def _take_pending(self) -> None:
        """Handles the Xids that arrived during the sampling, which the library forgets when it is closed."""
        for _ in range(MAX_PENDING if self._events is not None else 0):
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._events, 1)
            except self._nvml.NVMLError:
                return  # there are no others, or a GPU was lost
            if event.eventType == _XID_EVENT:
                self._happened(event.device, int(event.eventData))

    def _observe(self, watched: _Watched) -> None:
        state = read_state(self._nvml, watched.uuid)
        with self._lock:
            watched.health.observe(state, time.monotonic())
        needed = state.needs_reset
        if needed and needed != watched.needed_reset:
            log.warning("%s should be reset when convenient: %s", watched.title, needed)
        watched.needed_reset = needed
        self._publish(watched)

    # ------------------------------------------------------------------------------------ reports

    def _publish(self, watched: _Watched) -> None:
        """Reports the GPU, or each of its slices, if its health has changed."""
        if self._report is None or self._stop.is_set():
            return
        with self._lock:
            why = watched.health.reason
            reasons = {gpu.number: f"GPU {gpu.number} is out of service: {why}" if why else "" for gpu in watched.gpus}
            changed = {number: text for number, text in reasons.items() if self._reported.get(number, "") != text}
            self._reported |= changed
        for number, text in changed.items():
            self._report(number, text)

    def _watch(self) -> None:
        """The watchdog: a driver that does not answer about one GPU blocks the other thread."""
        while not self._stop.wait(STUCK_S / 3):
            self._check_answers(time.monotonic())

    def _check_answers(self, now: float) -> None:
        asked = self._asked
        if asked is not None and now - asked[1] >= STUCK_S:
            watched, _ = asked
            with self._lock:
                watched.health.does_not_answer(STUCK_S)
            self._publish(watched)
            for other in self._watched:
                other.samples = []  # they are no longer current


def _address(handle: Any) -> Any:
    """What a handle of the library points to."""
    is_pointer = isinstance(handle, ctypes._Pointer)
    return ctypes.cast(handle, ctypes.c_void_p).value if is_pointer else handle
