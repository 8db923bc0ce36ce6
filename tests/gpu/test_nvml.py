"""GPU metrics and the memory of processes, as NVML reports them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from shmserve.repo.gpus import discover
from tests.gpu.conftest import Serve, nvml
from tests.gpu.gpu_models import ADD, gpu_model, numbers
from tests.support import living
from tests.support.launch import await_end
from tests.support.model_files import parameters

pytestmark = [pytest.mark.gpu, pytest.mark.process]
NAMES = (
    "nv_gpu_utilization",
    "nv_gpu_memory_total_bytes",
    "nv_gpu_memory_used_bytes",
    "nv_gpu_power_usage",
    "nv_gpu_power_limit",
    "nv_energy_consumption",
)


def test_metrics_of_a_server_have_plausible_values(serve: Serve, tmp_path: Any) -> None:
    gpu_model(tmp_path, "add", ADD)
    with serve(tmp_path).client() as client:
        client.infer("add", {"x": numbers()})
        text = client.metrics()
    for gpu in discover().devices:
        found = dict(re.findall(rf'^(\w+){{gpu_uuid="{gpu.uuid}"}} (\S+)$', text, re.MULTILINE))
        assert set(NAMES) <= set(found)
        values = {name: float(found[name]) for name in NAMES}
        assert 0 <= values["nv_gpu_utilization"] <= 1
        assert 0 < values["nv_gpu_memory_used_bytes"] < values["nv_gpu_memory_total_bytes"]
        assert 0 < values["nv_gpu_power_usage"] <= 1.2 * values["nv_gpu_power_limit"]
        with nvml() as driver:
            total = driver.nvmlDeviceGetMemoryInfo(driver.nvmlDeviceGetHandleByIndex(gpu.ordinal)).total
        assert values["nv_gpu_memory_total_bytes"] == total


def test_an_instance_over_its_gpu_memory_limit_is_ended(hardware: None, serve: Serve, tmp_path: Any) -> None:
    """A context alone needs more than this. The other model is left alone."""
    gpu_model(tmp_path, "add", ADD)
    gpu_model(tmp_path, "limited", ADD, more=parameters(gpu_memory_limit_mb="16"))
    server = serve(tmp_path)
    with server.client() as client:
        before = living.pids(client, "add")
        client.infer("add", {"x": numbers()})
        workers, listed = set(before.values()), processes()
        if not workers & set(listed):
            pytest.skip(f"the driver lists the processes {listed}: this container has its own process ids")
        assert listed[next(iter(workers))] > 64 << 20
        for pid in living.pids(client, "limited").values():
            await_end(pid)
        assert living.pids(client, "add") == before
    assert re.search(r"killed: it uses \d+ MiB of GPU memory, limit 16 MiB", server.log)


def processes() -> dict[int, int]:
    """Memory by pid; 0 where the driver does not report it."""
    with nvml() as driver:
        handle = driver.nvmlDeviceGetHandleByIndex(discover().devices[0].ordinal)
        listed = driver.nvmlDeviceGetComputeRunningProcesses(handle)
        return {int(process.pid): int(process.usedGpuMemory or 0) for process in listed}
