"""The management library of NVIDIA's driver, for the devices that STANDIN_GPUS describes as JSON.

Each is an object with uuid, pci, and other values that differ from the defaults; `missing` lists calls that fail.
"""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any

_DEFAULTS: dict[str, Any] = {
    "name": "Stand-in", "total": 80 << 30, "used": 1 << 30, "utilization": 25, "power": 120_500, "limit": 700_000,
    "energy": 1_234_567, "capability": [9, 0], "missing": [], "mig": 0,
}  # fmt: skip
_started = 0


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__("not supported" if value == 3 else "driver not loaded")
        self.value = value


def nvmlInit() -> None:
    global _started
    if "STANDIN_GPUS" not in os.environ:
        raise NVMLError(9)
    _started += 1


def nvmlShutdown() -> None:
    global _started
    _started -= 1


def _all() -> list[dict[str, Any]]:
    assert _started > 0
    found: list[dict[str, Any]] = json.loads(os.environ["STANDIN_GPUS"])
    return [_DEFAULTS | one for one in found]


def _one(handle: int, what: str) -> Any:
    device = _all()[handle]
    if what in device["missing"]:
        raise NVMLError(3)
    return device[what]


def nvmlDeviceGetCount() -> int:
    return len(_all())


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    return index


def nvmlDeviceGetUUID(handle: int) -> str:
    return str(_one(handle, "uuid"))


def nvmlDeviceGetName(handle: int) -> str:
    return str(_one(handle, "name"))


def nvmlDeviceGetPciInfo(handle: int) -> Any:
    return SimpleNamespace(busId=_one(handle, "pci"))


def nvmlDeviceGetComputeRunningProcesses(handle: int) -> list[Any]:
    """The processes in the file that STANDIN_PROCESSES names: a JSON object uuid -> pid -> bytes."""
    place = os.environ.get("STANDIN_PROCESSES", "")
    if not place or not os.path.exists(place):
        return []
    with open(place) as file:
        found = json.load(file).get(_one(handle, "uuid"), {})
    return [SimpleNamespace(pid=int(pid), usedGpuMemory=used) for pid, used in found.items()]


def nvmlDeviceGetMemoryInfo(handle: int) -> Any:
    return SimpleNamespace(total=_one(handle, "total"), used=_one(handle, "used"))


def nvmlDeviceGetUtilizationRates(handle: int) -> Any:
    return SimpleNamespace(gpu=_one(handle, "utilization"))


def nvmlDeviceGetPowerUsage(handle: int) -> int:
    return int(_one(handle, "power"))


def nvmlDeviceGetEnforcedPowerLimit(handle: int) -> int:
    return int(_one(handle, "limit"))


def nvmlDeviceGetTotalEnergyConsumption(handle: int) -> int:
    return int(_one(handle, "energy"))


def nvmlSystemGetDriverVersion() -> str:
    assert _started > 0
    return "580.65"


def nvmlSystemGetCudaDriverVersion() -> int:
    assert _started > 0
    return 13000
