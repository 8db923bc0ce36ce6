"""Models of the tests on a GPU: Python models with CuPy or PyTorch, on tensors of WIDTH floats per row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.support import ensemble_models
from tests.support.model_files import parameters, write_model

WIDTH = 100_000
ON_DEVICE = parameters(FORCE_CPU_ONLY_INPUT_TENSORS="no")
CONFIG = """
backend: "python" max_batch_size: 8
input {{ name: "x" data_type: TYPE_FP32 dims: {width} }} output {{ name: "y" data_type: {out} }}
instance_group {{ kind: KIND_GPU gpus: 0 count: {count} }}
"""
CHAIN = """
platform: "ensemble" max_batch_size: {batch}
input {{ name: "x" data_type: TYPE_FP32 dims: {width} }} output {{ name: "y" data_type: {out} }}
"""
HEAD = """\
import os
import signal

import cupy
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([self.one(pb_utils.get_input_tensor_by_name(request, "x"))])
                for request in requests]

    def on_device(self, x):
        return cupy.asarray(x.as_numpy()) if x.is_cpu() else cupy.from_dlpack(x)
"""
ADD = """
    def one(self, x):
        return pb_utils.Tensor.from_dlpack("y", self.on_device(x) + 1)
"""
WHERE = """
    def one(self, x):
        there = 0 if x.is_cpu() else self.on_device(x).data.ptr
        return pb_utils.Tensor("y", np.array([[os.getpid(), x.is_cpu(), there]] * x.shape()[0], np.int64))
"""
TORCH_ADD = """
    def one(self, x):
        import torch

        if x.is_cpu():
            given = torch.from_numpy(x.as_numpy().copy()).cuda()
        else:
            given = torch.from_dlpack(x)
            assert given.data_ptr() == cupy.from_dlpack(x).data.ptr
        return pb_utils.Tensor.from_dlpack("y", given + 1)
"""
DIE = """
    def one(self, x):
        made = pb_utils.Tensor.from_dlpack("y", self.on_device(x) + 1)
        if float(cupy.asnumpy(self.on_device(x)).flat[0]) < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return made
"""
FLOATS, FACTS = "TYPE_FP32 dims: {width}", "TYPE_INT64 dims: 3"


def gpu_model(repository: Path, name: str, source: str, *, out: str = FLOATS, count: int = 1, more: str = "") -> None:
    """A Python model whose inputs stay on the GPU. `source`: its method `one`."""
    config = CONFIG.format(width=WIDTH, out=out.format(width=WIDTH), count=count)
    write_model(repository, name, config + ON_DEVICE + more, HEAD + source)


def chain(repository: Path, name: str, *models: str, out: str = FLOATS, width: int = WIDTH, batch: int = 8) -> None:
    tensors = ["x", *(f"t{number}" for number in range(1, len(models))), "y"]
    links = zip(models, tensors, tensors[1:], strict=False)
    steps = [f"{model}(x:{given})->(y:{made})" for model, given, made in links]
    config = CHAIN.format(batch=batch, width=width, out=out.format(width=width))
    write_model(repository, name, config + ensemble_models.steps(*steps))


def numbers(rows: int = 1, seed: int = 1) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 1000, (rows, WIDTH)).astype(np.float32)
