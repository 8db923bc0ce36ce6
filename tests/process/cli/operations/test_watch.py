"""`shmserve models` on terminals and for some models, and commands with --watch."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from shmserve.testing import Server
from tests.support.commands import COMMAND, IMPATIENT
from tests.support.living import identity
from tests.support.patience import PATIENCE_S
from tests.support.system.terminal import Terminal

pytestmark = pytest.mark.process

ESCAPE = re.compile(r"\x1b\[[\d;?]*[a-zA-Z]")


def write_models(root: Path) -> None:
    for name in ("first", "second"):
        identity(root, name)


def words(server: Server, *more: str) -> list[str]:
    return ["models", "--url", server.url, *more]


@pytest.mark.parametrize("columns", [60, 250])
def test_tables_have_the_width_and_the_colours_of_the_terminal(server: Server, columns: int) -> None:
    """tests/unit/terminal covers what is shown in which width, and what decides on colours."""
    with Terminal([*COMMAND, *words(server)], columns, 24, {"TERM": "xterm"}) as terminal:
        terminal.ends()
    shown = terminal.raw.decode().replace("\r\n", "\n")
    text = ESCAPE.sub("", shown)
    assert text != shown
    assert max(map(len, text.splitlines())) <= columns
    assert ("second" in text, "not shown in" in text) == (True, columns == 60)


@pytest.mark.parametrize("terminal", [True, False])
def test_watch_repeats_until_interrupted(server: Server, terminal: bool) -> None:
    ours, theirs = os.openpty() if terminal else os.pipe()
    command = [*COMMAND, *words(server, "first", "--watch", "0.05")]
    environment = os.environ | {"TERM": "xterm"}
    process = subprocess.Popen(command, stdout=theirs, stderr=subprocess.PIPE, env=environment)
    os.close(theirs)
    seen = b""
    try:
        while seen.count(b"READY") < 3:
            seen += os.read(ours, 4096)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        os.close(ours)
    seen = seen[: seen.rindex(b"READY")]  # the next picture may have been cut
    assert process.returncode == 130
    assert told == b"shmserve models: interrupted\n"
    assert seen.count(b"\x1b[H\x1b[2J") == terminal, "then the picture is overwritten"
    assert seen.count(b"\x1b[H") == (seen.count(b"model") if terminal else 0)
    assert b"second" not in seen


def test_check_with_watch_reads_the_repository_at_each_refresh(tmp_path: Path) -> None:
    identity(tmp_path, "m")
    command = [*COMMAND, "check", str(tmp_path), "--watch", "0.05", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["errors"] == 0
        (tmp_path / "m" / "config.pbtxt").write_text("max_batch_size: -1")
        while not json.loads(process.stdout.readline())["errors"]:
            pass
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130


def test_watch_ends_with_the_server(tmp_path: Path) -> None:
    identity(tmp_path, "only")
    with Server(tmp_path) as server:
        command = [*IMPATIENT, *words(server, "--watch", "0.05")]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"model")
    _, told = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert told.count(b"\n") == 1
