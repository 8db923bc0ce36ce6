"""The gRPC listener on real sockets, with grpcio as the client.

test_grpc.py tests streams, deadlines and errors of a complete gateway, test_tls.py its certificates.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests import ROOT

pytestmark = pytest.mark.process

WAIT_S = 60.0
HERE = ROOT / "tests" / "support" / "gateway"
Ask = Callable[..., Any]


class Program:
    """Answers each line of JSON with another."""

    def __init__(self, name: str) -> None:
        command = [sys.executable, str(HERE / name)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, line: str) -> Any:
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)
        return self.answer()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


@contextmanager
def running(name: str) -> Iterator[Program]:
    program = Program(name)
    yield program
    program.process.communicate(timeout=WAIT_S)
    assert program.process.returncode == 0


@pytest.fixture(scope="module")
def opened() -> Iterator[tuple[Program, list[int]]]:
    with running("grpc_listeners.py") as program:
        yield program, program.answer()
        assert program.ask("held") == 0


@pytest.fixture(scope="module")
def caller(opened: tuple[Program, list[int]]) -> Iterator[Ask]:
    with running("grpc_caller.py") as program:
        yield lambda do, listener=0, **more: program.ask(json.dumps({"do": do, "port": opened[1][listener], **more}))


@pytest.mark.parametrize(("size", "times"), [(0, 3), (300, 20), (70_000, 5), (20 << 20, 2)])
def test_sequential_calls(caller: Ask, size: int, times: int) -> None:
    answers, expected = caller("unary", size=size, times=times)
    assert answers == [expected]


def test_many_concurrent_calls(caller: Ask) -> None:
    assert caller("at_once", calls=500) == 500


def test_no_call_is_lost_when_a_connection_reaches_its_maximum_age(
    caller: Ask, opened: tuple[Program, list[int]]
) -> None:
    program, _ = opened
    before = program.ask("connections")
    answers, expected = caller("with_pauses", listener=1, times=200, size=2000)
    assert answers == [expected]
    assert program.ask("connections") > before + 1
