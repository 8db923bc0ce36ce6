"""Where a backend in C reads and writes: in the memory of requests, in parts, and on a GPU; and errors of its life."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.support.workers.native_backends import compiled

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("native")]
HERE = Path(__file__).parent


@pytest.mark.parametrize("case", ["inputs", "place", "host", "gpu", "initialization", "finalization"])
def test_a_backend_in_a_process_of_its_own(tmp_path: Path, case: str) -> None:
    library = compiled(HERE / "backend.c", tmp_path / "libtriton_probe.so")
    command = [sys.executable, "-m", "tests.process.worker.native.hosted", case, str(library)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
