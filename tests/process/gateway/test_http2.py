"""HTTP/2 under gRPC on real sockets, with Google's own client as the caller."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import trustme

from tests import ROOT

pytestmark = pytest.mark.process

WAIT_S = 60.0
HERE = ROOT / "tests" / "support" / "gateway"
Asks = Callable[..., Any]
"""Has the caller do something at one of the doors, and gives what came of it."""
Told = Callable[[str], int]
"""What the doors and their services were told."""


class Program:
    """Answers each line of JSON with another."""

    def __init__(self, name: str, *arguments: str) -> None:
        command = [sys.executable, str(HERE / name), *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, line: str) -> Any:
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)
        return self.answer()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


@contextmanager
def running(name: str, *arguments: str) -> Iterator[Program]:
    made = Program(name, *arguments)
    yield made
    made.process.communicate(timeout=WAIT_S)
    assert made.process.returncode == 0


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def opened(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Program, list[int]]]:
    certificate = tmp_path_factory.mktemp("tls") / "server.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(certificate))
    with running("grpc_listeners.py", str(certificate)) as program:
        yield program, program.answer()
        assert program.ask("held") == 0


@pytest.fixture(scope="module")
def endpoints(opened: tuple[Program, list[int]]) -> Told:
    return opened[0].ask


@pytest.fixture(scope="module")
def caller(opened: tuple[Program, list[int]]) -> Iterator[Asks]:
    with running("grpc_caller.py") as program:
        yield lambda do, door=0, **asked: program.ask(json.dumps({"do": do, "port": opened[1][door], **asked}))


@pytest.mark.parametrize(("size", "times"), [(0, 3), (300, 20), (70_000, 5), (20 << 20, 2)])
def test_one_after_another(caller: Asks, size: int, times: int) -> None:
    found, expected = caller("unary", size=size, times=times)
    assert found == [expected]


@pytest.mark.parametrize("compression", ["Gzip", "Deflate"])
def test_compressed(caller: Asks, compression: str) -> None:
    found, expected = caller("unary", size=3_000_000, times=2, compression=compression)
    assert found == [expected]


def test_many_at_once(caller: Asks) -> None:
    assert caller("at_once", calls=500) == 500


def test_a_stream_both_ways(caller: Asks) -> None:
    sizes = [0, 1, 100_000, 5, 3_000_000]
    assert caller("stream", sizes=sizes) == [sizes, "OK"]


def test_a_caller_who_reads_slowly_slows_the_service_down(caller: Asks, endpoints: Told) -> None:
    assert caller("many", count=100, size=50_000) == [100, 0]
    assert endpoints("waited") > 0


def test_deadlines_and_cancellation_reach_the_service(caller: Asks, endpoints: Told) -> None:
    assert caller("deadline", seconds=0.1)[0] == "DEADLINE_EXCEEDED"
    assert endpoints("cancelled") == 1
    assert caller("cancel") == ["first", "CANCELLED"]
    assert endpoints("cancelled") == 1


def test_errors_and_their_texts(caller: Asks) -> None:
    text = "größer als 100 %,\nas said"
    assert caller("error", code=5, text=text) == ["NOT_FOUND", text]
    assert caller("path", name="/test/Nothing") == ["UNIMPLEMENTED", "no /test/Nothing"]
    found = caller("unary_over", size=(32 << 20) + 1)
    assert found[0] == "RESOURCE_EXHAUSTED"
    assert "--grpc-max-input-size" in found[1]


def test_metadata(caller: Asks) -> None:
    found = caller("metadata", pairs=[["triton-grpc-protocol-key", "value"], ["x", "1"], ["x", "2"]])
    assert found.pop("user-agent").startswith("grpc-python/")
    assert found == {"triton-grpc-protocol-key": "value", "x": "1,2"}


def test_tls(caller: Asks, authority: trustme.CA) -> None:
    root = authority.cert_pem.bytes().decode()
    found, expected = caller("unary", door=1, root=root, size=5 << 20, times=2)
    assert found == [expected]


def test_connections_that_grow_old_lose_no_call(caller: Asks, endpoints: Told) -> None:
    before = endpoints("connections")
    found, expected = caller("until", door=2, times=200, size=2000)
    assert found == [expected]
    assert endpoints("connections") > before + 1
