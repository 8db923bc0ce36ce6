"""ONNX Runtime with CUDA, PyTorch and DALI on a real GPU. Each test is skipped if its package is missing or was built
without CUDA. The oracle is numpy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmserve.testing import Server
from tests.support.workers.models.worker_models import Graph

pytestmark = [pytest.mark.gpu, pytest.mark.process]

WIDTH = 50_000
GROUP = "instance_group { kind: KIND_GPU gpus: 0 }\n"
TENSORS = """
max_batch_size: 8
input {{ name: "{}" data_type: TYPE_FP32 dims: 50000 }} output {{ name: "{}" data_type: TYPE_FP32 dims: 50000 }}
"""
DALI = """\
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.plugin.triton import autoserialize


@autoserialize
@pipeline_def(batch_size=8, num_threads=2, device_id=0, output_dtype=types.FLOAT, output_ndim=1)
def add_one():
    return fn.external_source(name="x", dtype=types.FLOAT, ndim=1).gpu() + 1
"""


def onnx_model(repository: Path) -> None:
    ort = pytest.importorskip("onnxruntime")
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        pytest.skip("this ONNX Runtime is not the one for CUDA")
    graph = Graph().input("x", "FP32", [-1, WIDTH]).output("y", "FP32", [-1, WIDTH])
    graph.weight("one", np.ones(1, np.float32)).node("Add", ["x", "one"], ["y"]).save(repository / "model")
    (repository / "model" / "config.pbtxt").write_text(f'backend: "onnxruntime"\n{GROUP}')


def torch_model(repository: Path) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch is not one for CUDA")
    (repository / "model" / "1").mkdir(parents=True)

    class AddOne(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, x: Any) -> Any:
            return x + 1

    torch.jit.trace(AddOne(), torch.zeros(1, WIDTH)).save(str(repository / "model" / "1" / "model.pt"))
    names = TENSORS.format("INPUT__0", "OUTPUT__0")
    (repository / "model" / "config.pbtxt").write_text(f'backend: "pytorch"\n{names}{GROUP}')


def dali_model(repository: Path) -> None:
    pytest.importorskip("nvidia.dali")
    (repository / "model" / "1").mkdir(parents=True)
    (repository / "model" / "1" / "dali.py").write_text(DALI)
    (repository / "model" / "config.pbtxt").write_text(f'backend: "dali"\n{GROUP}')


MODELS = {"onnxruntime": onnx_model, "pytorch": torch_model, "dali": dali_model}


@pytest.fixture(params=MODELS)
def server(request: pytest.FixtureRequest, hardware: None, tmp_path: Path) -> Iterator[Server]:
    MODELS[request.param](tmp_path)
    with Server(tmp_path, "--exit-on-error", "true", start_timeout=300) as server:
        yield server


def test_every_request_gets_its_own_rows(server: Server) -> None:
    random = np.random.default_rng(6)
    xs = [random.integers(0, 1000, (rows, WIDTH)).astype(np.float32) for rows in (1, 3, 2, 1, 1)]
    with server.client() as client:
        metadata = client.metadata("model")
        (given,) = [tensor["name"] for tensor in metadata["inputs"]]
        (made,) = [tensor["name"] for tensor in metadata["outputs"]]
        for _ in range(3):
            futures = [client.submit("model", {given: x}) for x in xs]
            for x, future in zip(xs, futures, strict=True):
                np.testing.assert_array_equal(future.result()[made], x + 1)
