"""GPU metrics and the memory of processes, as NVML reports them."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest

from shmserve.broker.processes.gpus import GpuMetrics
from shmserve.repo.gpus import discover
from tests.gpu.conftest import Serve
from tests.gpu.gpu_models import ADD, gpu_model, numbers
from tests.support import living

pytestmark = [pytest.mark.gpu, pytest.mark.process]
NAMES = (
    "nv_gpu_utilization",
    "nv_gpu_memory_total_bytes",
    "nv_gpu_memory_used_bytes",
    "nv_gpu_power_usage",
    "nv_gpu_power_limit",
    "nv_energy_consumption",
)


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


def test_metrics_of_a_server_have_plausible_values(serve: Serve, tmp_path: Any) -> None:
    gpu_model(tmp_path, "add", ADD)
    with serve(tmp_path).client() as client:
        client.infer("add", {"x": numbers()})
        text = client.metrics()
    (gpu, *_) = discover().found
    found = dict(re.findall(rf'^(\w+){{gpu_uuid="{gpu.uuid}"}} (\S+)$', text, re.MULTILINE))
    assert set(NAMES) <= set(found)
    values = {name: float(found[name]) for name in NAMES}
    assert 0 <= values["nv_gpu_utilization"] <= 1
    assert 0 < values["nv_gpu_memory_used_bytes"] < values["nv_gpu_memory_total_bytes"]
    assert 0 < values["nv_gpu_power_usage"] <= 1.2 * values["nv_gpu_power_limit"]
    nvml: Any = importlib.import_module("pynvml")
    nvml.nvmlInit()
    try:
        total = nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(gpu.ordinal)).total
    finally:
        nvml.nvmlShutdown()
    assert values["nv_gpu_memory_total_bytes"] == total


def test_gpu_memory_of_worker_processes_is_measured(hardware: None, serve: Serve, tmp_path: Any) -> None:
    """In a container with its own process ids the driver's are others: then there is nothing to compare."""
    gpu_model(tmp_path, "add", ADD)
    with serve(tmp_path).client() as client:
        client.infer("add", {"x": numbers()})
        workers = living.pids(client, "add").values()
        made = GpuMetrics(discover().found, shown=False, interval_s=3600)
        made.start()
        try:
            made.used_by(0)
            made._update()
            used = {pid: made.used_by(pid) for pid in workers}
        finally:
            made.close()
        listed = processes()
    if not listed:
        pytest.skip("the driver lists no processes: they are in another process namespace")
    if not set(workers) & set(listed):
        pytest.skip(f"the driver lists processes {listed}: this container has its own process ids")
    assert all(size > 64 << 20 for size in used.values()), used


def processes() -> list[int]:
    nvml: Any = importlib.import_module("pynvml")
    nvml.nvmlInit()
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(discover().found[0].ordinal)
        return [int(process.pid) for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    finally:
        nvml.nvmlShutdown()
