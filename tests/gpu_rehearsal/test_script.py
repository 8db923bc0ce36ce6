"""tests/gpu/run.sh without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.support.cases import cases

pytestmark = pytest.mark.process
FILES = {"install.log", "machine.log", "tests.log", "tests.xml", "bench.log", "results.json", "results.md"}
MEASURES = {"hand-over", "copies", "host-to-device", "resnet", "overlap", "lone", "throughput"}
TEST = """
import select
import pytest


@pytest.mark.gpu
def test_it():
    {body}
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
    assert " skipped, " in summary
    assert " passed" not in summary
    rows = json.loads((out / "results.json").read_text())["rows"]
    assert {row["measure"]: row["verdict"] for row in rows} == dict.fromkeys(MEASURES, "skipped")
    assert "| resnet | - | - | skipped |" in summary
    assert "Python 3" in (out / "machine.log").read_text()


@cases(
    ("assert 1 == 2", "FAILED: tests.log", "test_it.py::test_it"),
    ("select.select([], [], [])", "FAILED: it exceeded 10 s", "KeyboardInterrupt"),
    ids=["fails", "hangs"],
)
def test_after_a_failed_or_hanging_test_the_measures_are_taken(
    body: str, outcome: str, logged: str, tmp_path: Path
) -> None:
    test = tmp_path / "test_it.py"
    test.write_text(TEST.format(body=body))
    code, summary = run(tmp_path, TEST_SECONDS="10", TEST_ARGS=str(test), BENCH_ARGS="--seconds 0 --only resnet")
    expected = {"install": "ok", "machine": "ok", "tests": outcome, "bench": "ok"}
    assert (code, outcomes(summary)) == (1, expected), summary
    assert logged in (tmp_path / "out" / "tests.log").read_text()


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    done = subprocess.run([ROOT / "tests" / "gpu" / "run.sh", tmp_path / "none", tmp_path], capture_output=True)
    assert (done.returncode, done.stderr[:6]) == (2, b"usage:")
