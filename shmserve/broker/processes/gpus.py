"""A thread that samples GPU metrics and the GPU memory of processes, by default every two seconds.

Invariant: `text` and `used_by` never wait for the driver. Metrics that a GPU does not support are omitted.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

from shmserve.broker.observability.metric_definitions import Page, labels
from shmserve.repo.gpus import Gpu

INTERVAL_S = 2.0
JOIN_TIMEOUT_S = 2.0

Sample = tuple[str, str, float]
"""(name of the metric, UUID of the GPU, value)"""


class GpuMetrics:
    """The sampling thread and its last samples. Without GPUs, `start` and `close` do nothing."""

    def __init__(self, gpus: Sequence[Gpu], shown: bool = True, interval_s: float = INTERVAL_S) -> None:
        """`shown`: whether to sample metrics, which `used_by` does not need."""
        self._gpus = gpus
        self._shown = shown
        self._process_memory_used = False
        self._used: dict[int, int] = {}
        self._interval_s = interval_s
        self._samples: list[Sample] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._nvml: Any = None

    def start(self) -> None:
        """Takes the first samples, then starts the thread."""
        if not self._gpus:
            return
        self._nvml = importlib.import_module("pynvml")
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError:
            self._nvml = None
            return  # NVML worked during discovery, but fails now: serve without GPU metrics
        self._update()
        self._thread = threading.Thread(target=self._run, name="gpu-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(JOIN_TIMEOUT_S)
            if self._thread.is_alive():
                return  # do not wait for a driver that does not respond
            self._thread = None
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
            self._nvml = None

    def text(self) -> str:
        """The last samples, in Prometheus format."""
        page = Page()
        for name, uuid, value in self._samples:
            page.add(name, value, labels(("gpu_uuid",), (uuid,)))
        return page.text()

    def document(self) -> list[dict[str, Any]]:
        """The last samples by GPU. Values that a GPU does not report are None."""
        entries = {
            gpu.uuid: {"number": gpu.number, "uuid": gpu.uuid, "name": gpu.name, **dict.fromkeys(_SHOWN.values())}
            for gpu in self._gpus
        }
        for name, uuid, value in self._samples:
            if name in _SHOWN:
                entries[uuid][_SHOWN[name]] = value
        return list(entries.values())

    def used_by(self, pid: int) -> int:
        """The process's memory on all GPUs in the last sample, in bytes. The first call enables this sampling and
        returns 0."""
        self._process_memory_used = True
        return self._used.get(pid, 0)

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            self._update()

    def _update(self) -> None:
        if self._shown:
            self._samples = self._sample()
        if self._process_memory_used:
            self._used = self._processes()

    def _processes(self) -> dict[int, int]:
        """GPU memory in bytes by pid, summed over GPUs. A process that a GPU lists twice, as with MPS, counts once."""
        nvml, totals = self._nvml, dict[int, int]()
        for gpu in self._gpus:
            here: dict[int, int] = {}
            for ask in _LISTS:
                try:
                    listed = getattr(nvml, ask)(nvml.nvmlDeviceGetHandleByIndex(gpu.ordinal))
                except (nvml.NVMLError, AttributeError):
                    continue  # an old NVML, or a GPU that does not support this query
                for process in listed:
                    here[process.pid] = max(here.get(process.pid, 0), process.usedGpuMemory or 0)
            for pid, used in here.items():
                totals[pid] = totals.get(pid, 0) + used
        return totals

    def _sample(self) -> list[Sample]:
        nvml, samples = self._nvml, []
        for gpu in self._gpus:
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(gpu.ordinal)
            except nvml.NVMLError:
                continue  # the GPU was lost: its series ends
            for names, ask in _QUESTIONS:
                try:
                    values = ask(nvml, handle)
                except nvml.NVMLError:
                    continue  # not every GPU supports every query
                samples += [(name, gpu.uuid, value) for name, value in zip(names, values, strict=True)]
        return samples


def _memory(nvml: Any, handle: Any) -> tuple[float, ...]:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return memory.total, memory.used


_SHOWN = {
    "nv_gpu_utilization": "utilization",
    "nv_gpu_memory_total_bytes": "memory_bytes",
    "nv_gpu_memory_used_bytes": "memory_used_bytes",
    "nv_gpu_power_usage": "power_watts",
    "nv_gpu_power_limit": "power_limit_watts",
}
"""Metric -> its key in `document`."""
_LISTS = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetMPSComputeRunningProcesses")
_QUESTIONS: tuple[tuple[tuple[str, ...], Callable[[Any, Any], tuple[float, ...]]], ...] = (
    (("nv_gpu_utilization",), lambda nvml, handle: (nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,)),
    (("nv_gpu_memory_total_bytes", "nv_gpu_memory_used_bytes"), _memory),
    (("nv_gpu_power_usage",), lambda nvml, handle: (nvml.nvmlDeviceGetPowerUsage(handle) / 1000,)),
    (("nv_gpu_power_limit",), lambda nvml, handle: (nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,)),
    (("nv_energy_consumption",), lambda nvml, handle: (nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000,)),
)
