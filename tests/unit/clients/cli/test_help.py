"""Help that fits a screen, and suggestions for misspelled words."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from typing import Any

import pytest

from shmserve.clients.cli import main, parser
from shmserve.terminal import help_text

COLUMNS, ROWS = 80, 24


def commands() -> dict[str, Any]:
    understood = parser.parser()
    found: Any = next(action for action in understood._actions if action.dest == "command").choices
    return dict(found)


@pytest.fixture(autouse=True)
def _small_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))


def said(words: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    with pytest.raises(SystemExit) as ended:
        main.main(words)
    assert ended.value.code == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


@pytest.mark.parametrize("command", ["", *sorted(set(commands()) - {"serve"})])
def test_help_fits_a_screen(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = said([*command.split(), "--help"], capsys).splitlines()
    assert len(lines) <= ROWS
    assert max(map(len, lines)) <= COLUMNS
    assert lines[0].startswith(f"usage: shmserve {command}".rstrip())
    assert f"shmserve {command} --help-all".replace("  ", " ") in lines[-1]
    text = " ".join(lines)
    assert text.count("(") == text.count(")")


@pytest.mark.parametrize("command", sorted(set(commands()) - {"serve"}))
def test_help_all_has_everything_that_help_leaves_out(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Everything that --help leaves out is in --help-all."""
    brief, full = said([command, "--help"], capsys), said([command, "--help-all"], capsys)
    actions = [action for action in commands()[command]._actions if action.help is not argparse.SUPPRESS]
    options = [name for action in actions for name in action.option_strings]
    assert [name for name in options if not re.search(rf"(?<![\w-]){name}(?![\w-])", full)] == []
    assert set(re.findall(r"--[a-z-]+", brief)) <= set(re.findall(r"--[a-z-]+", full)) | {"--help-all"}
    assert len(full.splitlines()) > len(brief.splitlines())


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("modles", "shmserve: error: unknown command 'modles'; did you mean models?"),
        ("status", "shmserve: error: unknown command 'status'; did you mean models?"),
        ("xyzzy", "shmserve: error: unknown command 'xyzzy'\n"),
        ("infer mlp --randm", "shmserve infer: error: unknown option --randm; did you mean --random?"),
        ("infer mlp --inptu=x=1", "shmserve infer: error: unknown option --inptu; did you mean --input?"),
        ("stats --frobnicate", "shmserve stats: error: unknown option --frobnicate\n"),
        (
            "models --jsn --instnces",
            "--jsn; did you mean --json?; unknown option --instnces; did you mean --instances?",
        ),
        ("config mlp cnn", "shmserve config: error: too many arguments: cnn\n"),
        ("bench mlp --duration 10s", "shmserve bench: error: unknown option --duration; did you mean --window?"),
    ],
)
def test_suggestions(words: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = said(words.split(), capsys, code=2)
    assert text in error
    command = text.partition(":")[0] if text.startswith("shmserve") else "shmserve models"
    assert error.endswith(f"`{command} --help` explains its use\n")


def test_options_of_other_programs_are_synonyms_of_known_options() -> None:
    for name, command in commands().items():
        known = set(command._option_string_actions)
        assert set(command.synonyms.values()) <= known, name
        assert not known & set(command.synonyms), f"{name}: these would never be suggested"


def test_help_imports_only_what_it_needs() -> None:
    program = "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); "
    program += "from shmserve.clients.cli.main import main; main(['--help'])"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    modules = set(ran.stderr.split())
    assert "shmserve.clients.cli.parser" in modules
    heavy = {
        "numpy",
        "zmq",
        "rich",
        "asyncio",
        "subprocess",
        "difflib",
        "shmserve.terminal.console",
        "shmserve.session",
    }
    assert not modules & heavy


def test_rows_are_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert help_text.rows([("-a", "one two three four five six seven"), ("--b C", "x")]) == [
        "  -a     one two three four five six",
        "         seven",
        "  --b C  x",
    ]
    long = "--a-name-that-is-longer-than-its-column"
    assert help_text.rows([(long, "text"), ("-b", "")])[0] == f"  {long}"
