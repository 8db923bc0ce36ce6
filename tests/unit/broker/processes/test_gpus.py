"""The available GPUs, the visible ones, and their metrics, with a fake driver."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.broker.processes import gpus
from shmserve.broker.processes.gpus import GpuMetrics
from shmserve.extras import install_command
from shmserve.repo.gpus import Gpu, Gpus, cpu_only, discover, visible
from tests.support.workers.gpu.harness import standins

EVERY = [Gpu(number, number, f"GPU-{number:02x}ab", f"0000:0{number}:00.0", "H100") for number in range(4)]
TWO = [{"uuid": "GPU-aa11", "pci": "00000000:3B:00.0"}, {"uuid": "GPU-bb22", "pci": "00000000:AF:00.0"}]


@pytest.fixture(autouse=True)
def _libraries() -> Iterator[None]:
    with standins():
        yield


def set_up(patch: pytest.MonkeyPatch, *gpus: dict[str, Any]) -> None:
    patch.setenv("STANDIN_GPUS", json.dumps(gpus))


# ---------------------------------------------------------------------------------------------- discovery


def test_gpus_are_listed_by_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    set_up(monkeypatch, *TWO)
    found = discover({})
    assert found == Gpus(
        (Gpu(0, 0, "GPU-aa11", "00000000:3B:00.0", "Stand-in"), Gpu(1, 1, "GPU-bb22", "00000000:AF:00.0", "Stand-in"))
    )
    assert found.numbers.cpu_only >= {"fil", "identity", "llamacpp", "openvino", "paddle", "tflite"}
    assert found.numbers == (0, 1)
    assert found.uuids() == {0: "GPU-aa11", 1: "GPU-bb22"}
    assert found.places() == {0: "00000000:3B:00.0", 1: "00000000:AF:00.0"}
    hidden = discover({"CUDA_VISIBLE_DEVICES": "GPU-bb"})
    assert [(gpu.number, gpu.ordinal, gpu.uuid) for gpu in hidden.found] == [(0, 1, "GPU-bb22")]
    assert discover({"CUDA_VISIBLE_DEVICES": ""}).found == ()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("0,1,2,3", [0, 1, 2, 3]),
        (" 3 , 1 ", [3, 1]),
        ("", []),
        ("-1", []),
        ("1,-1,2", [1]),
        ("2,9,0", [2]),
        ("1,1,2", [1]),
        ("GPU-02,GPU-00ab", [2, 0]),
        ("GPU-0", []),  # which of them?
        ("02ab", []),
        ("MIG-02ab", []),
        ("NoDevFiles", []),
    ],
)
def test_cuda_visible_devices_selects_gpus(text: str, wanted: Sequence[int]) -> None:
    assert [gpu.ordinal for gpu in visible(EVERY, text)] == wanted


@given(st.text("0123GPU-ab, x", max_size=20))
def test_any_text_of_cuda_visible_devices_selects_existing_gpus(text: str) -> None:
    found = visible(EVERY, text)
    assert len({gpu.uuid for gpu in found}) == len(found)
    assert all(gpu in EVERY for gpu in found)


def test_engines_installed_without_gpu_support_are_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"onnxruntime": "1.20.0", "torch": "2.6.0+cpu"}

    def version(package: str) -> str:
        if package not in versions:
            raise metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(metadata, "version", version)
    assert cpu_only() == {
        "dali",
        "fil",
        "identity",
        "llamacpp",
        "openvino",
        "paddle",
        "onnxruntime",
        "pytorch",
        "tensorflow",
        "tflite",
    }
    versions |= {"nvidia-dali-cuda120": "2.4.0", "onnxruntime-gpu": "1.20.0", "torch": "2.6.0", "tensorflow": "2.19.0"}
    assert cpu_only() == {"fil", "identity", "llamacpp", "openvino", "paddle", "tflite"}


def test_the_reason_for_missing_gpus_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is only reported where a driver is installed."""
    control = tmp_path / "nvidiactl"
    assert discover({}, control) == Gpus()
    control.touch()
    assert discover({}, control).why == "NVML error: driver not loaded"
    set_up(monkeypatch, TWO[0] | {"missing": ["uuid"]})
    assert discover({}, control).why == "NVML error: not supported"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert f"nvidia-ml-py is not installed: {install_command('gpu')}" in discover({}, control).why


# ---------------------------------------------------------------------------------------------- metrics


def test_metrics_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    set_up(monkeypatch, TWO[0], TWO[1] | {"missing": ["power", "energy"], "utilization": 100})
    made = GpuMetrics(discover({}).found)
    made.start()
    try:
        lines = [line for line in made.text().splitlines() if not line.startswith("#")]
        found = made.document()
    finally:
        made.close()
    assert lines == [
        'nv_gpu_utilization{gpu_uuid="GPU-aa11"} 0.25',
        'nv_gpu_utilization{gpu_uuid="GPU-bb22"} 1.0',
        f'nv_gpu_memory_total_bytes{{gpu_uuid="GPU-aa11"}} {80 << 30}',
        f'nv_gpu_memory_total_bytes{{gpu_uuid="GPU-bb22"}} {80 << 30}',
        f'nv_gpu_memory_used_bytes{{gpu_uuid="GPU-aa11"}} {1 << 30}',
        f'nv_gpu_memory_used_bytes{{gpu_uuid="GPU-bb22"}} {1 << 30}',
        'nv_gpu_power_usage{gpu_uuid="GPU-aa11"} 120.5',
        'nv_gpu_power_limit{gpu_uuid="GPU-aa11"} 700.0',
        'nv_gpu_power_limit{gpu_uuid="GPU-bb22"} 700.0',
        'nv_energy_consumption{gpu_uuid="GPU-aa11"} 1234.567',
    ]
    memory = {"memory_bytes": 80 << 30, "memory_used_bytes": 1 << 30}
    power = {"power_watts": 120.5, "power_limit_watts": 700.0}
    missing = power | {"power_watts": None}
    assert found == [
        {"number": 0, "uuid": "GPU-aa11", "name": "Stand-in", "utilization": 0.25, **memory, **power},
        {"number": 1, "uuid": "GPU-bb22", "name": "Stand-in", "utilization": 1.0, **memory, **missing},
    ]


def test_metrics_cover_only_the_visible_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's number in the server differs from its number in the driver."""
    set_up(monkeypatch, *TWO)
    made = GpuMetrics(discover({"CUDA_VISIBLE_DEVICES": "1"}).found)
    made.start()
    text = made.text()
    made.close()
    assert "GPU-bb22" in text
    assert "GPU-aa11" not in text


def test_gpu_memory_is_measured_per_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_up(monkeypatch, *TWO)
    told = tmp_path / "processes"
    told.write_text(json.dumps({"GPU-aa11": {"7": 100, "8": None}, "GPU-bb22": {"7": 11}}))
    monkeypatch.setenv("STANDIN_PROCESSES", str(told))
    made = GpuMetrics(discover({}).found, False, interval_s=3600)
    made.start()
    try:
        assert made.text() == "", "nobody wants the metrics"
        assert made.used_by(7) == 0, "nobody had asked"
        made._update()
        assert [made.used_by(pid) for pid in (7, 8, 9)] == [111, 0, 0]
    finally:
        made.close()


def test_without_gpus_there_is_no_thread() -> None:
    made = GpuMetrics(())
    made.start()
    assert made.text() == ""
    made.close()


def test_a_driver_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's exit does not wait for the driver."""
    set_up(monkeypatch, *TWO)
    made = GpuMetrics(discover({}).found, interval_s=0.001)
    made.start()
    asked, answers = threading.Event(), threading.Event()

    def look() -> list[Any]:
        asked.set()
        answers.wait()
        return []

    monkeypatch.setattr(made, "_update", look)
    monkeypatch.setattr(gpus, "JOIN_TIMEOUT_S", 0.01)
    assert asked.wait(30)
    made.close()
    thread = made._thread
    assert thread is not None
    assert thread.is_alive()
    answers.set()
    thread.join()
    made.close()
