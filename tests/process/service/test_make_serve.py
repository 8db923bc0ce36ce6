"""The first command of a newcomer, `make serve`, in the environment that make has made; `shmserve demo` beside it."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmserve.repo import ocr
from tests import ROOT

MADE = ROOT / ".venv" / ".serve"
NEWER = [ROOT / name for name in ("setup.cfg", "pyproject.toml")]
IS_MADE = MADE.exists() and all(MADE.stat().st_mtime >= path.stat().st_mtime for path in NEWER)
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not IS_MADE, reason="make has not set this environment up: run `make test`"),
]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    outer = ("MAKE", "MFLAGS", "ARGS", "SHMSERVE")
    found = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    return found | {"SHMSERVE_RUNTIME_DIR": str(tmp_path / "run")}


@pytest.fixture
def served(environment: dict[str, str]) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """The running `make serve`, in a process group of its own as in a terminal, and what it has said until ready."""
    with subprocess.Popen(
        ["make", "serve", "ARGS=--http-port 0 --grpc-port 0 --metrics-port 0"],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout
        said = []
        for line in process.stdout:
            said.append(line.rstrip())
            if "Ctrl-C stops the server" in line:
                break
        try:
            yield process, said
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
                process.stdout.read()


def test_serve_demo_and_ctrl_c(served: tuple[subprocess.Popen[str], list[str]], environment: dict[str, str]) -> None:
    process, said = served
    text = "\n".join(said)
    names = ["add_sub", "cnn", "mlp"] + ([ocr.MODEL] if ocr.model_file() else [])
    for name in names:
        assert f"'{name}' version 1 READY" in text
    assert "demo" in text
    assert "import numpy as np, shmserve" in text
    curl = shlex.split(text.partition("\n  curl ")[2].partition("\n\n")[0].partition("\n  curl ")[2])
    with urllib.request.urlopen(f"http://{curl[0]}", curl[curl.index("-d") + 1].encode(), 60) as answer:
        assert json.load(answer)["outputs"][0]["data"] == [11, 22, 33, 44]

    command = [str(ROOT / ".venv" / "bin" / "shmserve"), "demo", "--json"]
    demo = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd="/")
    assert demo.returncode == 0, demo.stdout + demo.stderr
    found = json.loads(demo.stdout)
    assert sorted(found) == names
    assert found["add_sub"]["sum"] == [11, 22, 33, 44]
    if ocr.MODEL in found:
        assert found[ocr.MODEL]["text"] == "Handles travel, tensors stay: 64 MiB, 0 copies"

    os.killpg(process.pid, signal.SIGINT)  # what the terminal does
    assert process.stdout
    rest = process.stdout.read()
    assert "stopped" in rest
    assert "Traceback" not in rest
    assert "Error" not in rest
    # make itself was interrupted too, and says so; the server under it has ended with 0.
    assert process.wait() == -signal.SIGINT
    assert not list((Path(environment["SHMSERVE_RUNTIME_DIR"])).glob("*.sock"))
