"""The GPUs that models may use, as listed by NVIDIA's driver.

Read-only. Without the driver, its library or the package nvidia-ml-py there are no GPUs, and `Gpus.why` has the reason.
CUDA_VISIBLE_DEVICES selects and orders GPUs as for any CUDA program.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shmserve.extras import install_command

VISIBLE = "CUDA_VISIBLE_DEVICES"
CREATE_SLICES = "create some (nvidia-smi mig -cgi PROFILE -C) or end MIG mode (nvidia-smi -mig 0)"
CONTROL = Path("/dev/nvidiactl")
"""Exists if the driver is loaded."""
SHOWN_METRICS = {
    "nv_gpu_utilization": "utilization",
    "nv_gpu_memory_total_bytes": "memory_bytes",
    "nv_gpu_memory_used_bytes": "memory_used_bytes",
    "nv_gpu_power_usage": "power_watts",
    "nv_gpu_power_limit": "power_limit_watts",
    "shmserve_gpu_sm_clock_hertz": "sm_clock_hertz",
    "shmserve_gpu_sm_clock_max_hertz": "sm_clock_max_hertz",
    "shmserve_gpu_temperature_celsius": "temperature_celsius",
}
"""Metric -> its key in the description of a GPU that the broker and `top` show."""


class GpuNumbers(tuple[int, ...]):
    """GPU numbers. `cpu_only`: backends that, as installed here, use no GPU."""

    cpu_only: frozenset[str]

    def __new__(cls, numbers: Iterable[int], cpu_only: Iterable[str]) -> GpuNumbers:
        gpus = super().__new__(cls, numbers)
        gpus.cpu_only = frozenset(cpu_only)
        return gpus


class Gpu(NamedTuple):
    """A GPU, or a MIG slice of one. `number` is its number in configurations, `ordinal` the number of the whole GPU
    among all GPUs of the machine. `parent`: for a slice, the UUID of the whole GPU; `pci` is always that of the whole
    GPU."""

    number: int
    ordinal: int
    uuid: str
    pci: str
    name: str
    parent: str = ""


class Gpus(NamedTuple):
    """The visible GPUs. `why`: why a machine with the driver has none; "" otherwise."""

    devices: tuple[Gpu, ...] = ()
    why: str = ""

    @property
    def numbers(self) -> GpuNumbers:
        return GpuNumbers((gpu.number for gpu in self.devices), cpu_only() if self.devices else ())

    def uuids(self) -> dict[int, str]:
        return {gpu.number: gpu.uuid for gpu in self.devices}

    def places(self) -> dict[int, str]:
        """The PCI ids by GPU number."""
        return {gpu.number: gpu.pci for gpu in self.devices}


def discover(environment: Mapping[str, str] = os.environ, control: Path = CONTROL) -> Gpus:
    """Queries the driver once."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return Gpus((), _why(f"the package nvidia-ml-py is not installed: {install_command('gpu')}", control))
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Gpus((), _why(f"NVML error: {error}", control))
    try:
        listed = [_listed(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError as error:
        return Gpus((), _why(f"NVML error: {error}", control))
    finally:
        nvml.nvmlShutdown()
    every = [gpu for group in listed for gpu in group]
    if listed and not every:
        return Gpus((), _why(f"all GPUs are in MIG mode, and none has a slice: {CREATE_SLICES}", control))
    text = environment.get(VISIBLE)
    shown = every if text is None else visible(every, text)
    return Gpus(tuple(gpu._replace(number=number) for number, gpu in enumerate(shown)))


def cpu_only() -> frozenset[str]:
    """Backends that run on the CPU only, or whose installed package is the CPU build."""
    from shmserve.version import version_of  # workers import this module and do not need it

    backends = {"fil", "identity", "llamacpp", "openvino", "paddle", "tflite"}
    if not version_of("onnxruntime-gpu"):
        backends.add("onnxruntime")
    if not version_of("tensorflow"):
        backends.add("tensorflow")
    if not any(version_of(f"nvidia-dali-cuda{cuda}") for cuda in (120, 130)):
        backends.add("dali")
    torch = version_of("torch")
    if not torch or torch.endswith("+cpu"):
        backends.add("pytorch")
    return frozenset(backends)


def visible(every: Sequence[Gpu], text: str) -> list[Gpu]:
    """`1,0` or `GPU-8f2c,MIG-11`: the listed GPUs and slices, in this order, up to the first invalid entry. A GPU in
    MIG mode is invalid; its slices are used in its place."""
    chosen: list[Gpu] = []
    for part in (part.strip() for part in text.split(",")):
        if part.isascii() and part.isdigit():
            matches = [gpu for gpu in every if gpu.ordinal == int(part) and not gpu.parent]
        else:
            matches = [gpu for gpu in every if part.startswith(("GPU-", "MIG-")) and gpu.uuid.startswith(part)]
        if len(matches) != 1 or matches[0] in chosen:
            break
        chosen.append(matches[0])
    return chosen


def in_mig_mode(nvml: Any, handle: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0])
    except (nvml.NVMLError, AttributeError):
        return False  # the GPU or the library does not know MIG


def _listed(nvml: Any, index: int) -> list[Gpu]:
    """The GPU, or its slices, in the order of `nvidia-smi -L`."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    pci = text_of(nvml.nvmlDeviceGetPciInfo(handle).busId)
    uuid = text_of(nvml.nvmlDeviceGetUUID(handle))
    if not in_mig_mode(nvml, handle):
        return [Gpu(index, index, uuid, pci, text_of(nvml.nvmlDeviceGetName(handle)))]
    slices = []
    for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
        except nvml.NVMLError:
            continue  # no slice has this number
        own = text_of(nvml.nvmlDeviceGetUUID(part))
        slices.append(Gpu(index, index, own, pci, text_of(nvml.nvmlDeviceGetName(part)), uuid))
    return slices


def text_of(value: Any) -> str:
    """Older versions of the library return bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)


def _why(text: str, control: Path) -> str:
    return text if control.exists() else ""
