"""A newcomer's first command, `make serve`, in the environment that make has created, with `shmserve demo` beside
it."""

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
from tests.support import living
from tests.support.docs import pages

MADE = ROOT / ".venv" / ".serve"
NEWER = [ROOT / name for name in ("setup.cfg", "pyproject.toml")]
IS_MADE = MADE.exists() and all(MADE.stat().st_mtime >= path.stat().st_mtime for path in NEWER)
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not IS_MADE, reason="make has not set this environment up: run `make test`"),
]


PORTS = "--http-port 0 --grpc-port 0 --metrics-port 0"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    outer = ("MAKE", "MFLAGS", "ARGS", "SHMSERVE")
    found = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    return found | {"SHMSERVE_RUNTIME_DIR": str(tmp_path / "run")}


def started(command: list[str], place: Path, variables: dict[str, str], errors: int) -> subprocess.Popen[str]:
    """In its own process group, as in a terminal."""
    none, pipe = subprocess.DEVNULL, subprocess.PIPE
    return subprocess.Popen(
        command, cwd=place, env=variables, stdin=none, stdout=pipe, stderr=errors, text=True, start_new_session=True
    )


@pytest.fixture
def served(environment: dict[str, str]) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """The running `make serve`, and its output until it is ready."""
    with started(["make", "serve", f"ARGS={PORTS}"], ROOT, environment, subprocess.STDOUT) as process:
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


OWN = next(block for block in pages.blocks((ROOT / "README.md").read_text(), "sh") if "--model-repository" in block)
"""The README's commands for serving the reader's own model."""


def in_a_shell(place: Path, environment: dict[str, str], lines: str, more: str = "") -> subprocess.Popen[str]:
    """A new shell that runs these lines, with more arguments for the last one, in a directory with a model."""
    if not place.exists():
        living.identity(place / "models", "mine")
        (place / ".venv").symlink_to(ROOT / ".venv")
    variables = environment | {"PATH": "/usr/local/bin:/usr/bin:/bin"}
    return started(["bash", "-ec", f"{lines.rstrip()} {more}"], place, variables, subprocess.PIPE)


def test_serve_demo_and_ctrl_c(
    served: tuple[subprocess.Popen[str], list[str]], environment: dict[str, str], tmp_path: Path
) -> None:
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
    demo = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd="/")
    assert sorted(json.loads(demo.stdout)) == names

    place = tmp_path / "own"
    with in_a_shell(place, environment, OWN, PORTS) as second:
        assert "give this one another --runtime-dir" in second.communicate()[1]

    os.killpg(process.pid, signal.SIGINT)  # as the terminal does
    assert process.stdout
    rest = process.stdout.read()
    assert "stopped" in rest
    assert "Traceback" not in rest
    assert "Error" not in rest
    # make itself was also interrupted, and prints that; the server that it runs has exited with 0.
    assert process.wait() == -signal.SIGINT
    assert not list((Path(environment["SHMSERVE_RUNTIME_DIR"])).glob("*.sock"))

    with in_a_shell(place, environment, OWN, PORTS) as own:
        assert own.stderr
        try:
            for line in own.stderr:
                if " ready: " in line:
                    break
            with in_a_shell(place, environment, f"{OWN.splitlines()[0]}\nshmserve models --json") as other:
                assert other.stdout
                assert [entry["state"] for entry in json.load(other.stdout)] == ["READY"]
        finally:
            os.killpg(own.pid, signal.SIGINT)
            own.communicate()
    assert own.returncode in (0, -signal.SIGINT)
