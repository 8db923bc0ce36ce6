"""TensorRT: plans, CUDA graphs, tensors on the GPU between steps and clients. The oracle is ONNX Runtime on the CPU."""

from __future__ import annotations

import importlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmserve.testing import Server
from tests.gpu.gpu_models import chain
from tests.support.commands import COMMAND
from tests.support.workers.models.worker_models import Graph

pytestmark = [pytest.mark.gpu, pytest.mark.process]

WIDTH = 256
WIDE = 16 * 1024 * 1024
"""Number of elements in a row of 64 MiB."""


@pytest.fixture(scope="module", autouse=True)
def _device(hardware: None, cupy: Any) -> None:
    pytest.importorskip("tensorrt", exc_type=ImportError)


def build(source: Path, out: Path, *options: str) -> str:
    out.parent.mkdir(parents=True, exist_ok=True)
    command = [*COMMAND, "build", str(source), "-o", str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def mlp(folder: Path) -> Path:
    random = np.random.default_rng(3)
    graph = Graph().input("x", "FP32", [-1, WIDTH]).output("y", "FP32", [-1, WIDTH])
    graph.weight("w", (random.standard_normal((WIDTH, WIDTH)) / 16).astype(np.float32))
    graph.weight("b", random.standard_normal(WIDTH).astype(np.float32))
    return graph.node("Gemm", ["x", "w", "b"], ["h"]).node("Relu", ["h"], ["y"]).save(folder)


def wide(folder: Path) -> Path:
    graph = Graph().input("x", "FP32", [-1, WIDE]).output("y", "FP32", [-1, WIDE])
    graph.weight("one", np.ones(1, np.float32))
    return graph.node("Add", ["x", "one"], ["y"]).save(folder)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("onnx")
    mlp(folder / "mlp")
    wide(folder / "wide")
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, sources: Path) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("gpu")
    cache = str(repository.parent / "timing")
    (source,) = (sources / "mlp").rglob("*.onnx")
    for name in ("plain", "graphs"):
        build(source, repository / name / "1" / "model.plan", "--max-batch", "16", "--timing-cache", cache)
    (repository / "graphs" / "config.pbtxt").write_text(
        'backend: "tensorrt" instance_group { kind: KIND_GPU count: 2 gpus: 0 profile: "0" }\n'
        "optimization { priority: PRIORITY_MAX cuda { graphs: true output_copy_stream: true busy_wait_events: true\n"
        "graph_spec { batch_size: 8 graph_lower_bound { batch_size: 3 } } graph_spec { batch_size: 1 } } }\n"
    )
    (source,) = (sources / "wide").rglob("*.onnx")
    for name in ("first", "second"):
        build(source, repository / name / "1" / "model.plan", "--max-batch", "2", "--timing-cache", cache)
        (repository / name / "config.pbtxt").write_text(
            'backend: "tensorrt" instance_group { kind: KIND_GPU gpus: 0 }\n'
        )
    chain(repository, "both", "first", "second", width=WIDE, batch=2)
    with Server(repository, "--exit-on-error", "true", start_timeout=300) as server:
        yield server


@pytest.mark.parametrize("model", ["plain", "graphs"])
def test_batches_give_the_same_results_as_on_the_cpu(server: Server, sources: Path, model: str) -> None:
    (source,) = (sources / "mlp").rglob("*.onnx")
    ort: Any = pytest.importorskip("onnxruntime")
    bare = ort.InferenceSession(str(source), providers=["CPUExecutionProvider"])
    random = np.random.default_rng(4)
    xs = [random.standard_normal((rows, WIDTH)).astype(np.float32) for rows in (1, 3, 1, 8, 5, 16, 2, 1)]
    with server.client() as client:
        for _ in range(3):
            futures = [client.submit(model, {"x": x}) for x in xs]
            for x, future in zip(xs, futures, strict=True):
                (wanted,) = bare.run(None, {"x": x})
                np.testing.assert_allclose(future.result()["y"], wanted, rtol=1e-2, atol=1e-2)


def test_tensors_stay_on_the_gpu_between_clients_and_steps(server: Server) -> None:
    """tests/gpu/test_clients.py has all kinds of arrays."""
    cupy = importlib.import_module("cupy")
    given = np.random.default_rng(5).standard_normal((1, WIDE)).astype(np.float32)
    with server.client() as client:
        x, y = client.empty((1, WIDE), device="cuda:0"), client.empty((1, WIDE), device="cuda:0")
        cupy.asarray(x)[...] = cupy.asarray(given)
        for _ in range(4):
            np.testing.assert_array_equal(client.infer("both", {"x": given})["y"], (given + 1) + 1)
            client.infer("both", {"x": x}, outputs={"y": y})
            np.testing.assert_array_equal(y.numpy(), (given + 1) + 1)
        futures = [client.submit("first", {"x": x if number % 2 else given}) for number in range(6)]
        for future in futures:
            np.testing.assert_array_equal(future.result()["y"], given + 1)
