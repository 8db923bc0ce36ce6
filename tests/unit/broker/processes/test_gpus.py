"""The available GPUs, the visible ones, their names and their metrics, with a fake driver."""

from __future__ import annotations

import importlib
import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from shmserve.broker.processes.gpus import monitor
from shmserve.broker.processes.gpus.monitor import GpuMonitor
from shmserve.extras import install_command
from shmserve.repo.gpus import Gpu, Gpus, cpu_only, discover, visible
from shmserve.shm.extents.cuda import name_of, parts_of, slice_uuid, uuid_bytes
from tests.support.patience import PATIENCE_S
from tests.support.workers.gpu.harness import standins

EVERY = [Gpu(number, number, f"GPU-{number:02x}ab", f"0000:0{number}:00.0", "H100") for number in range(4)]
TWO = [{"uuid": "GPU-aa11", "pci": "00000000:3B:00.0"}, {"uuid": "GPU-bb22", "pci": "00000000:AF:00.0"}]

BUSY = {"reasons": 0x24 | 0x1, "sm": 1410, "temperature": 88, "corrected": 3, "replays": 7}
SLICED = {
    "uuid": "GPU-aa11",
    "pci": "00000000:3B:00.0",
    "energy": 5_000,
    "mig": [
        {"uuid": "MIG-01", "name": "Stand-in MIG 3g.40gb", "total": 40 << 30},
        {"uuid": "MIG-02", "name": "Stand-in MIG 1g.10gb", "total": 10 << 30},
    ],
}


@pytest.fixture(autouse=True)
def _libraries() -> Iterator[None]:
    with standins():
        yield


def set_up(patch: pytest.MonkeyPatch, *gpus: dict[str, Any]) -> None:
    patch.setenv("STANDIN_GPUS", json.dumps(gpus))


def processes(patch: pytest.MonkeyPatch, file: Path, **memory: dict[str, int | None]) -> None:
    """The memory of processes, by GPU and pid."""
    file.write_text(json.dumps({name.replace("_", "-"): of for name, of in memory.items()}))
    patch.setenv("STANDIN_PROCESSES", str(file))


@contextmanager
def monitored(shown: bool = True, asked: bool = False, **environment: str) -> Iterator[GpuMonitor]:
    made = GpuMonitor(discover(environment).devices, shown, interval_s=3600)
    if asked:
        assert made.used_by(7) == 0, "nothing has been sampled"
    made.start()
    try:
        yield made
    finally:
        made.close()


def test_gpus_are_listed_by_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    set_up(monkeypatch, *TWO)
    found = discover({})
    gpus = [Gpu(number, number, gpu["uuid"], gpu["pci"], "Stand-in") for number, gpu in enumerate(TWO)]
    assert found == Gpus(tuple(gpus))
    assert found.numbers.cpu_only >= {"fil", "identity", "llamacpp", "openvino", "paddle", "tflite"}
    assert found.numbers == (0, 1)
    assert found.places() == {0: "00000000:3B:00.0", 1: "00000000:AF:00.0"}
    hidden = discover({"CUDA_VISIBLE_DEVICES": "GPU-bb"})
    assert [(gpu.number, gpu.ordinal, gpu.uuid) for gpu in hidden.devices] == [(0, 1, "GPU-bb22")]
    assert discover({"CUDA_VISIBLE_DEVICES": ""}).devices == ()


def test_cuda_visible_devices_selects_gpus() -> None:
    wanted = {" 3 , 1 ": [3, 1], "1,-1,2": [1], "2,9,0": [2], "1,1,2": [1], "GPU-02,GPU-00ab": [2, 0]}
    for text, numbers in wanted.items():
        assert [gpu.ordinal for gpu in visible(EVERY, text)] == numbers
    for text in ("", "-1", "02ab", "MIG-02ab", "NoDevFiles", "GPU-0"):  # of the last: which of them?
        assert not visible(EVERY, text)


def test_a_gpu_in_mig_mode_is_replaced_by_its_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    set_up(monkeypatch, SLICED, TWO[1])
    first = Gpu(0, 0, "MIG-01", "00000000:3B:00.0", "Stand-in MIG 3g.40gb", "GPU-aa11")
    second = Gpu(1, 0, "MIG-02", "00000000:3B:00.0", "Stand-in MIG 1g.10gb", "GPU-aa11")
    whole = Gpu(2, 1, "GPU-bb22", "00000000:AF:00.0", "Stand-in")
    assert discover({}).devices == (first, second, whole)
    assert discover({}).uuids() == {0: "MIG-01", 1: "MIG-02", 2: "GPU-bb22"}
    chosen = discover({"CUDA_VISIBLE_DEVICES": "1,MIG-02"}).devices
    assert chosen == (whole._replace(number=0), second._replace(number=1))
    assert discover({"CUDA_VISIBLE_DEVICES": "MIG-01,0,MIG-02"}).devices == (first,), "GPU 0 itself cannot be used"
    assert discover({"CUDA_VISIBLE_DEVICES": "GPU-aa11"}).devices == ()
    assert discover({"CUDA_VISIBLE_DEVICES": "MIG-0"}).devices == (), "which of them?"


def test_engines_installed_without_gpu_support_are_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"onnxruntime": "1.20.0", "torch": "2.6.0+cpu"}

    def version(package: str) -> str:
        if package not in versions:
            raise metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(metadata, "version", version)
    always = {"fil", "identity", "llamacpp", "openvino", "paddle", "tflite"}
    assert cpu_only() == always | {"dali", "onnxruntime", "pytorch", "tensorflow"}
    versions |= {"nvidia-dali-cuda120": "2.4.0", "onnxruntime-gpu": "1.20.0", "torch": "2.6.0", "tensorflow": "2.19.0"}
    assert cpu_only() == always


def test_the_reason_for_missing_gpus_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is only reported where a driver is installed."""
    control = tmp_path / "nvidiactl"
    assert discover({}, control) == Gpus()
    control.touch()
    assert discover({}, control).why == "NVML error: driver not loaded"
    set_up(monkeypatch, TWO[0] | {"missing": ["uuid"]})
    assert discover({}, control).why == "NVML error: not supported"
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pynvml", None)
        assert f"nvidia-ml-py is not installed: {install_command('gpu')}" in discover({}, control).why
    set_up(monkeypatch, TWO[0])
    monkeypatch.setattr(importlib.import_module("pynvml"), "nvmlDeviceGetMigMode", lambda handle: [1, 1])
    found = discover({}, control)
    assert found.devices == ()
    assert "all GPUs are in MIG mode, and none has a slice: create some (nvidia-smi mig -cgi PROFILE -C)" in found.why


LINE = r'^(\w+)\{gpu_uuid="GPU"(?:,\w+="(\w+)")?\} (.+)$'


def test_metrics_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    set_up(monkeypatch, TWO[0], TWO[1] | {"missing": ["power", "energy"], "utilization": 100} | BUSY)
    with monitored() as made:
        text, found = made.text(), made.document()
    plain, slow = (
        {
            f"{name} {kind}".rstrip(): float(value)
            for name, kind, value in re.findall(LINE.replace("GPU", uuid), text, re.MULTILINE)
        }
        for uuid in ("GPU-aa11", "GPU-bb22")
    )
    memory = {"nv_gpu_memory_total_bytes": 80 << 30, "nv_gpu_memory_used_bytes": 1 << 30, "nv_gpu_power_limit": 700}
    power = {"nv_gpu_power_usage": 120.5, "nv_energy_consumption": 1234.567}
    triton = {name: value for name, value in plain.items() if name.startswith("nv_")}
    assert triton == memory | power | {"nv_gpu_utilization": 0.25}
    reasons = {"power_cap": 1, "hw_slowdown": 0, "sync_boost": 0, "sw_thermal": 1, "hw_thermal": 0, "hw_power_brake": 0}
    clocks = {"sm_clock": 1410, "sm_clock_max": 1980, "memory_clock": 2619, "memory_clock_max": 2619}
    own = {"ecc_errors_total corrected": 3, "ecc_errors_total uncorrected": 0}
    own |= {"temperature_celsius": 88, "pcie_replays_total": 7}
    own |= {f"throttled {reason}": value for reason, value in reasons.items()}
    own |= {f"{name}_hertz": value * 10**6 for name, value in clocks.items()}
    assert slow == memory | {"nv_gpu_utilization": 1} | {f"shmserve_gpu_{name}": own[name] for name in own}
    first = {"number": 0, "uuid": "GPU-aa11", "name": "Stand-in", "utilization": 0.25, "power_watts": 120.5}
    first |= {"memory_bytes": 80 << 30, "memory_used_bytes": 1 << 30, "power_limit_watts": 700.0, "out_of_service": ""}
    first |= {"sm_clock_hertz": 1.98e9, "sm_clock_max_hertz": 1.98e9, "temperature_celsius": 41, "throttled": []}
    second = {"number": 1, "uuid": "GPU-bb22", "utilization": 1.0, "power_watts": None, "sm_clock_hertz": 1.41e9}
    second |= {"temperature_celsius": 88, "throttled": ["power_cap", "sw_thermal"]}
    assert found == [first, first | second]


def test_metrics_of_mig_slices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Memory is measured for each slice, power and the like for the whole GPU, and utilization not at all."""
    processes(monkeypatch, tmp_path / "processes", MIG_01={"7": 100}, MIG_02={"8": 11})
    set_up(monkeypatch, SLICED)
    with monitored(asked=True) as made:
        lines, documents = made.text().splitlines(), made.document()
        assert [made.used_by(pid) for pid in (7, 8)] == [100, 11]
    assert "utilization{" not in "".join(lines)
    assert f'nv_gpu_memory_total_bytes{{gpu_uuid="MIG-01"}} {40 << 30}' in lines
    assert f'nv_gpu_memory_total_bytes{{gpu_uuid="MIG-02"}} {10 << 30}' in lines
    energy = [line for line in lines if line.startswith("nv_energy")]
    assert energy == ['nv_energy_consumption{gpu_uuid="GPU-aa11"} 5.0']
    shown = [(one["uuid"], one["memory_bytes"], one["utilization"]) for one in documents]
    assert shown == [("MIG-01", 40 << 30, None), ("MIG-02", 10 << 30, None)]


def test_gpu_memory_is_measured_per_process_on_visible_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_up(monkeypatch, *TWO)
    processes(monkeypatch, tmp_path / "processes", GPU_aa11={"7": 100, "8": None}, GPU_bb22={"7": 11})
    with monitored(False, asked=True) as made:
        assert made.text() == "", "nobody wants the metrics"
        assert [made.used_by(pid) for pid in (7, 8, 9)] == [111, 0, 0]
    # The GPU's number in the server differs from its number in the driver.
    for visible_gpus, shown in (("1", {"GPU-bb22"}), ("", set())):
        with monitored(CUDA_VISIBLE_DEVICES=visible_gpus) as made:
            assert {uuid for uuid in ("GPU-aa11", "GPU-bb22") if uuid in made.text()} == shown


def test_a_driver_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's exit does not wait for the driver."""
    set_up(monkeypatch, *TWO)
    made = GpuMonitor(discover({}).devices, interval_s=0.001)
    made.start()
    asked, answers = threading.Event(), threading.Event()

    def look() -> list[Any]:
        asked.set()
        answers.wait()
        return []

    monkeypatch.setattr(made, "_update", look)
    monkeypatch.setattr(monitor, "JOIN_TIMEOUT_S", 0.01)
    assert asked.wait(PATIENCE_S)
    made.close()
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "gpu-metrics")
    answers.set()
    thread.join()
    made.close()


GPU = bytes(range(1, 17))


SLICE = "MIG-a65afc88-50b5-5ccf-b0a8-f93b3247ae9e"


def test_a_process_in_a_slice_uses_the_uuid_of_the_slice() -> None:
    """Two slices of one GPU differ, even if the runtime reports the UUID of the GPU for both."""
    assert slice_uuid(GPU, SLICE) == uuid_bytes(SLICE) == bytes.fromhex("a65afc8850b55ccfb0a8f93b3247ae9e")
    assert slice_uuid(GPU, f" {SLICE} ,MIG-x") == uuid_bytes(SLICE), "only the first device counts"
    exported = bytes(64)
    assert parts_of(name_of(exported, slice_uuid(GPU, SLICE))) != parts_of(name_of(exported, GPU))


@pytest.mark.parametrize("visible", ["", "0", "1,2", "GPU-8f2c", "MIG-a65", "MIG-GPU-8f2c/1/0"])
def test_otherwise_the_runtime_tells_the_uuid(visible: str) -> None:
    assert slice_uuid(GPU, visible) == GPU
