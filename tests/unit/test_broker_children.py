"""What the broker does with the processes that it starts: their words become lines, their ends words."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from shmserve.broker.children import LINE_BYTES, Output, ended_with, environment


class Loop:
    def __init__(self) -> None:
        self.removed: list[int] = []

    def remove_reader(self, descriptor: int) -> None:
        self.removed.append(descriptor)


@pytest.fixture
def output() -> Iterator[Output]:
    found = Output(Loop(), {"verbose": "debug", "error": "error"})
    yield found
    found.close()


def test_lines(output: Output) -> None:
    with os.fdopen(output.written, "wb", buffering=0) as child:
        assert not [*output.lines()]
        child.write(b"verbose: one: more\nerror:no\nwarning: two\nhal")
        assert [*output.lines()] == [
            ("verbose: one: more", "debug", "one: more"),
            ("error:no", "info", "error:no"),
            ("warning: two", "info", "warning: two"),
        ]
        child.write(b"f\nerror: \x1b[2J\xff\r\nthe rest")
        assert [*output.lines()] == [
            ("half", "info", "half"),
            (r"error: \x1b[2J\xff\r", "error", r"\x1b[2J\xff\r"),
        ]
    assert [*output.lines()] == [("the rest", "info", "the rest")]
    assert output._loop.removed == [output.descriptor]
    assert not [*output.lines()]


def test_what_has_no_end_is_cut(output: Output) -> None:
    with os.fdopen(output.written, "wb", buffering=0) as child:
        child.write(b"x" * LINE_BYTES)
        assert not [*output.lines()]
        child.write(b"yz")
        ((line, _, _),) = output.lines()
        assert line == "x" * LINE_BYTES
        child.write(b"next\n")
        assert [line for line, _, _ in output.lines()] == ["next"]


def test_ends() -> None:
    assert ended_with(3) == "exit code 3"
    assert ended_with(-signal.SIGSEGV) == "signal SIGSEGV"
    assert ended_with(-1000) == "signal 1000"


def test_secrets_stay_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.setenv("SSL_CERT_FILE", "x")
    monkeypatch.setenv("SOME_SECRET", "x")
    assert {"TZ", "SSL_CERT_FILE"} <= set(environment("SSL_", "OPENSSL_"))
    assert "SSL_CERT_FILE" not in environment()
    assert "SOME_SECRET" not in environment("SSL_")
