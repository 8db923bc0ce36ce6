"""Processor and GPU use, and the server's own counters, between readings."""

from __future__ import annotations

import os
import socket
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from shmserve.tools.load.analysis.usage import Meter, UsageReading, is_local, server_pid, used
from shmserve.tools.load.one_load import between
from shmserve.tools.load.plan import Endpoint
from shmserve.tools.load.targets.base import latest_statistics
from tests.support.cases import cases


def test_cpu_usage_is_the_difference_of_readings_by_role() -> None:
    """A process that started in between counts from 0; one that ended no longer counts."""
    before = UsageReading(10.0, {1: ("broker", 5.0), 2: ("models", 1.0), 3: ("models", 9.0)}, {"GPU 0": (0.9, 7)})
    middle = UsageReading(0.0, {}, {"GPU 0": (0.2, 30)})
    after = UsageReading(13.0, {1: ("broker", 6.0), 2: ("models", 1.5), 4: ("models", 0.5)}, {"GPU 0": (0.4, 20)})
    found = used([before, middle, after], 2.0)
    assert (found.machine, found.server) == (1.5, {"broker": 0.5, "models": 0.5})
    assert found.gpus == {"GPU 0": pytest.approx(0.3)}
    assert found.gpu_bytes == {"GPU 0": 30}
    assert not used([before, UsageReading(0.0, {}, {}), after], 2.0).gpus, "a GPU that could not always be read"


def test_a_server_is_found_by_its_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert server_pid(Endpoint(url=f"http://127.0.0.1:{port}")) == os.getpid()
    for url in (f"grpc://127.0.0.1:{port}", "unix:///nowhere/lane.sock", f"http://example.invalid:{port}"):
        assert server_pid(Endpoint(url=url)) == 0, "no process listens"


@cases(
    ("http://localhost:1", True),
    ("grpc://127.0.0.5:1", True),
    ("http://[::1]:1", True),
    ("http://10.0.0.1:1", False),
    ("tcp://host:1", False),
    ("unix:///a", True),
    ("ipc:///a", True),
    (None, True),
)
def test_a_server_is_recognised_as_local_by_its_url(url: str | None, local: bool) -> None:
    assert is_local(Endpoint(url=url)) is local


def test_gpus_are_read_by_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError(Exception):
        pass

    nvml: Any = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=25 * (handle + 1)),
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=handle + 100),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    reading = Meter(Endpoint(url="unix:///nowhere/lane.sock")).read()
    assert reading.gpus == {"GPU 0": (0.25, 100), "GPU 1": (0.5, 101)}

    def failing(*handles: int) -> Any:
        if handles in ((), (0,)):
            raise NVMLError
        return SimpleNamespace(gpu=50)

    nvml.nvmlDeviceGetUtilizationRates = failing
    assert Meter(Endpoint(url="unix:///nowhere/lane.sock")).read().gpus == {"GPU 1": (0.5, 101)}
    nvml.nvmlInit = failing
    assert Meter(Endpoint(url="unix:///nowhere/lane.sock")).read().gpus == {}


def statistics(count: int, ns: int, batches: int) -> dict[str, Any]:
    """Over gRPC, 64-bit numbers are texts, and zeros are left out."""
    names = ("success", "queue", "compute_input", "compute_infer", "compute_output")
    return {
        "inference_count": str(2 * count),
        "execution_count": batches,
        "inference_stats": {name: {"count": str(count), "ns": str(ns * number)} for number, name in enumerate(names)},
        "batch_stats": [{"batch_size": "4", "compute_infer": {"count": str(batches)}}],
        "batch_reasons": {"full": batches, "idle": 1},
    }


def test_server_counters_are_differences() -> None:
    found = between(statistics(10, 100, 3), statistics(30, 500, 8))
    assert found is not None
    assert (found.requests, found.failed, found.rows, found.batches) == (20, 0, 40, 5)
    assert found.parts == {"queue": 20, "gather": 40, "compute": 60, "scatter": 80}
    assert (found.batch_sizes, found.reasons, found.mean_batch) == ({"4": 5}, {"full": 5}, 8)
    assert between({}, {}) is None, "a server without statistics"
    first = between({}, statistics(2, 10, 1))
    assert first is not None
    assert first.requests == 2
    entries = [{"version": version} for version in ("2", "10", "9")]
    assert latest_statistics({"model_stats": entries}) == {"version": "10"}
    assert latest_statistics({}) == {}
