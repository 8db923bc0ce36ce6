"""Metrics of GPUs, from NVIDIA's management library. Values that a GPU does not support are omitted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from shmserve.repo.gpus import Gpu, in_mig_mode


class GpuSample(NamedTuple):
    """`uuid`: of the GPU or the MIG slice. `more`: the value of the metric's second label, if it has one."""

    name: str
    uuid: str
    value: float
    more: str = ""


SECOND_LABELS = {
    "shmserve_gpu_throttled": "reason",
    "shmserve_gpu_ecc_errors_total": "kind",
    "shmserve_gpu_xid_errors_total": "xid",
}
"""Metric -> its label besides gpu_uuid."""
REASONS = {
    0x04: "power_cap",
    0x08: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
}
"""nvmlClocksEventReason... -> the name of a reason for low clocks. Idle GPUs and configured clocks are no reasons."""
_SM, _MEMORY, _CORRECTED, _UNCORRECTED, _VOLATILE, _GPU_SENSOR = 1, 2, 0, 1, 0, 0
_MHZ = 1_000_000

Values = Iterable[tuple[float, str]]
"""(value, value of the second label)"""
Query = tuple[tuple[str, ...], Callable[[Any, Any], Values]]
"""Names of metrics, and the query that returns their values: one per name, or several for one name."""


def sample(nvml: Any, gpus: Sequence[Gpu]) -> list[GpuSample]:
    """Samples a whole GPU, or the slices of one GPU and then what they share."""
    samples: list[GpuSample] = []
    uuid = gpus[0].parent or gpus[0].uuid
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        for gpu in gpus:
            own = handle if not gpu.parent else nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
            _add(nvml, samples, gpu.uuid, own, _OF_EACH)
    except nvml.NVMLError:
        return samples  # the GPU was lost: its series end
    if not in_mig_mode(nvml, handle):  # the driver does not measure the utilization of slices
        _add(nvml, samples, uuid, handle, _OF_WHOLE)
    _add(nvml, samples, uuid, handle, _SHARED)
    return samples


def _add(nvml: Any, samples: list[GpuSample], uuid: str, handle: Any, queries: Iterable[Query]) -> None:
    for names, query in queries:
        try:
            values = list(query(nvml, handle))
        except (nvml.NVMLError, AttributeError):
            continue  # the GPU, the driver or the library does not support it
        if len(names) == 1:
            samples += [GpuSample(names[0], uuid, value, more) for value, more in values]
        else:
            samples += [GpuSample(name, uuid, value) for name, (value, _) in zip(names, values, strict=True)]


def _one(query: Callable[[Any, Any], float]) -> Callable[[Any, Any], Values]:
    return lambda nvml, handle: [(query(nvml, handle), "")]


def _memory(nvml: Any, handle: Any) -> Values:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return [(memory.total, ""), (memory.used, "")]


def _throttled(nvml: Any, handle: Any) -> Values:
    try:
        active = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    except (nvml.NVMLError, AttributeError):  # the name before R535
        active = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    return [(float(bool(active & bit)), name) for bit, name in REASONS.items()]


def _ecc(nvml: Any, handle: Any) -> Values:
    kinds = ((_CORRECTED, "corrected"), (_UNCORRECTED, "uncorrected"))
    return [(nvml.nvmlDeviceGetTotalEccErrors(handle, kind, _VOLATILE), name) for kind, name in kinds]


def _clock(function: str, domain: int) -> Callable[[Any, Any], Values]:
    return _one(lambda nvml, handle: getattr(nvml, function)(handle, domain) * _MHZ)


_OF_EACH: tuple[Query, ...] = ((("nv_gpu_memory_total_bytes", "nv_gpu_memory_used_bytes"), _memory),)
_OF_WHOLE: tuple[Query, ...] = (
    (("nv_gpu_utilization",), _one(lambda nvml, handle: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)),
)
_SHARED: tuple[Query, ...] = (
    (("nv_gpu_power_usage",), _one(lambda nvml, handle: nvml.nvmlDeviceGetPowerUsage(handle) / 1000)),
    (("nv_gpu_power_limit",), _one(lambda nvml, handle: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000)),
    (("nv_energy_consumption",), _one(lambda nvml, handle: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000)),
    (("shmserve_gpu_sm_clock_hertz",), _clock("nvmlDeviceGetClockInfo", _SM)),
    (("shmserve_gpu_sm_clock_max_hertz",), _clock("nvmlDeviceGetMaxClockInfo", _SM)),
    (("shmserve_gpu_memory_clock_hertz",), _clock("nvmlDeviceGetClockInfo", _MEMORY)),
    (("shmserve_gpu_memory_clock_max_hertz",), _clock("nvmlDeviceGetMaxClockInfo", _MEMORY)),
    (
        ("shmserve_gpu_temperature_celsius",),
        _one(lambda nvml, handle: nvml.nvmlDeviceGetTemperature(handle, _GPU_SENSOR)),
    ),
    (("shmserve_gpu_throttled",), _throttled),
    (("shmserve_gpu_ecc_errors_total",), _ecc),
    (("shmserve_gpu_pcie_replays_total",), _one(lambda nvml, handle: nvml.nvmlDeviceGetPcieReplayCounter(handle))),
)

_LISTS = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetMPSComputeRunningProcesses")


def process_memory(nvml: Any, gpus: Sequence[Gpu]) -> dict[int, int]:
    """GPU memory in bytes by pid, summed over GPUs and slices. A process that one of them lists twice, as with MPS,
    counts once."""
    totals: dict[int, int] = {}
    for gpu in gpus:
        here: dict[int, int] = {}
        for ask in _LISTS:
            try:
                listed = getattr(nvml, ask)(nvml.nvmlDeviceGetHandleByUUID(gpu.uuid))
            except (nvml.NVMLError, AttributeError):
                continue  # an old NVML, or a GPU that does not support this query
            for process in listed:
                here[process.pid] = max(here.get(process.pid, 0), process.usedGpuMemory or 0)
        for pid, used in here.items():
            totals[pid] = totals.get(pid, 0) + used
    return totals
