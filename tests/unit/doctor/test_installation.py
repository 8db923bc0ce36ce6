"""The checks of installed packages."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shmserve.doctor import checks
from shmserve.doctor.machine import ERROR, INFO, OK, WARNING
from shmserve.extras import install_command
from shmserve.repo import gpus
from shmserve.repo.gpus import Gpu, Gpus
from shmserve.workers.backends.registry import BACKENDS
from tests.support.cases import cases
from tests.support.workers.gpu.harness import standins
from tests.unit.doctor.tree import INSTALLED, machine, only, write

ONE_GPU = Gpus((Gpu(0, 0, "GPU-8f2c", "00000000:3B:00.0", "NVIDIA L4"),))


def test_python_and_packages(tmp_path: Path) -> None:
    for implementation, version, state in (
        ("CPython", (3, 9), ERROR),
        ("CPython", (3, 10), OK),
        ("CPython", (3, 14), OK),
        ("PyPy", (3, 11), ERROR),
    ):
        this = machine(tmp_path, implementation=implementation, python=version)
        assert only(checks.python(this)).state == state
    assert only(checks.packages(machine(tmp_path))).state == OK
    for missing, state in (("uvloop", ERROR), ("httptools", WARNING)):
        found = only(checks.packages(machine(tmp_path, has_module=(INSTALLED - {missing}).__contains__)))
        assert (found.state, found.found) == (state, f"missing: {missing}")
        assert found.fix == install_command("server")


def test_engines(tmp_path: Path) -> None:
    assert set(checks.DISTRIBUTIONS) == set(BACKENDS)
    assert all(BACKENDS[name].extra for name, packages in checks.DISTRIBUTIONS.items() if packages)
    installed = {"onnxruntime": "1.20.0", "nvidia-dali-cuda130": "2.1"}
    engines = checks.engines(machine(tmp_path, version=lambda name: installed.get(name, "")))
    found = {finding.check: finding for finding in engines}
    assert (found["backend onnxruntime"].found, found["backend dali"].state) == ("onnxruntime 1.20.0", OK)
    missing = found["backend pytorch"]
    assert (missing.state, missing.fix) == (INFO, install_command("torch"))
    assert "backend python" not in found
    assert found["backend tensorrt"].fix == f"in another environment, without onnxruntime: {install_command('gpu')}"
    both = checks.engines(machine(tmp_path, version=lambda name: "1.20"))
    (same,) = [finding for finding in both if finding.check == "backend onnxruntime"]
    assert (same.state, same.found) == (WARNING, "onnxruntime 1.20 and onnxruntime-gpu 1.20")


@cases(
    ({}, "", "", ""),
    ({"lost": 16}, ERROR, "the driver requires a reset", "reset it (nvidia-smi --gpu-reset -i 0000:3B:00.0)"),
    ({"action": 2}, ERROR, "the driver recommends a reboot", "reboot the machine"),
    ({"rows": [0, 1, 1, 0]}, WARNING, "defective memory is remapped at the next reset", "stop all programs on it"),
    ({"uncorrected": 3}, WARNING, "3 uncorrected memory errors", "nvidia-smi -q -d ECC -i 0000:3B:00.0"),
)
def test_health_of_gpus(
    state: dict[str, Any], level: str, found: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, checks.CONTROL, "")
    slices = [{"uuid": "MIG-01"}, {"uuid": "MIG-02"}]
    one, two = {"uuid": "GPU-1", "pci": "0000:3B:00.0"} | state, {"uuid": "GPU-2", "pci": "0000:5E:00.0", "mig": slices}
    monkeypatch.setenv("STANDIN_GPUS", json.dumps([{"uuid": "GPU-1", "pci": "0000:3B:00.0"}, two]))
    with standins():
        listed = gpus.discover({})
        monkeypatch.setattr(gpus, "discover", lambda environment, control: listed)
        monkeypatch.setenv("STANDIN_GPUS", json.dumps([one, two]))
        first, *rest = checks.gpus(machine(tmp_path, version=lambda name: ""))
    assert first.found == "0: Stand-in, 1: Stand-in, 2: Stand-in (2 MIG slices)"
    health = [finding for finding in rest if finding.check == "GPU 0"]
    assert [(finding.state, finding.found) for finding in health] == ([(level, found)] if level else [])
    assert all(fix in finding.fix for finding in health)
    assert not [finding for finding in rest if finding.check == "GPU 1, 2"]


def test_drivers_and_engines_on_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(checks.gpus(machine(tmp_path))).state == INFO
    write(tmp_path, checks.CONTROL, "")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pynvml", None)
        found = only(checks.gpus(machine(tmp_path)))
    assert (found.state, found.fix) == (WARNING, install_command("gpu"))
    assert "nvidia-ml-py" in found.found
    write(tmp_path, checks.DRIVER, "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06\nGCC version: 12\n")
    monkeypatch.setattr(gpus, "discover", lambda environment, control: ONE_GPU)
    for version, providers, text in (
        ("", [], "onnxruntime-gpu is not installed: ONNX models run on the CPU"),
        ("1.20", ["CPUExecutionProvider"], "providers CPUExecutionProvider"),
        ("1.20", ["CUDAExecutionProvider", "CPUExecutionProvider"], ""),
    ):
        engine = SimpleNamespace(get_available_providers=lambda providers=providers: providers)
        monkeypatch.setitem(sys.modules, "onnxruntime", engine)
        driver, *rest = checks.gpus(machine(tmp_path, version=lambda name, version=version: version))
        assert driver.state == OK
        assert driver.found == "0: NVIDIA L4 (NVIDIA UNIX x86_64 Kernel Module  580.65.06)"
        assert [finding.found for finding in rest] == ([text] if text else [])
        assert all(finding.state == WARNING and finding.fix for finding in rest)
