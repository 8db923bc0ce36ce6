"""SIGHUP: the repositories are looked at when the operator says so. The oracles are the files, the numbers in answers,
the pids of workers, and what the service manager is told."""

from __future__ import annotations

import os
import pty
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import shmserve
from tests.support.launch import Launched
from tests.support.living import answer, generation, identity, pids, ready, renew, write

pytestmark = pytest.mark.process

Start = Callable[..., Launched]


class Manager:
    """What the service manager hears."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.settimeout(60)
        self.status = ""

    def until(self, field: str) -> None:
        while True:
            fields = self._socket.recv(65536).decode().split("\n")
            self.status = next((text[7:] for text in fields if text.startswith("STATUS=")), self.status)
            if field in fields:
                return

    def reload(self, server: Launched) -> None:
        """Asks for it, and returns when it has ended."""
        server.signal(signal.SIGHUP)
        self.until("RELOADING=1")
        self.until("READY=1")

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    manager = Manager(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    yield manager
    manager.close()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


@pytest.fixture
def started(root: Path, tmp_path: Path, manager: Manager) -> Start:
    def start(*options: str) -> Launched:
        launched = Launched(root, tmp_path / "run", *options)
        manager.until("READY=1")
        return launched

    return start


def test_a_repository_is_served_as_it_is_now(root: Path, started: Start, manager: Manager) -> None:
    generation(root, "changes", 1)
    breaks = generation(root, "breaks", 1)
    for name in ("stays", "goes"):
        identity(root, name)
    with started() as server, shmserve.Client(runtime_dir=server.runtime_dir) as client:
        before = pids(client, "stays")
        renew(root / "changes", 2)
        write(breaks / "config.pbtxt", "no such thing")
        shutil.rmtree(root / "goes")
        generation(root, "comes", 7)
        manager.reload(server)
        assert manager.status == "serving 3 of 4 models; failed: breaks"
        assert answer(client, "changes") == 2
        assert answer(client, "comes") == 7
        assert answer(client, "breaks") == 1
        assert pids(client, "stays") == before
        assert not ready(client, "goes")

        write(breaks / "config.pbtxt", (root / "changes" / "config.pbtxt").read_text())
        manager.reload(server)
        assert answer(client, "breaks") == 1
        assert manager.status == "serving 4 of 4 models"

        aside = root.rename(root.with_name("aside"))
        manager.reload(server)
        assert "cannot reread the repositories; all models are served unchanged" in server.log
        assert (answer(client, "changes"), answer(client, "comes")) == (2, 7)
        aside.rename(root)


def test_what_load_calls_decided_stays_decided(root: Path, started: Start, manager: Manager) -> None:
    for name in ("loaded", "other", "given"):
        generation(root, name, 1)
    gone = generation(root, "gone", 1)
    with (
        started("--model-control-mode", "explicit") as server,
        shmserve.Client(runtime_dir=server.runtime_dir) as client,
    ):
        client.load("loaded")
        client.load("gone")
        config = {
            "backend": "identity",
            "max_batch_size": 8,
            "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1]}],
            "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [-1]}],
        }
        client.load("given", config=config)
        brought = pids(client, "given")
        for name in ("loaded", "other", "given"):
            renew(root / name, 2)
        shutil.rmtree(gone)
        manager.reload(server)
        assert answer(client, "loaded") == 2
        assert answer(client, "gone") == 1
        assert "cannot reread model 'gone', which is served unchanged" in server.log
        assert not ready(client, "other")
        assert pids(client, "given") == brought


def test_in_mode_poll_nobody_waits_for_the_next_look(root: Path, started: Start, manager: Manager) -> None:
    generation(root, "changes", 1)
    options = ("--model-control-mode", "poll", "--repository-poll-secs", "3600", "--settle-secs", "0")
    with started(*options) as server, shmserve.Client(runtime_dir=server.runtime_dir) as client:
        renew(root / "changes", 2)
        manager.reload(server)
        assert answer(client, "changes") == 2


def test_without_a_manager_the_log_says_it(root: Path, tmp_path: Path) -> None:
    identity(root, "stays")
    with Launched(root, tmp_path / "run") as server, shmserve.Client(runtime_dir=server.runtime_dir) as client:
        for _ in range(3):
            server.signal(signal.SIGHUP)
        assert answer(client, "stays") == 1
    assert "SIGHUP: rereading the repositories" in server.log


def test_a_terminal_that_goes_takes_its_server_along(root: Path, tmp_path: Path) -> None:
    identity(root, "stays")
    ours, theirs = pty.openpty()
    try:
        server = Launched(root, tmp_path / "run", stdin=theirs)
    finally:
        os.close(theirs)
    server.signal(signal.SIGHUP)
    assert server.wait() == 0
    os.close(ours)
    assert "SIGHUP: finishing the requests in flight" in server.log
