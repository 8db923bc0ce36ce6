"""Coverage-guided fuzzing, seeded: 20,000 inputs here, SHMSERVE_FUZZ of them (a million) with `make stress`.

An input of `lane` is a series of up to 200 events, so fewer inputs are run. A failure shows the input in hex; once
fixed, it becomes a separate test of the module with the bug.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed"),
]

INPUTS = int(os.environ.get("SHMSERVE_FUZZ", "20000"))
SEED = int(os.environ.get("SHMSERVE_SEED", "1"))
SHARES = {"decode": 0.50, "lease": 0.10, "override": 0.24, "config": 0.15, "lane": 0.01}
if INPUTS > 20000:  # else its own tests have to do
    SHARES |= {"decode": 0.40, "http": 0.10}
LIMIT_S = 120 + INPUTS / 200


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of all targets, which have run in parallel, each in a process."""
    folder = tmp_path_factory.mktemp("fuzz")
    runs = [f"{name}={int(INPUTS * share)}" for name, share in SHARES.items()]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.stress.fuzz.run", str(SEED), str(folder), *runs],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": "0"},
            start_new_session=True,
        )
    try:
        code = process.wait(LIMIT_S)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    assert code == 0, (folder / "log").read_text(errors="replace")
    return folder


@pytest.mark.parametrize("name", list(SHARES))
def test_only_documented_errors_are_raised(name: str, ended: Path) -> None:
    folder = ended / name
    code = int((folder / "code").read_text())
    told = (folder / "log").read_text(errors="replace").splitlines()
    findings = [path.read_bytes().hex() for path in folder.iterdir() if path.name.startswith(("crash-", "timeout-"))]
    assert code == 0, "\n".join([f"{name}, seed {SEED}: input {findings}", *told[-60:]])
    done = next(int(line.split()[1]) for line in told if line.startswith("stat::number_of_executed_units:"))
    assert done >= int(INPUTS * SHARES[name]) - 1
