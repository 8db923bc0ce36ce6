"""The management library of NVIDIA's driver, for the devices that STANDIN_GPUS describes as JSON.

Each is an object with uuid, pci, and other values that differ from the defaults; `missing` lists calls that fail, `mig`
the slices of a GPU in MIG mode. The file that STANDIN_GPU_STATES names changes values while a program runs: a JSON
object uuid -> values, where `lost` is the error code of all calls. STANDIN_XIDS names a FIFO for lines `uuid xid`.
"""

from __future__ import annotations

import json
import os
import select
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

_DEFAULTS: dict[str, Any] = {
    "name": "Stand-in", "total": 80 << 30, "used": 1 << 30, "utilization": 25, "power": 120_500, "limit": 700_000,
    "energy": 1_234_567, "capability": [9, 0], "missing": [], "mig": [], "lost": 0, "action": 0,
    "rows": [0, 0, 0, 0], "pages": 0, "corrected": 0, "uncorrected": 0, "reasons": 0, "sm": 1980, "memory": 2619,
    "temperature": 41, "replays": 0,
}  # fmt: skip
_SLOTS = 7
_started = 0
_lock = threading.Lock()
Handle = tuple[int, int]
"""Index of the GPU, and number of the slice; -1: the whole GPU."""


_TEXTS = {3: "not supported", 6: "not found", 10: "timeout", 15: "GPU is lost", 16: "GPU requires restart"}


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(_TEXTS.get(value, "driver not loaded"))
        self.value = value


def nvmlInit() -> None:
    global _started
    if "STANDIN_GPUS" not in os.environ:
        raise NVMLError(9)
    with _lock:
        _started += 1


def nvmlShutdown() -> None:
    global _started
    with _lock:
        _started -= 1


def _all() -> list[dict[str, Any]]:
    assert _started > 0
    found: list[dict[str, Any]] = json.loads(os.environ["STANDIN_GPUS"])
    return [_DEFAULTS | one | _states().get(one["uuid"], {}) for one in found]


def _states() -> dict[str, Any]:
    place = os.environ.get("STANDIN_GPU_STATES", "")
    if not place or not os.path.exists(place):
        return {}
    with open(place) as file:
        found: dict[str, Any] = json.load(file)
    return found


def _one(handle: Handle, what: str) -> Any:
    index, part = handle
    device = _all()[index]
    if device["lost"]:
        raise NVMLError(device["lost"])
    if part >= 0:
        device = device | {"missing": ["utilization", "power", "pci", "reasons", "sm"]} | device["mig"][part]
    if what in device["missing"] or (what == "utilization" and device["mig"]):
        raise NVMLError(3)
    return device[what]


def nvmlDeviceGetCount() -> int:
    return len(_all())


def nvmlDeviceGetHandleByIndex(index: int) -> Handle:
    return index, -1


def nvmlDeviceGetHandleByUUID(uuid: str) -> Handle:
    for index, device in enumerate(_all()):
        for part, one in enumerate([device, *device["mig"]], -1):
            if one["uuid"] == uuid:
                _one((index, part), "uuid")
                return index, part
    raise NVMLError(6)


def nvmlDeviceGetMigMode(handle: Handle) -> list[int]:
    return [int(bool(_one(handle, "mig")))] * 2


def nvmlDeviceGetMaxMigDeviceCount(handle: Handle) -> int:
    return _SLOTS


def nvmlDeviceGetMigDeviceHandleByIndex(handle: Handle, index: int) -> Handle:
    """The slices have the numbers 0, 2, 4 ..."""
    if index % 2 or index // 2 >= len(_one(handle, "mig")):
        raise NVMLError(6)
    return handle[0], index // 2


def _reading(what: str, kind: Callable[[Any], Any] = int) -> Callable[[Handle], Any]:
    return lambda handle: kind(_one(handle, what))


nvmlDeviceGetUUID, nvmlDeviceGetName = _reading("uuid", str), _reading("name", str)
nvmlDeviceGetPowerUsage = _reading("power")
nvmlDeviceGetEnforcedPowerLimit = _reading("limit")
nvmlDeviceGetTotalEnergyConsumption = _reading("energy")
nvmlDeviceGetCurrentClocksEventReasons = _reading("reasons")
nvmlDeviceGetPcieReplayCounter = _reading("replays")
nvmlDeviceGetRetiredPagesPendingStatus = _reading("pages")
nvmlDeviceGetRemappedRows = _reading("rows", tuple)


def nvmlDeviceGetPciInfo(handle: Handle) -> Any:
    return SimpleNamespace(busId=_one(handle, "pci"))


def nvmlDeviceGetComputeRunningProcesses(handle: Handle) -> list[Any]:
    """The processes in the file that STANDIN_PROCESSES names: a JSON object uuid -> pid -> bytes."""
    place = os.environ.get("STANDIN_PROCESSES", "")
    if not place or not os.path.exists(place):
        return []
    with open(place) as file:
        found = json.load(file).get(_one(handle, "uuid"), {})
    return [SimpleNamespace(pid=int(pid), usedGpuMemory=used) for pid, used in found.items()]


def nvmlDeviceGetMemoryInfo(handle: Handle) -> Any:
    return SimpleNamespace(total=_one(handle, "total"), used=_one(handle, "used"))


def nvmlDeviceGetUtilizationRates(handle: Handle) -> Any:
    return SimpleNamespace(gpu=_one(handle, "utilization"))


def nvmlDeviceGetClockInfo(handle: Handle, domain: int) -> int:
    return int(_one(handle, {1: "sm", 2: "memory"}[domain]))


def nvmlDeviceGetMaxClockInfo(handle: Handle, domain: int) -> int:
    _one(handle, "sm")
    return {1: 1980, 2: 2619}[domain]


def nvmlDeviceGetTemperature(handle: Handle, sensor: int) -> int:
    assert sensor == 0
    return int(_one(handle, "temperature"))


def nvmlDeviceGetTotalEccErrors(handle: Handle, kind: int, counter: int) -> int:
    assert counter == 0, "volatile"
    return int(_one(handle, {0: "corrected", 1: "uncorrected"}[kind]))


def nvmlDeviceGetFieldValues(handle: Handle, fields: list[int]) -> list[Any]:
    assert fields == [230]
    action = _one(handle, "action")
    code = 3 if action is None else 0
    return [SimpleNamespace(nvmlReturn=code, value=SimpleNamespace(uiVal=action or 0))]


class _Events:
    def __init__(self) -> None:
        place = os.environ.get("STANDIN_XIDS", "")
        self.fifo = os.open(place, os.O_RDWR | os.O_NONBLOCK) if place else -1
        self.registered: set[Handle] = set()
        self.lines: list[str] = []


def nvmlEventSetCreate() -> _Events:
    return _Events()


def nvmlDeviceRegisterEvents(handle: Handle, types: int, events: _Events) -> None:
    assert types == 8
    assert handle[1] < 0, "only whole GPUs report events"
    _one(handle, "uuid")
    events.registered.add(handle)


def nvmlEventSetWait_v2(events: _Events, timeout_ms: int) -> Any:
    if not events.lines:
        readable, _, _ = select.select([events.fifo] if events.fifo >= 0 else [], [], [], timeout_ms / 1000)
        if not readable:
            raise NVMLError(10)
        events.lines = os.read(events.fifo, 4096).decode().splitlines()
    uuid, xid = events.lines.pop(0).split()
    device = next(handle for handle in events.registered if _all()[handle[0]]["uuid"] == uuid)
    return SimpleNamespace(device=device, eventType=8, eventData=int(xid), gpuInstanceId=-1, computeInstanceId=-1)


def nvmlEventSetFree(events: _Events) -> None:
    if events.fifo >= 0:
        os.close(events.fifo)


def nvmlSystemGetDriverVersion() -> str:
    assert _started > 0
    return "580.65"


def nvmlSystemGetCudaDriverVersion() -> int:
    assert _started > 0
    return 13000
