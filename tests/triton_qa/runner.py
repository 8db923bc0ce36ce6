"""Runs the script of one suite and reads what the recorder has written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import shmserve
from tests.triton_qa.catalog import Suite
from tests.triton_qa.workplace import HERE, INSTALLED, VERSION, Workplace

END_S = 30
ENVIRONMENT = {
    "TRITON_SERVER_CPU_ONLY": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "TEST_WINDOWS": "0",
    "TEST_JETSON": "0",
    "TEST_SYSTEM_SHARED_MEMORY": "0",
    "TEST_CUDA_SHARED_MEMORY": "0",
    "SERVER_TIMEOUT": "120",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTEST_PLUGINS": "qa_pytest",
}
BACKENDS = "onnx libtorch python"


@dataclass(frozen=True)
class Result:
    """One unit test, run once. The same test may run several times, against servers with other flags."""

    suite: str
    file: str
    test: str
    server: int
    """Number of servers that the script had started, which identifies the variant."""
    outcome: str
    reason: str
    seconds: float

    @property
    def name(self) -> str:
        return f"{self.test}#{self.server}"


def run(suite: Suite, place: Workplace, data: Path, packages: Path, log: Path) -> tuple[list[Result], str]:
    """The results, and the failure of the script as a whole, if any."""
    results, starts = place.folder / "results.jsonl", place.folder / "starts.jsonl"
    folder = place.qa / suite.name
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "BACKENDS": BACKENDS,
        **_installed(suite, place, data),
        **suite.environment,
        "PATH": f"{place.shims}:{place.folder / INSTALLED[1:] / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(HERE / "recorder"),
        "TRITON_QA_RESULTS": str(results),
        "TRITON_QA_STARTS": str(starts),
        "TRITON_QA_BACKENDS": str(place.folder / INSTALLED[1:] / "backends"),
        "TRITON_QA_MORE": sysconfig.get_path("purelib"),
        "TRITON_QA_FLAGS": "\n".join(suite.flags),
        "SHMSERVE_MODEL_QA_PACKAGES": str(packages),
        "SHMSERVE_MODEL_QA_RESULTS": str(results),
        "SHMSERVE_MODEL_QA_STARTS": str(starts),
        "NVIDIA_TRITON_SERVER_VERSION": VERSION,
        "TRITON_SERVER_VERSION": shmserve.__version__,
    }
    wrong = ""
    command = ["bash", suite.script, VERSION]
    with log.open("w") as out:
        streams: Any = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
        process = subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, **streams)
        try:
            process.wait(suite.limit_s)
        except subprocess.TimeoutExpired:
            wrong = f"not done after {suite.limit_s} s"
        finally:
            _end(process)
    return list(read(suite.name, results)), wrong


def _installed(suite: Suite, place: Workplace, data: Path) -> dict[str, str]:
    """Variables that a suite's script exports for those in its subfolders, which are separate suites here."""
    if "/" not in suite.name:
        return {}
    server = place.folder / INSTALLED[1:]
    return {
        "TRITON_DIR": str(server),
        "SERVER": str(server / "bin" / "tritonserver"),
        "BACKEND_DIR": str(server / "backends"),
        "DATADIR": str(data),
        "MODELDIR": str((place.qa / suite.name).parent),
        "REPO_VERSION": VERSION,
    }


def _end(process: subprocess.Popen[bytes]) -> None:
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, how)
            process.wait(END_S)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            pass


def read(suite: str, path: Path) -> Iterator[Result]:
    """Reads the results. A test that started but has no outcome has crashed its process, or was interrupted."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    open_tests: dict[tuple[str, str, int], Result] = {}
    for line in lines:
        result = Result(suite, **line)
        key = (result.file, result.test, result.server)
        if result.outcome == "started":
            open_tests[key] = result
        else:
            open_tests.pop(key, None)
            yield result
    for result in open_tests.values():
        yield Result(suite, result.file, result.test, result.server, "failed", "has not ended", 0.0)
