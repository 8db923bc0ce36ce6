"""Arguments of `shmserve top` that are refused before a server is asked, and what a live view needs."""

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


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        ("--sort p9 --url unix:///x", 2, "unknown column 'p9'; did you mean 'p99'?"),
        ("--token-file x --url unix:///x", 2, "--token-file is for servers at http://"),
        ("--url http://127.0.0.1:1", 1, "no server at http://127.0.0.1:1"),
        ("--url http://127.0.0.1:1 --token-file /nowhere", 2, "cannot read a token from /nowhere: No such file"),
        ("--url ftp://x", 2, "invalid url 'ftp://x'"),
        (LONG, 1, f"; of a model: did you mean --filter {LONG}?"),
        ("unix:///x --table servers", 2, "--table servers is for several servers; of one: models, instances"),
        ("a b --url http://c", 2, "name servers either as words, or one by --url or --runtime-dir"),
        ("a a:8000", 2, "a server is named twice"),
        ("a b --table clients", 2, "--table clients is for one server; of several: servers, models, by-server"),
        ("a b --sort holdings", 2, "unknown column 'holdings'"),
        ("a b --metrics-url http://a:1", 2, "--metrics-url is given 1 times, for 2 servers over HTTP"),
        ("a b:x", 2, "invalid server 'b:x': expected HOST, HOST:PORT or a URL"),
        ("a b/v2", 2, "invalid server 'b/v2': expected HOST, HOST:PORT or a URL"),
        ("a ftp://x", 2, "invalid url 'ftp://x'"),
        ("a tcp://b:5555", 2, "--server-key"),
    ],
)
def test_invalid_arguments_are_refused(words: str, code: int, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert text in refused(f"--once {words}", code, capsys)


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
