"""`shmserve top` without a server, and what a live view needs."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from shmserve.clients.cli import main
from shmserve.extras import install_command

LONG = "m" * 64
"""A label of a host name has at most 63 characters, so no name server is asked for this one."""


def refused(words: str, code: int, capsys: pytest.CaptureFixture[str]) -> str:
    assert main.main(["top", *words.split()]) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("shmserve top: ")
    assert said.err.count("\n") == 1
    return said.err


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no server at http://127.0.0.1:1" in refused("--once --url http://127.0.0.1:1", 1, capsys)
    assert f"; of a model: did you mean --filter {LONG}?" in refused(f"--once {LONG}", 1, capsys)


def test_a_live_view_needs_a_terminal_and_textual(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "a live view needs a terminal; --once prints a snapshot, --json a line at each refresh"
    assert text in refused("", 2, capsys)
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "dumb")
    assert "TERM says that this one cannot; use --once" in refused("", 2, capsys)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    text = f"a live view needs the package textual: {install_command('top')}; --once and --json work without it"
    assert text in refused("", 1, capsys)
