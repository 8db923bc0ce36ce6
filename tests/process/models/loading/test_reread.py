"""SIGHUP: the server rereads its repositories, and notifies the service manager."""

from __future__ import annotations

import os
import pty
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

import shmserve
from tests.process.models.loading.test_overrides import CONFIG
from tests.support.launch import Launched
from tests.support.living import answer, generation, identity, pids, ready, renew, write
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.process


class Manager:
    """Receives the notifications for the service manager."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.settimeout(PATIENCE_S)
        self.status = ""

    def until(self, field: str) -> None:
        while True:
            fields = self._socket.recv(65536).decode().split("\n")
            self.status = next((text[7:] for text in fields if text.startswith("STATUS=")), self.status)
            if field in fields:
                return

    def reload(self, server: Launched) -> None:
        """Sends SIGHUP, and waits for the end of the reload."""
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


def test_a_reload_applies_the_changes_of_the_repository(root: Path, tmp_path: Path, manager: Manager) -> None:
    generation(root, "changes", 1)
    breaks = generation(root, "breaks", 1)
    for name in ("stays", "goes"):
        identity(root, name)
    with Launched(root, tmp_path / "run") as server, shmserve.Client(runtime_dir=server.runtime_dir) as client:
        manager.until("READY=1")
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


def test_a_reload_keeps_the_decisions_of_load_calls(root: Path, tmp_path: Path, manager: Manager) -> None:
    for name in ("loaded", "other", "given", "gone"):
        generation(root, name, 1)
    with (
        Launched(root, tmp_path / "run", "--model-control-mode", "explicit") as server,
        shmserve.Client(runtime_dir=server.runtime_dir) as client,
    ):
        manager.until("READY=1")
        client.load("loaded")
        client.load("gone")
        client.load("given", config=CONFIG)
        before = pids(client, "given")
        for name in ("loaded", "other", "given"):
            renew(root / name, 2)
        shutil.rmtree(root / "gone")
        manager.reload(server)
        assert answer(client, "loaded") == 2
        assert answer(client, "gone") == 1
        assert "cannot reread model 'gone', which is served unchanged" in server.log
        assert not ready(client, "other")
        assert pids(client, "given") == before


def test_sighup_from_a_closed_terminal_stops_the_server(root: Path, tmp_path: Path) -> None:
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
