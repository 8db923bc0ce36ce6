"""Tests with the real libraries on a real GPU, for behaviour that fakes cannot show. The oracle is ONNX Runtime on the
CPU.

Skipped without a GPU, or if a package of the extra `gpu` is missing. Nothing is timed.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from shmserve.broker.processes.gpus import GpuMetrics
from shmserve.errors import HandleLost
from shmserve.repo.gpus import discover
from shmserve.shm.extents import memfd
from shmserve.shm.extents.cuda import device_id, uuid_bytes
from shmserve.testing import Server
from tests.support.model_files import write_model
from tests.support.workers.models.worker_models import Graph

pytestmark = [pytest.mark.gpu, pytest.mark.process]

WIDTH = 256
WIDE = 16 * 1024 * 1024
"""Number of elements in a row of 64 MiB."""
Array = np.ndarray[Any, np.dtype[Any]]


@pytest.fixture(scope="module", autouse=True)
def _device() -> None:
    if not discover().found:
        pytest.skip("there is no GPU here, or nvidia-ml-py is not installed")
    pytest.importorskip("cupy")
    pytest.importorskip("tensorrt")


def build(source: Path, out: Path, *options: str) -> str:
    out.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "shmserve.clients.cli.main", "build", str(source), "-o", str(out), *options]
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
    step = 'step {{ model_name: "{}" input_map {{ key: "x" value: "{}" }} output_map {{ key: "y" value: "{}" }} }}'
    steps = step.format("first", "x", "t"), step.format("second", "t", "y")
    write_model(
        repository,
        "both",
        f'platform: "ensemble" max_batch_size: 2\n'
        f'input {{ name: "x" data_type: TYPE_FP32 dims: {WIDE} }}\n'
        f'output {{ name: "y" data_type: TYPE_FP32 dims: {WIDE} }}\n'
        f"ensemble_scheduling {{ {' '.join(steps)} }}\n",
    )
    with Server(repository, "--exit-on-error", "true", start_timeout=300) as server:
        yield server


@pytest.mark.parametrize("model", ["plain", "graphs"])
def test_batches_give_the_same_results_as_on_the_cpu(server: Server, sources: Path, model: str) -> None:
    (source,) = (sources / "mlp").rglob("*.onnx")
    bare = ort.InferenceSession(str(source), providers=["CPUExecutionProvider"])
    random = np.random.default_rng(4)
    xs = [random.standard_normal((rows, WIDTH)).astype(np.float32) for rows in (1, 3, 1, 8, 5, 16, 2, 1)]
    with server.client() as client:
        for _ in range(3):
            futures = [client.submit(model, {"x": x}) for x in xs]
            for x, future in zip(xs, futures, strict=True):
                (wanted,) = bare.run(None, {"x": x})
                np.testing.assert_allclose(future.result()["y"], wanted, rtol=1e-2, atol=1e-2)


def test_an_ensemble_passes_tensors_between_steps_on_the_gpu(server: Server) -> None:
    x = np.random.default_rng(5).standard_normal((1, WIDE)).astype(np.float32)
    with server.client() as client:
        for _ in range(4):
            np.testing.assert_array_equal(client.infer("both", {"x": x})["y"], (x + 1) + 1)


def test_clients_send_and_receive_tensors_on_the_gpu(server: Server) -> None:
    """The client's own memory, a library's array in the middle of its pool, and an array that is not written yet."""
    cupy = importlib.import_module("cupy")
    random = np.random.default_rng(6).standard_normal((1, WIDE)).astype(np.float32)
    with server.client() as client:
        x, y = client.empty((1, WIDE), device="cuda:0"), client.empty((1, WIDE), device="cuda:0")
        cupy.asarray(x)[...] = cupy.asarray(random)
        found: Any = client.infer("first", {"x": x}, outputs={"y": y})["y"]
        assert found is y
        np.testing.assert_array_equal(y.numpy(), random + 1)
        pool = cupy.zeros((3, WIDE), cupy.float32)
        with cupy.cuda.Stream(non_blocking=True):
            for _ in range(20):
                pool[1:2] = cupy.asarray(random) * 2
            np.testing.assert_array_equal(client.infer("both", {"x": pool[1:2]})["y"], (random * 2 + 1) + 1)
        futures = [client.submit("first", {"x": x if number % 2 else random}) for number in range(6)]
        for future in futures:
            np.testing.assert_array_equal(future.result()["y"], random + 1)


def test_cupy_and_nvml_report_the_same_device_uuid(server: Server) -> None:
    """CuPy and NVML return the same uuid, as far as a uuid without a zero byte can show."""
    from shmserve.workers.gpu.api import Cuda

    (first, *_) = discover().found
    assert Cuda().uuid == device_id(uuid_bytes(first.uuid))


def test_the_driver_reports_the_size_of_an_allocation() -> None:
    """The size that the driver reports for memory opened from another process."""
    from shmserve.workers.gpu.api import Cuda

    cuda = Cuda()
    address = cuda.allocate(5 << 20)
    try:
        assert 5 << 20 <= cuda.room(address) < 8 << 20
        assert cuda.room(address) - cuda.room(address + 4096) == 4096
    finally:
        cuda.free(address)


def test_gpu_memory_of_worker_processes_is_measured(server: Server) -> None:
    made = GpuMetrics(discover().found, shown=False, interval_s=3600)
    made.start()
    try:
        workers = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        made.used_by(0)
        made._update()
        assert any(made.used_by(int(pid)) > 64 << 20 for pid in workers)
    finally:
        made.close()


def test_shared_memory_is_pinned_and_copied() -> None:
    """Includes memory that is mapped read-only, if the device supports that."""
    from shmserve.workers.gpu.api import Cuda

    cuda = Cuda()
    stream, event = cuda.stream(), cuda.event()
    device = cuda.allocate(1 << 20)
    extent = memfd.create(1 << 20)
    extent.memory[:] = os.urandom(1 << 20)
    twin = memfd.attach(os.dup(extent.fd), 1 << 20, False)
    back = np.zeros(1 << 20, np.uint8)
    assert cuda.register(extent.address, extent.size, True)
    read_only = cuda.register(twin.address, twin.size, False)
    try:
        for source in (extent.address, twin.address):
            back[:] = 0
            cuda.copy(device, source, extent.size, cuda.to_device, stream)
            cuda.copy(back.__array_interface__["data"][0], device, extent.size, cuda.to_host, stream)
            cuda.record(event, stream)
            cuda.synchronize(event)
            assert back.tobytes() == bytes(extent.memory)
    finally:
        cuda.unregister(extent.address)
        if read_only:
            cuda.unregister(twin.address)
        cuda.free(device)
        cuda.destroy_event(event)
        cuda.destroy_stream(stream)
        twin.close()
        extent.close()


def test_an_invalid_memory_handle_is_refused() -> None:
    from shmserve.workers.gpu.api import Cuda

    with pytest.raises(HandleLost):
        Cuda().open(bytes(64))


def test_metrics_list_all_gpus() -> None:
    gpus = discover()
    made = GpuMetrics(gpus.found)
    made.start()
    try:
        text = made.text()
    finally:
        made.close()
    for gpu in gpus.found:
        assert f'nv_gpu_memory_total_bytes{{gpu_uuid="{gpu.uuid}"}}' in text
