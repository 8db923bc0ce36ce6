"""The TensorRT backend on the stand-ins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from shmserve.repo.config import schema
from shmserve.repo.config.schema import ModelConfig
from tests.support.workers.batch_parts import Array
from tests.support.workers.gpu.harness import Instance

Cuda = schema.ModelOptimizationPolicyCuda
Spec = schema.ModelOptimizationPolicyCudaGraphSpec


class Gpu:
    """The stand-ins, and the backend on them."""

    def __init__(self, runtime: Any, trt: Any) -> None:
        self.runtime = runtime
        self.trt = trt

    @property
    def state(self) -> Any:
        return self.runtime.state

    def load(self, folder: Path, config: ModelConfig | None = None, **more: Any) -> Instance:
        from shmserve.workers.backends.tensorrt.backend import TensorRT

        return Instance(TensorRT, folder, config or ModelConfig(name="m", backend="tensorrt"), **more)

    def copies(self) -> list[tuple[int, int]]:
        """The size and the direction of each copy since `clear`."""
        return [(call[3], call[4]) for call in self.state.named("memcpyAsync")]

    def clear(self) -> None:
        self.state.calls.clear()
        self.trt.calls.clear()


def rows(*shares: int, width: int = 4, seed: int = 0) -> list[Array]:
    random = np.random.default_rng(seed)
    return [random.standard_normal((share, width)).astype(np.float32) for share in shares]


def config(**more: Any) -> ModelConfig:
    return ModelConfig(name="m", backend="tensorrt", **more)


NO_OVERLAP = {"overlap_batches": schema.ModelParameter(string_value="false")}


def tuned(cuda: Any = None, parameters: Any = None, **more: Any) -> ModelConfig:
    return config(optimization=schema.ModelOptimizationPolicy(cuda=cuda, **more), parameters=parameters or {})


def check(instance: Instance, *shares: int, width: int = 4, **how: Any) -> None:
    """Runs one batch of `adder`."""
    arrays = rows(*shares, width=width)
    found = instance.run(*[instance.work(x=array, **how) for array in arrays])
    for row, array in zip(found, arrays, strict=True):
        np.testing.assert_array_equal(instance.array(row), array + 1)
