"""The tests and the measures."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu import throughput
from bench.gpu.setting import GpuSetting
from tests import ROOT, STANDINS

pytestmark = pytest.mark.process


def test_the_tests_on_a_gpu_pass_with_the_stand_ins() -> None:
    """A part of them: SHMSERVE_GPU_STANDINS=1 python -m pytest tests/gpu runs all."""
    chosen = ["test_runtime.py", "test_clients.py", "test_faults.py::test_a_worker_is_killed_with_requests_in_flight"]
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-m", "gpu"]
    command += [f"tests/gpu/{name}" for name in chosen]
    environment = os.environ | {"SHMSERVE_GPU_STANDINS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


def test_the_measures_of_transfers_run_with_the_stand_ins(tmp_path: Path) -> None:
    """The copies are those that docs/gpu.md states: an output of a Python model is copied once, within the GPU."""
    command = [sys.executable, "-m", "bench.gpu", "--out", str(tmp_path), "--mib", "1", "--turn", "0.02"]
    command += ["--rounds", "1", "--only", "copies", "--only", "hand-over", "--only", "host-to-device"]
    path = os.pathsep.join(filter(None, (str(STANDINS), os.environ.get("PYTHONPATH"))))
    gpus = json.dumps([{"uuid": "GPU-aa11", "pci": "00000000:3B:00.0"}])
    environment = os.environ | {"PYTHONPATH": path, "STANDIN_GPUS": gpus, "CUDA_VISIBLE_DEVICES": "GPU-aa11"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["measure"]: row for row in json.loads((tmp_path / "results.json").read_text())["rows"]}
    copies = rows["copies per added step, CuPy"]
    assert (copies["value"], copies["beside"]) == (1, "within the device 1; three steps 3, two 2, 1 MiB each")
    for name in ("hand-over of 1 MiB on the GPU, client to model", "hand-over of 1 MiB on the GPU, step to step"):
        assert "bare cudaMemcpyAsync within the device" in rows[name]["beside"]
    assert rows["shared memory, registered, to the device"]["value"] > 0


def test_the_measure_of_pytorch_runs_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    monkeypatch.setattr(throughput, "FLIGHTS", (1, 4))
    monkeypatch.setattr(throughput, "BATCHES", (1, 4))
    setting = GpuSetting(tmp_path, 0.02, 1, 0, kind="KIND_CPU", device="cpu", side=32)
    rows = throughput.resnet(setting)
    assert [row.measure for row in rows] == [
        "ResNet-50 size, 1 in flight, dynamic batching",
        "ResNet-50 size, 4 in flight, dynamic batching",
        "ResNet-50 size, 1 in flight, no batching",
        "ResNet-50 size, 4 in flight, no batching",
        "ResNet-50 size, 1 in flight, CUDA graphs",
    ]
    assert all(row.value is not None and row.value > 0 for row in rows)
