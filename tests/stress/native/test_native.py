"""Native backends for long: no growth over many batches, and no reports of the sanitizers. SHMSERVE_NATIVE_BATCHES is
the number of batches."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from shmserve.testing import Server
from shmserve.workers.backends.native.compiler import SOURCES
from tests import ROOT
from tests.support.launch import workers_of
from tests.support.workers.native_backends import compiled, model, run

pytestmark = [pytest.mark.process]
HERE = Path(__file__).parent
BATCHES = int(os.environ.get("SHMSERVE_NATIVE_BATCHES", "400"))
PROBE = ROOT / "tests" / "process" / "worker" / "native" / "backend.c"
CONFIG = """
backend: "probe"
max_batch_size: 8
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
"""
FAILING = ("error", "fail", "never")
GROWTH_BYTES = 4 << 20
GROWING = """
import sys
from pathlib import Path
import numpy as np
from shmserve.protocol.messages import Options, Tensor
from shmserve.protocol.worker_messages import Work
from bench.suites.native import loaded

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

def work(number, width, options):
    data = np.ones(width, np.float32).tobytes()
    return Work(number, 1, (Tensor("IN", "FP32", (1, width), data),), None, "user", options)

model = loaded(Path(sys.argv[1]))
batches = []
for what in (None, "", "error", "fail", "never", "delete", "late"):
    options = None if what is None else Options(id="a", parameters={"do": what, "n": 1})
    batches += [[work(number, width, options) for number in range(8)] for width in (4, 1000)]
large = [work(number, 2000, Options(parameters={"do": "delete"})) for number in range(8)]
def turn():
    for batch in [*batches, large]:
        rows, _, _ = model.runner.run(batch)
        assert len(rows) == 8
        for row in rows:
            model.runner.discard(row)
for _ in range(20):
    turn()
before = resident()
for _ in range(int(sys.argv[2]) // len(batches)):
    turn()
print(resident() - before)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(PROBE, tmp_path_factory.mktemp("library") / "libtriton_probe.so")


def test_many_batches_do_not_grow_the_process(library: Path, tmp_path: Path) -> None:
    model(tmp_path, "probe", library, CONFIG)
    command = [sys.executable, "-c", GROWING, str(tmp_path / "probe"), str(BATCHES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) < GROWTH_BYTES


def test_the_shim_has_no_data_races(tmp_path: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("cc is not installed")
    program = tmp_path / "driver"
    sources = [str(HERE / "driver.c"), *map(str, SOURCES.glob("*.c"))]
    flags = ["-std=gnu11", "-g", "-O1", "-fsanitize=thread", "-pthread", f"-I{SOURCES}"]
    run(["cc", *flags, "-o", str(program), *sources])
    done = subprocess.run([program, str(BATCHES)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{8 * BATCHES} released, {(6 + 3 * 2) * BATCHES} sent\n"


def test_address_sanitizer_reports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shim and the backend are compiled with it, and run in a server."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("cc is not installed")
    runtime = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    wrapper = tmp_path / "bin" / "cc"
    wrapper.parent.mkdir()
    # The runtime is preloaded, so its symbols are undefined when the shim is linked.
    wrapper.write_text(f'#!/bin/sh\nexec {compiler} -fsanitize=address "$@" -Wl,-z,undefs\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{wrapper.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("CACHE_DIRECTORY", str(tmp_path / "cache"))
    library = compiled(PROBE, tmp_path / "libtriton_probe.so")
    model(tmp_path / "models", "probe", library, CONFIG)
    monkeypatch.setenv("LD_PRELOAD", runtime.stdout.strip())
    monkeypatch.setenv("ASAN_OPTIONS", "detect_leaks=0")
    options = ["--model-environment", "LD_PRELOAD", "--model-environment", "ASAN_OPTIONS"]
    x = np.ones((1, 3000), np.float32)
    with Server(tmp_path / "models", *options) as server, server.client() as client:
        (worker,) = workers_of(server.pid)
        assert "libasan" in Path(f"/proc/{worker}/maps").read_text()
        for what in ["", "delete", "late", "error", "fail", "never"] * 3:
            for width in (4, 3000):
                futures = [client.submit("probe", {"IN": x[:, :width]}, parameters={"do": what}) for _ in range(10)]
                assert [future.exception() is None for future in futures] == [what not in FAILING] * 10
        for _ in range(20):
            client.infer("probe", {"IN": x[:, :4]})
    assert "AddressSanitizer" not in server.log
