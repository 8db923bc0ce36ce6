"""The GPUs of this machine that models may use, as NVIDIA's driver lists them.

The rule of the file: it only reads. Without the driver, its library or the package nvidia-ml-py there are none, and the
reason can be had. CUDA_VISIBLE_DEVICES hides and orders GPUs here as it does for every program.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

VISIBLE = "CUDA_VISIBLE_DEVICES"
CONTROL = Path("/dev/nvidiactl")
"""There wherever the driver is."""


class Numbers(tuple[int, ...]):
    """Numbers of GPUs. `not_for`: backends that do not use any, as they are installed here."""

    not_for: frozenset[str] = frozenset()

    @classmethod
    def of(cls, numbers: Iterable[int], not_for: Iterable[str]) -> Numbers:
        made = cls(numbers)
        made.not_for = frozenset(not_for)
        return made


class Gpu(NamedTuple):
    """`number` is what configurations call it. `ordinal` is its number among all of the machine."""

    number: int
    ordinal: int
    uuid: str
    pci: str
    name: str


class Gpus(NamedTuple):
    """`why`: the reason why a machine that has the driver has no GPUs for us; "" otherwise."""

    found: tuple[Gpu, ...] = ()
    why: str = ""

    @property
    def numbers(self) -> Numbers:
        return Numbers.of((gpu.number for gpu in self.found), not_for() if self.found else ())

    def uuids(self) -> dict[int, str]:
        return {gpu.number: gpu.uuid for gpu in self.found}

    def places(self) -> dict[int, str]:
        """The PCI ids, by number."""
        return {gpu.number: gpu.pci for gpu in self.found}


def discover(environment: Mapping[str, str] = os.environ, control: Path = CONTROL) -> Gpus:
    """Asks the driver, once."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return Gpus((), _why("the package nvidia-ml-py is not installed: pip install 'shmserve[gpu]'", control))
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Gpus((), _why(f"the driver's management library says: {error}", control))
    try:
        every = [_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError as error:
        return Gpus((), _why(f"the driver's management library says: {error}", control))
    finally:
        nvml.nvmlShutdown()
    text = environment.get(VISIBLE)
    shown = every if text is None else visible(every, text)
    return Gpus(tuple(gpu._replace(number=number) for number, gpu in enumerate(shown)))


def not_for() -> frozenset[str]:
    """Backends that run on the CPU only; and those whose package here is the one for the CPU."""
    found = {"identity", "openvino"}
    if not _version("onnxruntime-gpu"):
        found.add("onnxruntime")
    torch = _version("torch")
    if not torch or torch.endswith("+cpu"):
        found.add("pytorch")
    return frozenset(found)


def _version(package: str) -> str:
    from importlib import metadata  # workers import this file, and have no use for that

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def visible(every: Sequence[Gpu], text: str) -> list[Gpu]:
    """`1,0` or `GPU-8f2c,GPU-11`: those that are named, in this order, up to the first name that is wrong."""
    found: list[Gpu] = []
    for part in (part.strip() for part in text.split(",")):
        if part.isascii() and part.isdigit():
            matches = [gpu for gpu in every if gpu.ordinal == int(part)]
        else:
            matches = [gpu for gpu in every if part.startswith("GPU-") and gpu.uuid.startswith(part)]
        if len(matches) != 1 or matches[0] in found:
            break
        found.append(matches[0])
    return found


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    pci = nvml.nvmlDeviceGetPciInfo(handle).busId
    return Gpu(index, index, _text(nvml.nvmlDeviceGetUUID(handle)), _text(pci), _text(nvml.nvmlDeviceGetName(handle)))


def _text(value: Any) -> str:
    """Older versions of the library give bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)


def _why(text: str, control: Path) -> str:
    return text if control.exists() else ""
