"""The parameters of a measure on a GPU, the reasons to skip it, and the GPU as NVML reports it."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import mean
from typing import Any

from bench.lib.setting import Setting
from shmserve.repo.gpus import Gpu, discover

MIB = 1 << 20


class Skipped(Exception):
    """The machine lacks what a measure needs; the text says what."""


@dataclass
class GpuSetting(Setting):
    """`kind` and `device`: where models run; tests without a GPU use the CPU. `mib`: the size of large tensors; `side`:
    that of images."""

    kind: str = "KIND_GPU"
    device: str = "cuda"
    mib: int = 64
    side: int = 224


def gpu() -> Gpu:
    result = discover()
    if not result.devices:
        raise Skipped(f"no GPU{': ' + result.why if result.why else ''}")
    return result.devices[0]


def need_cupy() -> None:
    gpu()
    if importlib.util.find_spec("cupy") is None:
        raise Skipped("cupy is not installed")


def need_torch(device: str) -> None:
    if device != "cpu":
        gpu()
    if importlib.util.find_spec("torch") is None:
        raise Skipped("torch is not installed")
    if device != "cpu" and not importlib.import_module("torch").cuda.is_available():
        raise Skipped("this PyTorch has no CUDA")


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Sets variables for the processes that are started meanwhile."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class Busy:
    """The share of time in which the GPU ran kernels, from the samples that the driver takes by itself."""

    def __init__(self) -> None:
        self._nvml: Any = importlib.import_module("pynvml")
        self._nvml.nvmlInit()
        self._handle = self._nvml.nvmlDeviceGetHandleByIndex(gpu().ordinal)
        self._since = 0
        self._samples()

    def _samples(self) -> list[int]:
        """The samples since the last call, in percent."""
        nvml = self._nvml
        try:
            _, samples = nvml.nvmlDeviceGetSamples(self._handle, nvml.NVML_GPU_UTILIZATION_SAMPLES, self._since)
        except nvml.NVMLError:
            return []  # no new sample, or not supported
        if samples:
            self._since = max(int(sample.timeStamp) for sample in samples)
        return [int(sample.sampleValue.uiVal) for sample in samples]

    def text(self) -> str:
        """The share since the last call."""
        result = self._samples()
        return f"GPU busy {mean(result):.0f} %" if result else "GPU busy unknown"

    def close(self) -> None:
        self._nvml.nvmlShutdown()


def facts() -> dict[str, str]:
    """The GPU and its libraries, for the head of the results. Without a GPU, the reason."""
    from shmserve.version import version_of

    try:
        result = gpu()
    except Skipped as error:
        return {"gpu": str(error)}
    nvml: Any = importlib.import_module("pynvml")
    nvml.nvmlInit()
    try:
        driver, cuda = nvml.nvmlSystemGetDriverVersion(), nvml.nvmlSystemGetCudaDriverVersion()
        memory = nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(result.ordinal)).total
    finally:
        nvml.nvmlShutdown()
    packages = ("torch", "cupy-cuda13x", "cupy-cuda12x", "nvidia-ml-py", "onnxruntime-gpu", "tensorrt")
    installed = ", ".join(f"{name} {version}" for name in packages if (version := version_of(name)))
    return {
        "gpu": f"{result.name}, {memory / 2**30:.0f} GiB",
        "driver": f"{driver}, CUDA {cuda // 1000}.{cuda % 1000 // 10}",
        "gpu packages": installed or "none",
    }
