"""Output of the commands on a terminal: its width and its colours reach the tables.

tests/unit/terminal covers the tables themselves, and what decides on colours.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmserve.testing import Server
from tests.support.commands import COMMAND
from tests.support.living import group, identity
from tests.support.model_files import write_model
from tests.support.system.terminal import Terminal

pytestmark = pytest.mark.process

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


def on_a_terminal(words: list[str], columns: int) -> str:
    with Terminal([*COMMAND, *words], columns, 24, {"TERM": "xterm"}) as terminal:
        terminal.ends()
        return terminal.raw.decode().replace("\r\n", "\n")


@pytest.mark.parametrize(
    ("command", "columns"), [("models", 80), ("models", 250), ("models --instances", 60), ("stats", 60), ("check", 60)]
)
def test_tables_fit_the_terminal(server: Server, root: Path, command: str, columns: int) -> None:
    words = ["check", str(root)] if command == "check" else [*command.split(), "--url", server.url]
    colored = on_a_terminal(words, columns)
    text = ESCAPE.sub("", colored)
    assert "\x1b[" in colored
    assert max(map(len, text.splitlines())) <= columns
    assert LONG[:12] in text
    assert ("not shown in" in text) is (columns < 100 and command != "check")
    if (command, columns) == ("models", 80):
        reason = r'^broken .* UNAVAILABLE .*\n    broken/config.pbtxt:1:1: backend: found "onnx"'
        assert re.search(reason, text, re.MULTILINE)
