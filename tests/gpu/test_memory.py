"""Memory on the GPU: returned after unload, limited pinned memory, and what a refused registration leaves behind."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from shmserve.repo.gpus import discover
from tests.gpu.conftest import Serve, nvml
from tests.gpu.gpu_models import ADD, WIDTH, gpu_model, numbers
from tests.support import living

pytestmark = [pytest.mark.gpu, pytest.mark.process]
LARGE = """
    def initialize(self, args):
        self.weights = cupy.zeros(1 << 30, cupy.uint8)
        cupy.cuda.Device(0).synchronize()
"""
SLACK = 64 << 20


def used() -> int:
    """On the whole GPU: in a container, NVML may not list its processes."""
    with nvml() as driver:
        handle = driver.nvmlDeviceGetHandleByIndex(discover().devices[0].ordinal)
        return int(driver.nvmlDeviceGetMemoryInfo(handle).used)


def test_all_memory_on_the_gpu_is_returned_after_unload(hardware: None, serve: Serve, tmp_path: Any) -> None:
    """Context, weights, exported and opened memory: with the process."""
    gpu_model(tmp_path, "large", LARGE + ADD)
    with serve(tmp_path, "--model-control-mode", "explicit").client() as client:
        x = client.empty((1, WIDTH), "float32", device="cuda:0")
        before = used()
        for _ in range(3):
            client.load("large")
            client.infer("large", {"x": x})
            assert used() - before > 1 << 30
            client.unload("large")
            living.until(client, lambda: used() - before < SLACK, "the memory is returned")


def test_memory_of_dead_processes_is_returned(hardware: None, serve: Serve, tmp_path: Any) -> None:
    gpu_model(tmp_path, "add", ADD)
    before = used()
    server = serve(tmp_path)
    with server.client() as client:
        client.infer("add", {"x": numbers()})
        assert used() > before
    server.kill()
    server.start()
    with server.client() as client:
        client.infer("add", {"x": numbers()})
    server.stop()
    assert used() - before < SLACK


def test_a_refused_registration_leaves_no_error_for_torch(torch: Any, cupy: Any) -> None:
    """CUDA keeps the last error of a thread, and PyTorch checks it after each kernel."""
    cuda = importlib.import_module("shmserve.workers.gpu.api").Cuda()
    array = np.zeros(1 << 20, np.uint8)
    address = array.ctypes.data
    assert cuda.register(address, array.nbytes, True)
    try:
        assert not cuda.register(address, array.nbytes, True)
        assert int((torch.ones(1000, device="cuda") + 1).sum()) == 2000
        assert int((cupy.ones(1000, cupy.int64) + 1).sum()) == 2000
    finally:
        cuda.unregister(address)


def test_an_event_that_is_not_reached_leaves_no_error_for_torch(torch: Any, cupy: Any) -> None:
    """As above: asked for an unfinished event, CUDA answers with an error code. CuPy's wheels have a runtime of their
    own; a CuPy that shares the runtime with PyTorch may not be used if this fails."""
    cuda = importlib.import_module("shmserve.workers.gpu.api").Cuda()
    stream, event = cuda.stream(), cuda.event()
    size = 1 << 30
    source, target = cuda.allocate(size), cuda.allocate(size)
    try:
        for _ in range(50):
            cuda.copy(target, source, size, cuda.within, stream)
        cuda.record(event, stream)
        assert not cuda.reached(event), "the copies were too fast for this test"
        assert int((torch.ones(1000, device="cuda") + 1).sum()) == 2000
        cuda.synchronize(event)
        assert cuda.reached(event)
    finally:
        for address in (source, target):
            cuda.free(address)
        cuda.destroy_event(event)
        cuda.destroy_stream(stream)
