"""`shmserve top` of several servers from a user's view."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmserve.testing import Server
from tests.process.cli.operations.json_lines import first_lines
from tests.support.docs import pages
from tests.support.launch import identity
from tests.support.system.terminal import Terminal

pytestmark = pytest.mark.process
COMMAND = [sys.executable, "-m", "shmserve.clients.cli.main", "top", "--interval", "0.1"]
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
    ended = subprocess.run([*COMMAND, *words], capture_output=True, text=True, check=False, timeout=END_S)
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def snapshot(*words: str, code: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(printed("--json", "--once", *words, code=code))
    return found


def infer(servers: list[Server], model: str, count: int) -> None:
    for server in servers:
        with server.client() as client:
            for _ in range(count):
                client.infer(model, {"x": np.ones((1, 3), np.float32)})


def test_all_transports_show_the_same_values(fleet: list[Server]) -> None:
    """Tests HTTP, the lane and ZeroMQ, also mixed."""
    infer(fleet, "mlp", 5)
    one, two = fleet
    http = snapshot(*named(*fleet))
    lane = snapshot(one.url, two.url)
    mixed = snapshot(*named(one.zmq_url, two))
    same = ("model", "versions", "state", "servers", "instances", "queued")
    expected = [
        {"model": "cnn", "versions": "1", "state": "READY", "servers": "1/1", "instances": "1/1", "queued": 0},
        {"model": "mlp", "versions": "1", "state": "READY", "servers": "2/2", "instances": "2/2", "queued": 0},
    ]
    for found in (http, lane, mixed):
        assert [{key: row[key] for key in same} for row in found["models"]] == expected
        assert found["total"]["states"] == {"READY": 2}
        assert sorted(row["models"] for row in found["servers"]) == ["1/1", "2/2"]
        assert len(found["by_server"]) == 3
        assert {row["release"] for row in found["servers"]} == set(found["total"]["releases"])
        assert len(found["total"]["releases"]) == 1


def test_drained_unreachable_and_silent_servers_are_listed(fleet: list[Server], nothing: str) -> None:
    """Neither keeps the others from being shown. The wait for a silent server is limited."""
    with fleet[0].client() as client:
        client.drain()
        try:
            found = snapshot(*named(fleet[0].url, fleet[1], "127.0.0.1:1", nothing))
            http = snapshot(*named(*fleet))
        finally:
            client.undrain()
    states = {row["server"]: row["state"] for row in found["servers"]}
    addresses = [fleet[0].url, fleet[1].endpoints["http"], "127.0.0.1:1", nothing]
    assert [states[address] for address in addresses] == ["DRAINING", "READY", "UNREACHABLE", "NO ANSWER"]
    (gone,) = [row for row in found["servers"] if row["server"] == "127.0.0.1:1"]
    assert "no server at http://127.0.0.1:1" in gone["reason"]
    assert sorted(row["state"] for row in http["servers"]) == ["DRAINING", "READY"]


def test_enter_opens_a_server_and_q_returns_to_the_fleet(fleet: list[Server], nothing: str) -> None:
    """Enter shows one server as `top` does, q comes back, and q again quits."""
    words = named(fleet[0].url, fleet[1], nothing)
    with Terminal([*COMMAND, *words], 140, 30, {}) as terminal:
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


def test_a_restarted_server_is_shown_again(tmp_path: Path) -> None:
    identity(tmp_path / "models", "m")
    with (
        Server(tmp_path / "models", runtime_dir=tmp_path / "run") as server,
        Terminal([*COMMAND, server.url, "127.0.0.1:1"], 140, 24, {}) as terminal,
    ):
        terminal.wait_for("1 READY   1 UNREACHABLE")
        server.stop()
        terminal.wait_for("2 UNREACHABLE")
        server.start()
        terminal.wait_for("1 READY   1 UNREACHABLE")
        terminal.press("\x03")
        assert terminal.ends() == 0


def test_json_prints_a_line_at_each_refresh(fleet: list[Server]) -> None:
    lines, code, errors = first_lines([*COMMAND, "--json", *named(*fleet)], 3)
    assert (code, errors) == (130, b"shmserve top: interrupted\n")
    assert [line["total"]["states"] for line in lines] == [{"READY": 2}] * 3


def test_a_model_name_in_place_of_a_server_gets_a_suggestion() -> None:
    """A label of a host name has at most 63 characters, so no name server is asked for this one."""
    word = "m" * 64
    assert printed("--once", word, code=1).endswith(f"; of a model: did you mean --filter {word}?\n")


def test_a_fleet_without_a_reachable_server_fails() -> None:
    found = snapshot("127.0.0.1:1", "127.0.0.1:2", code=1)
    assert found["total"]["states"] == {"UNREACHABLE": 2}


def test_a_single_url_shows_one_server(fleet: list[Server]) -> None:
    found = snapshot(fleet[0].url)
    assert set(found) == {"url", "interval", "server", "models", "instances", "clients", "gpus", "unknown", "notes"}
    assert "clients" in snapshot(*named(fleet[0]))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("a b --url http://c", "name servers either as words, or one by --url or --runtime-dir"),
        ("a a:8000", "a server is named twice"),
        ("a b --table clients", "--table clients is for one server; of several: servers, models, by-server"),
        ("unix:///x --table servers", "--table servers is for several servers; of one: models, instances"),
        ("a b --sort holdings", "unknown column 'holdings'"),
        ("a b --metrics-url http://a:1", "--metrics-url is given 1 times, for 2 servers over HTTP"),
        ("a b:x", "invalid server 'b:x': expected HOST, HOST:PORT or a URL"),
        ("a b/v2", "invalid server 'b/v2': expected HOST, HOST:PORT or a URL"),
        ("a ftp://x", "invalid url 'ftp://x'"),
        ("a tcp://b:5555", "--server-key"),
    ],
)
def test_invalid_arguments_are_refused(words: str, text: str) -> None:
    told = printed("--once", *words.split(), code=2)
    assert told.startswith("shmserve top: ")
    assert text in told
    assert told.count("\n") == 1


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
    with Terminal([*COMMAND, *words[2:]], 140, 30, {}) as terminal:
        terminal.wait_for("2 servers   2 READY")
        terminal.press("q")
        assert terminal.ends() == 0
