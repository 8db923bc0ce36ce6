"""Help that fits a screen, and suggestions for misspelled words."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from typing import Any

import pytest

from shmserve.clients.cli import main, parser
from shmserve.terminal import help_text
from tests.support.cases import cases

COLUMNS, ROWS = 80, 24


def actions_of(command: argparse.ArgumentParser) -> list[Any]:
    return command._actions  # noqa: SLF001 - argparse has no public list of options


def commands() -> dict[str, Any]:
    (found,) = (action.choices for action in actions_of(parser.parser()) if action.dest == "command")
    return dict(found)


ASKING = {"models", "load", "unload", "restart", "infer", "stats", "top", "ready", "config", "version", "demo"}
ALONE = {"run", "dev", "check", "init", "build", "completion"}
"""Commands that do not connect to a server."""


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
def test_help_fits_a_screen_and_help_all_has_the_rest(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The full help has examples that parse, and exit codes. Options of other programs are synonyms of known ones."""
    brief = said([*command.split(), "--help"], capsys)
    lines = brief.splitlines()
    assert len(lines) <= ROWS
    assert max(map(len, lines)) <= COLUMNS
    assert lines[0].startswith(f"usage: shmserve {command}".rstrip())
    assert f"shmserve {command} --help-all".replace("  ", " ") in lines[-1]
    assert brief.count("(") == brief.count(")")
    if command:
        full = said([command, "--help-all"], capsys)
        actions = [action for action in actions_of(commands()[command]) if action.help is not argparse.SUPPRESS]
        options = [name for action in actions for name in action.option_strings]
        assert [name for name in options if not re.search(rf"(?<![\w-]){name}(?![\w-])", full)] == []
        assert set(re.findall(r"--[a-z-]+", brief)) <= set(re.findall(r"--[a-z-]+", full)) | {"--help-all"}
        assert len(full.splitlines()) > len(brief.splitlines())
    found = commands()[command or "serve"]
    known = {name for action in actions_of(found) for name in action.option_strings}
    assert set(found.synonyms.values()) <= known
    assert not known & set(found.synonyms), "these would never be suggested"
    if command in ASKING | ALONE:
        assert f"examples:\n  shmserve {command}" in full
        assert ("--url" in full) is ("--runtime-dir" in full) is (command in ASKING)
        assert re.search(r"exit codes:\n  0    \w.*\n  1    \w.*\n  2    wrong usage\n  130  interrupted\n", full)
        sentence = full.split("\n\n")[1]
        assert sentence[0].isupper()
        assert sentence.rstrip().endswith(".")
        examples = [line.strip().split("    ")[0].rpartition("| ")[2] for line in commands()[command].examples]
        parsed = [parser.parser().parse_args(shlex.split(line)[1:]) for line in examples if line.startswith("shmserve")]
        assert parsed


@cases(
    ("modles", "shmserve: error: unknown command 'modles'; did you mean models?"),
    ("status", "shmserve: error: unknown command 'status'; did you mean models?"),
    ("xyzzy", "shmserve: error: unknown command 'xyzzy'\n"),
    ("infer mlp --randm", "shmserve infer: error: unknown option --randm; did you mean --random?"),
    ("infer mlp --inptu=x=1", "shmserve infer: error: unknown option --inptu; did you mean --input?"),
    ("models --jsn --instnces", "--jsn; did you mean --json?; unknown option --instnces; did you mean --inst"),
    ("config mlp cnn", "shmserve config: error: too many arguments: cnn\n"),
    ("bench mlp --duration 10s", "shmserve bench: error: unknown option --duration; did you mean --window?"),
)
def test_suggestions(words: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = said(words.split(), capsys, code=2)
    assert text in error
    command = text.partition(":")[0] if text.startswith("shmserve") else "shmserve models"
    assert error.endswith(f"`{command} --help` explains its use\n")


def test_without_a_command_help_is_printed_and_the_exit_code_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([]) == 2
    text = capsys.readouterr().err
    listed = re.findall(r"^  (\w+)  ", text, re.MULTILINE)
    assert listed == [name for group in parser.USUAL for name, _ in group] + ["others"]
    assert {*commands()} <= set(re.findall(r"\w+", text))


@pytest.mark.parametrize("word", ["--help", "version", "--version"])
def test_help_and_version_import_only_what_they_need(word: str) -> None:
    program = "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); "
    program += f"from shmserve.clients.cli.main import main; main([{word!r}])"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    modules = set(ran.stderr.split())
    assert "shmserve.clients.cli.parser" in modules
    heavy = {"numpy", "zmq", "msgspec", "argcomplete", "subprocess"}
    if word == "--help":
        heavy |= {"rich", "asyncio", "difflib", "shmserve.terminal.console", "shmserve.session"}
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
