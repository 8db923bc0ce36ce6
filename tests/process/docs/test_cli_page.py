"""Every command of docs/cli.md, and the read-only ones of other pages, in a separate process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE

import numpy as np
import pytest

from shmserve.clients.cli.parser import parser
from shmserve.repo import samples
from shmserve.testing import Server
from tests import ROOT
from tests.support.docs import pages
from tests.support.shared_server import SharedServer

pytestmark = pytest.mark.process

END_S = 60
COMMANDS = pages.commands("cli")


@pytest.fixture(scope="module")
def server(place: Path, shared_server: SharedServer) -> Iterator[Server]:
    with shared_server.serving(place / "build" / "samples") as server:
        yield server


def environment(server: Server, place: Path) -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if not name.startswith("SHMSERVE")}
    found["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    found["PATH"] = f"{place}/bin{os.pathsep}{os.environ['PATH']}"
    found["XDG_CONFIG_HOME"] = str(place / "config")
    return found | {"SHMSERVE_RUNTIME_DIR": str(server.runtime_dir), "SHMSERVE_URL": server.url}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the files that the page's commands read, and the program."""
    found = tmp_path_factory.mktemp("place")
    np.save(found / "x.npy", np.ones((2, 64), np.float32))
    shutil.copy(next((ROOT / "repo" / "examples").glob("*.png")), found / "photo.png")
    (found / "request.json").write_text('{"inputs": {"INPUT0": [1, 2, 3, 4], "INPUT1": [4, 3, 2, 1]}}')
    (found / "config.json").write_text('{"backend": "onnxruntime", "max_batch_size": 32}')
    samples.build(found / "build" / "samples", lambda text: None)
    shutil.copy(found / "build" / "samples" / "mlp" / "1" / "model.onnx", found)
    program = found / "bin" / "shmserve"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m shmserve.clients.cli.main "$@"\n')
    program.chmod(0o755)
    return found


def of_page(line: str, server: Server, place: Path) -> None:
    shell, given = ["sh", "-c", line], environment(server, place)
    ran = subprocess.run(shell, env=given, cwd=place, capture_output=True, text=True, check=False, timeout=END_S)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout or " > " in line or "--level" in line
    if "--json" in line:
        json.loads(ran.stdout)


CHANGING = ("load", "unload", "restart", "traffic", "drain")
OPERATING = [line for line in COMMANDS if line.split()[1] in CHANGING]
LIFECYCLE = [line for line in pages.commands("lifecycle") if line.split()[1:2][0] in CHANGING]
ELSEWHERE = ("serve", "gateway", "build", "chat", "pull", "convert", "quantize")
"""Commands that run until they are stopped, or that need a GPU, a language model, a hub or another framework, have
their own tests."""


ELSEWHERE_SHOWN = [
    line
    for page in ("lifecycle", "metrics", "operations")
    for line in pages.commands(page)
    if line.startswith("shmserve ") and line.split()[1] in ("models", "stats", "ready", "config", "logs", "version")
]
"""Read-only commands of other pages."""
ENDLESS = [line for line in COMMANDS if {"--watch", "-f", "--follow"} & set(line.split())]


QUIET = [line for line in COMMANDS if line not in OPERATING + ENDLESS and line.split()[1] not in ELSEWHERE]


@pytest.mark.parametrize("line", [*QUIET, *sorted({*ELSEWHERE_SHOWN} - {*COMMANDS})])
def test_every_command_of_the_pages(line: str, server: Server, place: Path) -> None:
    of_page(line, server, place)


@pytest.mark.parametrize("line", ENDLESS)
def test_every_command_of_the_page_that_runs_until_ctrl_c(line: str, server: Server, place: Path) -> None:
    command, given = [str(place / "bin" / "shmserve"), *line.split()[1:]], environment(server, place)
    with subprocess.Popen(command, env=given, cwd=place, stdout=PIPE, stderr=PIPE, text=True) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        errors = process.communicate(timeout=END_S)[1]
    assert process.returncode == 130
    assert errors == f"shmserve {line.split()[1]}: interrupted\n"
    assert json.loads(first) if "--json" in line else first.strip()


def test_the_commands_of_the_page_that_change_served_models(place: Path) -> None:
    """In order, on a separate server."""
    options = ["--model-control-mode", "explicit", "--load-model", "*"]
    mlp = place / "build" / "samples" / "mlp"
    with Server(mlp.parent, *options) as server:
        for line in [*OPERATING, *LIFECYCLE]:
            if line in LIFECYCLE:
                for version in ("2", "3"):
                    shutil.copytree(mlp / "1", mlp / version, dirs_exist_ok=True)
            if "--previous" in line:  # which needs two loads that changed something
                of_page("shmserve load mlp", server, place)
                of_page("shmserve load mlp --config-json config.json", server, place)
            of_page(line, server, place)


def test_the_page_has_every_command() -> None:
    """Except dev, which runs until it is stopped, and tune, which takes long: their own tests run them."""
    used = {line.rpartition("shmserve ")[2].split()[0] for line in COMMANDS}
    (commands,) = (action.choices for action in parser()._actions if action.dest == "command")  # noqa: SLF001
    assert used | {"dev", "tune"} == {*(commands or ())}
