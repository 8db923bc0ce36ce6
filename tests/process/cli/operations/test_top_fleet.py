"""`shmserve top` of several servers from a user's view."""

from __future__ import annotations

import json
import re
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from shmserve.testing import Server
from tests.process.cli.commands import COMMAND
from tests.support.docs import pages
from tests.support.launch import identity
from tests.support.system.terminal import Terminal

pytestmark = pytest.mark.process
TOP = [*COMMAND, "top", "--interval", "0.1"]
END_S = 60
END = "\x1b[F"
"""The End key, which selects the last row."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """Two servers: both have mlp, one of them also cnn."""
    root = tmp_path_factory.mktemp("fleet")
    for number in range(2):
        identity(root / f"models{number}", "mlp")
    identity(root / "models1", "cnn")
    options = ("--model-control-mode", "explicit", "--load-model", "*")
    with ExitStack() as stack:
        yield [stack.enter_context(Server(root / f"models{number}", *options, gateway=True)) for number in range(2)]


def named(*servers: Server | str) -> list[str]:
    """The arguments that name the servers: a server's HTTP address, or a given address."""
    words, options = [], []
    for server in servers:
        http, metrics = (server, server) if isinstance(server, str) else map(server.endpoints.get, ("http", "metrics"))
        words.append(str(http))
        options += ["--metrics-url", f"http://{metrics}"] if "://" not in words[-1] else []
    return words + options


@pytest.fixture
def nothing() -> Iterator[str]:
    """An address that accepts connections and does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def printed(*words: str, code: int = 0) -> str:
    ended = subprocess.run([*TOP, *words], capture_output=True, text=True, check=False, timeout=END_S)
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended.stdout


def snapshot(*words: str, code: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(printed("--json", "--once", *words, code=code))
    return found


def test_drained_unreachable_and_silent_servers_are_listed(fleet: list[Server], nothing: str) -> None:
    """Neither keeps the others from being shown, over any transport. The wait for a silent server is limited."""
    names = [fleet[0].zmq_url, fleet[1].endpoints["http"], "127.0.0.1:1", nothing]
    with fleet[0].client() as client:
        client.drain()
        try:
            found = snapshot(*named(fleet[0].zmq_url, fleet[1], "127.0.0.1:1", nothing))
            http = snapshot(*named(*fleet))
        finally:
            client.undrain()
    rows = {row["server"]: row for row in found["servers"]}
    assert [rows[name]["state"] for name in names] == ["DRAINING", "READY", "UNREACHABLE", "NO ANSWER"]
    assert "no server at http://127.0.0.1:1" in rows["127.0.0.1:1"]["reason"]
    assert [rows[name]["models"] for name in names[:2]] == ["1/1", "2/2"]
    models = [{key: row[key] for key in ("model", "state", "servers", "instances")} for row in http["models"]]
    assert models == [
        {"model": "cnn", "state": "READY", "servers": "1/1", "instances": "1/1"},
        {"model": "mlp", "state": "READY", "servers": "2/2", "instances": "2/2"},
    ]
    gone = snapshot("127.0.0.1:1", "127.0.0.1:2", code=1)
    assert gone["total"]["states"] == {"UNREACHABLE": 2}


def test_enter_opens_a_server_and_q_returns_to_the_fleet(fleet: list[Server], nothing: str) -> None:
    """Enter shows one server as `top` does, q comes back, and q again quits."""
    words = named(fleet[0].url, fleet[1], nothing)
    with Terminal([*TOP, *words], 140, 30, {}) as terminal:
        terminal.wait_for(lambda text: "3 servers   2 READY" in text and "q quit" in text)
        terminal.press("2")
        terminal.wait_for(lambda text: re.search(r"mlp +1 +READY +2/2 ", text))
        terminal.press(END + "\r")
        terminal.wait_for(lambda text: "3 By server 2" in text and "Enter its server" in text)
        terminal.press("1")
        terminal.wait_for("Enter this server")
        terminal.press(END + "\r")
        terminal.wait_for("q all servers")
        assert "1 Models 1" in terminal.text
        terminal.press("q")
        terminal.wait_for(lambda text: "3 servers" in text and "q quit" in text)
        terminal.press("q")
        assert terminal.ends() == 0


LINES = [line for line in pages.commands("top") if "host1" in line]


@pytest.mark.parametrize("line", LINES)
def test_commands_of_the_page(line: str, fleet: list[Server]) -> None:
    words = line.split()
    first = words.index("host1")
    assert words[first : first + 3] == ["host1", "host2", "host3"]
    words[first : first + 3] = named(*fleet)
    if {"--once", "--json"} & set(words):
        assert "READY" in printed(*words[2:])
        return
    with Terminal([*TOP, *words[2:]], 140, 30, {}) as terminal:
        terminal.wait_for("2 servers   2 READY")
        terminal.press("q")
        assert terminal.ends() == 0
