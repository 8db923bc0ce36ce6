"""The state of a whole GPU as the driver reports it, and what an operator has to do about it. Read-only.

Invariant: a query that a GPU or a driver does not support is never a problem.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

from shmserve.repo.gpus import Gpu

_LOST = {6: "the driver no longer lists it", 15: "the driver has lost it", 16: "the driver requires a reset"}
"""NVML_ERROR_NOT_FOUND, NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED."""
_RECOVERY_ACTION = 230
"""NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, which recent drivers know."""
_UNCORRECTED, _VOLATILE = 1, 0
RESET = "reset it (nvidia-smi --gpu-reset -i {pci})"
REBOOT = "reboot the machine; if that does not help, replace the GPU"
REPLACE = "replace the GPU, its spare memory is used up"
NO_ACTION, DRAIN_AND_RESET = 0, 4
_ACTIONS = {
    1: ("the driver recommends a reset", RESET),
    2: ("the driver recommends a reboot", REBOOT),
    3: ("the driver recommends ending all peer-to-peer traffic", "end all programs on its NVLink peers, then " + RESET),
    5: ("the driver recommends a reset of its bus (R580) or a recovery of its IMEX domain (from R610 on)", REBOOT),
    6: ("the driver recommends a reset of its bus", REBOOT),
    7: ("the driver recommends a reboot", REBOOT),
}
"""NVML_GPU_RECOVERY_ACTION_... -> what the driver recommends, and the fix. DRAIN_AND_RESET is not among them: the GPU
still works, with less capacity. NVIDIA has changed the meaning of 5."""

T = TypeVar("T")


class GpuProblem(NamedTuple):
    """`fix`: what an operator has to do; {pci} stands for the PCI address of the GPU."""

    what: str
    fix: str


class GpuState(NamedTuple):
    """`lost`: why the driver does not answer queries about the GPU, "" if it does. `action`: the recovery action that
    the driver recommends, None if the driver does not know this. `uncorrected`, `energy`: counters that a reset clears,
    -1 if unsupported."""

    lost: str = ""
    action: int | None = None
    repair_failed: bool = False
    """Defective memory could not be replaced with spare memory."""
    repair_pending: bool = False
    """Defective memory is replaced with spare memory at the next reset."""
    uncorrected: int = -1
    energy: float = -1

    @property
    def problem(self) -> GpuProblem | None:
        """Why the GPU must not be used. None: it may."""
        if self.lost:
            return GpuProblem(self.lost, REBOOT if "reset" not in self.lost else RESET)
        if self.action in _ACTIONS:
            return GpuProblem(*_ACTIONS[self.action])
        if self.repair_failed:
            return GpuProblem("defective memory could not be remapped", REPLACE)
        return None

    @property
    def needs_reset(self) -> str:
        """Why the GPU should be reset when convenient, although it works."""
        if self.repair_pending:
            return "defective memory is remapped at the next reset"
        return "it runs at reduced capacity until it is reset" if self.action == DRAIN_AND_RESET else ""


class _Lost(Exception):
    pass


def read_state(nvml: Any, uuid: str) -> GpuState:
    """Queries the driver, which may block if the GPU does not respond."""
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError as error:
        return GpuState(_LOST.get(error.value, ""))
    try:
        action = _ask(nvml, lambda: _action(nvml, handle))
        rows = _ask(nvml, lambda: nvml.nvmlDeviceGetRemappedRows(handle))
        pages = _ask(nvml, lambda: nvml.nvmlDeviceGetRetiredPagesPendingStatus(handle))
        errors = _ask(nvml, lambda: nvml.nvmlDeviceGetTotalEccErrors(handle, _UNCORRECTED, _VOLATILE))
        energy = _ask(nvml, lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
    except _Lost as error:
        return GpuState(str(error))
    _, _, pending, failed = rows or (0, 0, 0, 0)
    return GpuState(
        "",
        action,
        bool(failed),
        bool(pending or pages),
        -1 if errors is None else int(errors),
        -1 if energy is None else float(energy),
    )


def read_states(gpus: Iterable[Gpu]) -> dict[str, GpuState]:
    """The states of these GPUs by the UUID of the whole GPU; empty without the library, as `gpus.discover` explains."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return {}
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return {}
    try:
        return {uuid: read_state(nvml, uuid) for uuid in dict.fromkeys(gpu.parent or gpu.uuid for gpu in gpus)}
    finally:
        nvml.nvmlShutdown()


def _ask(nvml: Any, query: Callable[[], T]) -> T | None:
    """None if the GPU, the driver or the library does not support the query."""
    try:
        return query()
    except nvml.NVMLError as error:
        if error.value in (15, 16):
            raise _Lost(_LOST[error.value]) from None
        return None
    except AttributeError:
        return None


def _action(nvml: Any, handle: Any) -> int | None:
    (value,) = nvml.nvmlDeviceGetFieldValues(handle, [_RECOVERY_ACTION])
    return int(value.value.uiVal) if value.nvmlReturn == 0 else None
