"""`shmserve top` from a user's view, of one server and of several: on terminals, and in scripts."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shmserve.testing import Server
from tests.support.commands import COMMAND
from tests.support.docs import pages
from tests.support.ensemble_models import ensemble
from tests.support.launch import identity
from tests.support.system.terminal import Terminal

pytestmark = pytest.mark.process

TOP = [*COMMAND, "top"]
WITHOUT_TEXTUAL = """
import sys
sys.modules["textual"] = None
from shmserve.clients.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
"""Snapshots do not need the package."""
END_S = 60
END = "\x1b[F"
"""The End key, which selects the last row."""
SLOW_US = "600000000"
"""A batch of this model runs until its process is killed."""
COLOR = re.compile(rb"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;\d+)*m")
"""A colour that is not the terminal's default one."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("models")
    identity(root, "mlp", count=2)
    identity(root, "cnn")
    identity(root, "stuck", batch=4, delay_us=SLOW_US)
    options = ("--model-control-mode", "explicit", "--load-model", "*", "--http-roles", "infer,observe,operate")
    with Server(root, *options, gateway=True) as server:
        yield server


def printed(server: Server | None, *words: str, code: int = 0) -> str:
    command = [sys.executable, "-c", WITHOUT_TEXTUAL, "top", *words]
    found = {name: value for name, value in os.environ.items() if not name.startswith("SHMSERVE")}
    if server is not None:
        found["SHMSERVE_RUNTIME_DIR"] = str(server.runtime_dir)
    ended = subprocess.run(command, env=found, capture_output=True, text=True, check=False, timeout=END_S)
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended.stdout


def test_the_screen_shows_queued_requests_and_operations(server: Server) -> None:
    """Shows known numbers: a batch that does not end, and the requests queued behind it."""
    command = [*TOP, "--url", server.url, "--interval", "0.1"]
    with server.client() as client, Terminal(command, 80, 30, {}) as terminal:
        for _ in range(9):
            client.submit("stuck", {"x": np.ones((2, 3), np.float32)})
        terminal.wait_for(lambda text: re.search(r"stuck +1 +READY +1/1 +0 .* 8 +1 ", text))
        terminal.press("2")
        terminal.wait_for(lambda text: re.search(r"stuck_0_0 .*ready +\d+(\.\d+)?m?s +2 +4 +1 ", text))
        terminal.press("3")
        terminal.wait_for(lambda text: re.search(r" uid:\d+ +lane +9 ", text))
        terminal.press("1u")
        terminal.wait_for(lambda text: "Unload model 'cnn'?" in text and "Cancel (n)" in text)
        terminal.press("y")
        terminal.wait_for("unload of model 'cnn' done in")
        client.load("cnn")
        assert COLOR.search(terminal.raw)
        terminal.resize(250, 40)
        terminal.wait_for("batches formed because")
        client.unload("stuck", force=True)
        client.load("stuck")
        terminal.press("\x03")
        assert terminal.ends() == 0


def test_the_steps_of_an_ensemble_that_was_clicked_in_sixteen_colours(tmp_path: Path) -> None:
    identity(tmp_path, "mlp")
    ensemble(tmp_path, "pipeline", "x:FP32:[3]", "y:FP32:[3]", "mlp(x:x)->(y:y)", more="max_batch_size: 4")
    with Server(tmp_path) as server, server.client() as client:
        command = [*TOP, "--url", server.url, "--interval", "0.1"]
        with Terminal(command, 150, 30, {"TERM": "xterm-16color"}) as terminal:
            terminal.wait_for("pipeline ▸")
            line = terminal.text.split("\n").index(next(one for one in terminal.text.split("\n") if "pipeline" in one))
            terminal.press(f"\x1b[<0;3;{line + 1}M\x1b[<0;3;{line + 1}m")
            terminal.wait_for(lambda _: terminal.screen.buffer[line][2].reverse)
            terminal.press("s")
            terminal.wait_for("└ mlp")
            for _ in range(100):
                client.infer("pipeline", {"x": np.ones((2, 3), np.float32)})
            terminal.wait_for(lambda text: re.search(r"└ mlp +1 .* [1-9]", text) and re.search(r"pipeline ▾.*█", text))
            terminal.press("q")
            assert terminal.ends() == 0
    assert COLOR.search(terminal.raw)
    assert not re.search(rb"[34]8;[25];", terminal.raw), "other colours than the terminal's 16"


def test_all_transports_show_the_same_values(server: Server) -> None:
    with server.client() as client:
        for _ in range(5):
            client.infer("mlp", {"x": np.ones((2, 3), np.float32)})
    words = ("--json", "--once", "--interval", "0.1")
    url, metrics = f"http://{server.endpoints['http']}", f"http://{server.endpoints['metrics']}"
    lane = json.loads(printed(server, *words))
    zmq = json.loads(printed(None, *words, "--url", server.zmq_url))
    http = json.loads(printed(None, *words, "--url", url, "--metrics-url", metrics))
    same = ("model", "version", "state", "instances", "queued", "requests", "failed", "requests_per_s", "batch_sizes")
    tables = [[{key: row[key] for key in same} for row in found["models"]] for found in (lane, zmq, http)]
    assert tables[0] == tables[1] == tables[2]
    assert next(row["requests"] for row in tables[0] if row["model"] == "mlp") >= 5
    names = [sorted(row["instance"] for row in found["instances"]) for found in (lane, zmq, http)]
    assert names[0] == names[1] == names[2] == ["cnn_0_0", "mlp_0_0", "mlp_0_1", "stuck_0_0"]
    assert lane["unknown"] == zmq["unknown"] == []
    assert {"batch_rows", "pid"} <= set(http["unknown"])
    assert http["instances"][0]["memory_bytes"] > 1 << 20
    assert http["server"]["pid"] is not None


def test_json_prints_a_line_at_each_refresh(server: Server) -> None:
    command = [*TOP, "--json", "--interval", "0.05", "--url", server.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        for _ in range(3):
            models = json.loads(process.stdout.readline())["models"]
            assert {row["model"] for row in models} == {"mlp", "cnn", "stuck"}
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=END_S)[1] == b"shmserve top: interrupted\n"
    assert process.returncode == 130


@pytest.fixture(scope="module")
def fleet(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """A server with one model, and the other one."""
    root = tmp_path_factory.mktemp("fleet")
    identity(root, "mlp")
    with Server(root, gateway=True) as first:
        yield [first, server]


def named(*servers: Server | str) -> list[str]:
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


def test_drained_unreachable_and_silent_servers_are_listed(fleet: list[Server], nothing: str) -> None:
    """Neither keeps the others from being shown, over any transport. The wait for a silent server is limited."""
    words = ("--json", "--once", "--interval", "0.1")
    names = [fleet[0].zmq_url, fleet[1].endpoints["http"], "127.0.0.1:1", nothing]
    with fleet[0].client() as client:
        client.drain()
        try:
            found = json.loads(printed(None, *words, *named(fleet[0].zmq_url, fleet[1], "127.0.0.1:1", nothing)))
            http = json.loads(printed(None, *words, *named(*fleet)))
        finally:
            client.undrain()
    rows = {row["server"]: row for row in found["servers"]}
    assert [rows[name]["state"] for name in names] == ["DRAINING", "READY", "UNREACHABLE", "NO ANSWER"]
    assert "no server at http://127.0.0.1:1" in rows["127.0.0.1:1"]["reason"]
    assert [rows[name]["models"] for name in names[:2]] == ["1/1", "3/3"]
    models = {row["model"]: (row["state"], row["servers"], row["instances"]) for row in http["models"]}
    assert models["cnn"] == ("READY", "1/1", "1/1")
    assert models["mlp"] == ("READY", "2/2", "3/3")
    gone = json.loads(printed(None, *words, "127.0.0.1:1", "127.0.0.1:2", code=1))
    assert gone["total"]["states"] == {"UNREACHABLE": 2}


def test_enter_opens_a_server_and_q_returns_to_the_fleet(fleet: list[Server], nothing: str) -> None:
    words = named(fleet[0].url, fleet[1], nothing)
    with Terminal([*TOP, "--interval", "0.1", *words], 140, 30, {}) as terminal:
        terminal.wait_for(lambda text: "3 servers   2 READY" in text and "q quit" in text)
        terminal.press("2")
        terminal.wait_for(lambda text: re.search(r"mlp +1 +READY +2/2 ", text))
        terminal.press("1")
        terminal.wait_for("Enter this server")
        terminal.press(f"{END}\r")
        terminal.wait_for("q all servers")
        assert "1 Models 1" in terminal.text
        terminal.press("q")
        terminal.wait_for(lambda text: "3 servers" in text and "q quit" in text)
        terminal.press("q")
        assert terminal.ends() == 0


LINES = pages.commands("top")
LIVE = [line for line in LINES if not {"--once", "--json"} & set(line.split())]
PRINTING = [line for line in LINES if line not in LIVE]


def words_of(line: str, fleet: list[Server]) -> list[str]:
    http, metrics = (f"http://{fleet[1].endpoints[name]}" for name in ("http", "metrics"))
    own = "" if "--metrics-url" in line else f" --metrics-url {metrics}"
    found = line.replace("http://localhost:8000", http + own).replace("http://localhost:8002", metrics)
    return found.replace("host1 host2 host3", " ".join(named(*fleet))).split()[2:]


@pytest.mark.parametrize("line", LIVE)
def test_live_views_of_the_page(line: str, server: Server, fleet: list[Server]) -> None:
    with Terminal(
        [*TOP, *words_of(line, fleet)], 140, 30, {"SHMSERVE_RUNTIME_DIR": str(server.runtime_dir)}
    ) as terminal:
        terminal.wait_for("q quit")
        terminal.wait_for("2 servers   2 READY" if "host1" in line else "mlp")
        terminal.press("q")
        assert terminal.ends() == 0


@pytest.mark.parametrize("line", PRINTING)
def test_snapshots_of_the_page(line: str, server: Server, fleet: list[Server]) -> None:
    words = words_of(line, fleet)
    if "--once" not in words:
        words.append("--once")
    assert ("READY" if "host1" in line else "mlp") in printed(server, *words)
