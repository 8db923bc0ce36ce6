"""Output of the commands on a terminal of its own: its width and its colours reach the tables.

tests/unit/terminal covers the tables themselves, and what decides on colours.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from shmserve.testing import Server
from tests.process.cli.commands import COMMAND
from tests.support.living import PATIENCE_S, group, identity
from tests.support.model_files import write_model

pytestmark = pytest.mark.process

MEMORY = re.compile(r" +[\d.]+ MiB")
"""It changes between two commands."""
ESCAPE = re.compile(r"\x1b\[[\d;?]*[a-zA-Z]")
LONG = "a_model_with_a_name_of_some_length"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    identity(root, "m")
    identity(root, LONG, group(3))
    write_model(root, "broken", 'backend: "onnx" max_batch_size: -1')
    return root


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Server]:
    with Server(root) as server:
        yield server


def environment(**variables: str) -> dict[str, str]:
    ignored = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TERM")
    return {name: value for name, value in os.environ.items() if name not in ignored} | variables


def on_a_terminal(words: list[str], columns: int, variables: Mapping[str, str] = {}) -> str:
    """The command's output on a terminal of this size."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    variables = {"TERM": "xterm", **variables}
    process = subprocess.Popen([*COMMAND, *words], stdout=theirs, env=environment(**variables))
    os.close(theirs)
    seen = b""
    try:
        while data := os.read(ours, 65536):
            seen += data
    except OSError:  # the other end is closed
        process.wait(PATIENCE_S)
    finally:
        process.kill()
        os.close(ours)
    return seen.decode().replace("\r\n", "\n")


def words(command: str, server: Server, root: Path) -> list[str]:
    return ["check", str(root)] if command == "check" else [*command.split(), "--url", server.url]


@pytest.mark.parametrize(
    ("command", "columns"),
    [("models", 60), ("models", 250), ("models --instances", 60), ("stats", 60), ("check", 60)],
)
def test_tables_fit_the_terminal(server: Server, root: Path, command: str, columns: int) -> None:
    text = on_a_terminal(words(command, server, root), columns)
    lines = ESCAPE.sub("", text).splitlines()
    assert max(map(len, lines)) <= columns
    assert LONG[:12] in text
    if command == "check":  # other commands show the processes of models, of which check has none
        assert "did you mean" in " ".join("".join(lines).split())
    assert "\x1b[" in text
    assert ("not shown in" in text) is (columns < 100 and command != "check")


def test_a_reason_is_shown_below_its_row(server: Server, root: Path) -> None:
    text = ESCAPE.sub("", on_a_terminal(words("models", server, root), 80))
    reason = r'^broken .* UNAVAILABLE .*\n    broken/config.pbtxt:1:1: backend: found "onnx"'
    assert re.search(reason, text, re.MULTILINE)


@pytest.mark.parametrize(
    ("before", "after", "variables", "colored"),
    [
        ([], [], {"NO_COLOR": "1"}, False),
        ([], ["--no-color"], {"FORCE_COLOR": "1"}, False),
        (["--color"], [], {"NO_COLOR": "1"}, True),  # before the command, as a global option
    ],
)
def test_color_follows_the_flag_and_the_environment(
    server: Server, root: Path, before: list[str], after: list[str], variables: dict[str, str], colored: bool
) -> None:
    text = on_a_terminal([*before, *words("models", server, root), *after], 120, variables)
    assert bool(re.search(r"\x1b\[32mREADY", text)) is colored
    assert ("\x1b" in text) is colored


def test_lines_in_a_pipe_are_not_truncated_or_colored(server: Server) -> None:
    def printed(**variables: str) -> str:
        command, variables = [*COMMAND, "models", "--url", server.url], variables | {"COLUMNS": "40"}
        return subprocess.run(command, env=environment(**variables), capture_output=True, text=True, check=True).stdout

    plain, colored = printed(), printed(FORCE_COLOR="1", TERM="xterm")
    assert "\x1b" not in plain
    assert len(plain.splitlines()) == 4
    assert plain.splitlines()[0].endswith("reason")
    lines = [line.rstrip() for line in ESCAPE.sub("", colored).splitlines()]
    assert [MEMORY.sub("", line) for line in lines] == [MEMORY.sub("", line) for line in plain.splitlines()]
    assert "\x1b[32mREADY" in colored
