"""tests/gpu/run.sh without a GPU, and the tests on a GPU with the stand-ins."""

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
FILES = {"install.log", "machine.log", "tests.log", "tests.xml", "bench.log", "results.json", "results.md"}
MEASURES = {"hand-over", "copies", "host-to-device", "resnet", "overlap", "lone", "throughput"}
FAILING = """
import pytest


@pytest.mark.gpu
def test_it():
    assert 1 == 2
"""
HANGING = """
import select
import pytest


@pytest.mark.gpu
def test_it():
    select.select([], [], [])
"""


def run(folder: Path, **variables: str) -> tuple[int, str]:
    """The exit code and the summary. The wheelhouse is empty: this interpreter has all packages."""
    (folder / "wheelhouse").mkdir()
    environment = os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", **variables}
    environment.pop("SHMSERVE_GPU_STANDINS", None)
    command = [ROOT / "tests" / "gpu" / "run.sh", folder / "wheelhouse", folder / "out"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder)
    assert done.stderr == ""
    assert {path.name for path in (folder / "out").iterdir()} == {"summary.txt", *FILES}
    return done.returncode, (folder / "out" / "summary.txt").read_text()


def outcomes(summary: str) -> dict[str, str]:
    lines = summary.partition("\n\n")[0].splitlines()
    return {line.split()[0]: line.split(maxsplit=3)[3] for line in lines}


def test_without_a_gpu_everything_is_skipped(tmp_path: Path) -> None:
    code, summary = run(tmp_path, BENCH_ARGS="--seconds 0")
    out = tmp_path / "out"
    assert (code, outcomes(summary)) == (0, dict.fromkeys(("install", "machine", "tests", "bench"), "ok")), summary
    assert " skipped in " in summary
    assert " passed" not in summary
    rows = json.loads((out / "results.json").read_text())["rows"]
    assert {row["measure"]: row["verdict"] for row in rows} == dict.fromkeys(MEASURES, "skipped")
    assert "| resnet | - | - | skipped |" in summary
    assert "Python 3" in (out / "machine.log").read_text()


def test_after_a_failed_test_the_measures_are_taken(tmp_path: Path) -> None:
    (tmp_path / "test_failing.py").write_text(FAILING)
    arguments = {"TEST_ARGS": str(tmp_path / "test_failing.py"), "BENCH_ARGS": "--seconds 0 --only resnet"}
    code, summary = run(tmp_path, **arguments)
    expected = {"install": "ok", "machine": "ok", "tests": "FAILED: tests.log", "bench": "ok"}
    assert (code, outcomes(summary)) == (1, expected), summary
    assert "test_failing.py::test_it" in summary


def test_a_part_that_hangs_is_ended(tmp_path: Path) -> None:
    (tmp_path / "test_hanging.py").write_text(HANGING)
    arguments = {"TEST_ARGS": str(tmp_path / "test_hanging.py"), "BENCH_ARGS": "--seconds 0 --only resnet"}
    code, summary = run(tmp_path, TEST_SECONDS="10", **arguments)
    expected = {"install": "ok", "machine": "ok", "tests": "FAILED: it exceeded 10 s", "bench": "ok"}
    assert (code, outcomes(summary)) == (1, expected), summary
    assert "KeyboardInterrupt" in (tmp_path / "out" / "tests.log").read_text()


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    done = subprocess.run([ROOT / "tests" / "gpu" / "run.sh", tmp_path / "none", tmp_path], capture_output=True)
    assert (done.returncode, done.stderr[:6]) == (2, b"usage:")


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
    command = [
        sys.executable,
        "-m",
        "bench.gpu",
        "--out",
        str(tmp_path),
        "--mib",
        "1",
        "--turn",
        "0.02",
        "--rounds",
        "1",
    ]
    command += ["--only", "copies", "--only", "hand-over", "--only", "host-to-device"]
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
        f"ResNet-50 size, {flight} in flight, {how}" for how in ("dynamic batching", "no batching") for flight in (1, 4)
    ]
    assert all(row.value is not None and row.value > 0 for row in rows)
