"""Workers run on the cores and with the number of threads of their instance."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shmserve.broker.processes.workers import Workers, WorkerSettings
from shmserve.core.effects import Spawn
from shmserve.core.policy import InstanceSpec

pytestmark = pytest.mark.process

CORE = min(os.sched_getaffinity(0))
VARIABLES = ("SHMSERVE_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
OWN_VARIABLES = {"OMP_NUM_THREADS": "2,1", "OPENBLAS_NUM_THREADS": "7", "MKL_NUM_THREADS": ""}
PATIENCE_S = 60.0
LOOK = """\
import os, sys
import shmserve.workers.main as worker
assert not {"numpy", "onnxruntime"} & set(sys.modules), "the libraries read the variables when they are imported"
names = %r
found = lambda: (*sorted(os.sched_getaffinity(0)), *map(os.environ.get, names))
worker._serve = lambda *_: print("found", *found(), flush=True) or 0
"""


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def environment_of_worker(spec: InstanceSpec, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The cores and environment variables of a worker at the point where it would start to serve."""
    folder.joinpath("look.py").write_text(LOOK % (VARIABLES,) + "sys.exit(worker.main(sys.argv[1:]))\n")
    popen = subprocess.Popen

    def with_look(command: list[str], **more: Any) -> Any:
        assert command[:3] == [sys.executable, "-m", "shmserve.workers.main"]
        return popen([sys.executable, str(folder / "look.py"), *command[3:]], **more)

    monkeypatch.setattr(subprocess, "Popen", with_look)

    async def run() -> list[str]:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[str] = loop.create_future()
        lines: list[str] = []
        workers = Workers(
            loop,
            lambda *_: None,
            lambda peer, pid, reason, error, detail: ended.set_result(reason),
            lambda _, line, about: lines.append(line),
            WorkerSettings(),
        )
        workers.spawn(Spawn(1, "m", 1, 0, spec))
        assert await asyncio.wait_for(ended, PATIENCE_S) == "exit code 0", lines
        assert not len(workers)
        (line,) = [line for line in lines if "found " in line]
        return line.partition("found ")[2].split()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("spec", "variables", "threads"),
    [
        (InstanceSpec("m_0_0", cpus=(CORE,), threads=3), {}, ["3"] * 5),
        (InstanceSpec("m_0_0", cpus=(CORE,)), {}, ["None"] * 5),
        (InstanceSpec("m_0_0", threads=5), OWN_VARIABLES, ["2", "2,1", "7", "2", "2"]),
    ],
    ids=["set", "not set", "variables of the environment take precedence"],
)
def test_cores_and_threads(
    spec: InstanceSpec, variables: dict[str, str], threads: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    cores = map(str, spec.cpus or sorted(os.sched_getaffinity(0)))
    assert environment_of_worker(spec, tmp_path, monkeypatch) == [*cores, *threads]
