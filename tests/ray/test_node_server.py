"""Servers that are owned by processes of a node. These tests do not need Ray."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import shmserve
from shmserve.ray.config import AppConfig, ServerConfig
from shmserve.ray.host import sweep
from shmserve.ray.node_server import NodeServer
from tests.ray.load import write_times

pytestmark = pytest.mark.process
START_S = 120.0
OWNER = """
import json, sys
from pathlib import Path
from shmserve.ray.config import ServerConfig
from shmserve.ray.node_server import NodeServer
server = NodeServer(ServerConfig((sys.argv[1],)), "key", Path(sys.argv[2]))
server.start(120.0)
print(server.runtime_dir, server.host, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def hosts() -> Iterator[Path]:
    """A directory for sockets, not below tmp_path, where their paths would be too long."""
    with tempfile.TemporaryDirectory(prefix="hosts-") as folder:
        yield Path(folder)


@pytest.fixture
def config(tmp_path: Path) -> ServerConfig:
    write_times(tmp_path / "models", "twice")
    return ServerConfig((str(tmp_path / "models"),))


@contextlib.contextmanager
def ends(pid: int) -> Iterator[None]:
    """Waits at the end of the block until the host has ended."""
    descriptor = os.pidfd_open(pid)
    try:
        yield
        assert select.select([descriptor], [], [], START_S)[0], "the host still runs"
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)  # if this process is the subreaper
    finally:
        os.close(descriptor)


def twice(runtime_dir: Path) -> float:
    with shmserve.Client(runtime_dir=runtime_dir, reconnect_timeout=START_S) as client:
        return float(client.infer("twice", {"x": np.array([[3.0]], np.float32)})["y"][0, 0])


def test_owners_share_a_server_until_the_last_one_closes_it(config: ServerConfig, hosts: Path) -> None:
    first, second = (NodeServer(ServerConfig(config.models, gateway=True), "key", hosts) for _ in range(2))
    first.start(START_S)
    second.start(START_S)
    assert (first.host, first.runtime_dir, first.ports) == (second.host, second.runtime_dir, second.ports)
    assert sorted(first.ports) == ["grpc", "http"]
    with ends(first.host):
        first.close()
        assert twice(second.runtime_dir) == 6.0
        second.close()
    assert not (hosts).exists()


def test_a_server_ends_when_its_owner_is_killed(config: ServerConfig, hosts: Path) -> None:
    command = [sys.executable, "-c", OWNER, config.models[0], str(hosts)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        runtime_dir, host = owner.stdout.readline().split()
        assert twice(Path(runtime_dir)) == 6.0
        with ends(int(host)):
            owner.kill()
    assert not Path(runtime_dir).exists()


def test_a_server_that_crashes_is_restarted(config: ServerConfig, hosts: Path) -> None:
    server = NodeServer(config, "key", hosts)
    server.start(START_S)
    with ends(server.host):
        with shmserve.Client(runtime_dir=server.runtime_dir, reconnect_timeout=START_S) as client:
            os.kill(client.activity()["server"]["pid"], signal.SIGKILL)
            client.wait_ready(timeout=START_S)
            assert client.infer("twice", {"x": np.array([[3.0]], np.float32)})["y"][0, 0] == 6.0
        assert not server.failure
        server.close()


def test_a_host_starts_while_another_one_removes_its_files(hosts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended, opened = hosts / "other-files", os.open
    ended.mkdir()

    def vanishing(path: str | Path, flags: int) -> int:
        ended.rmdir()
        return opened(path, flags)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", vanishing)
        sweep(hosts, hosts / "own-files")
    assert not ended.exists()


def test_a_server_ends_when_its_host_is_killed(config: ServerConfig, hosts: Path) -> None:
    """The owner notices and can start another one. The next start of any host removes the files of the killed one."""
    failed = threading.Event()
    server = NodeServer(config, "key", hosts, failed.set)
    server.start(START_S)
    left = server.runtime_dir.parent
    with ends(server.host):
        os.kill(server.host, signal.SIGKILL)
    assert failed.wait(START_S)
    assert "has ended" in server.failure
    server.close()
    other = NodeServer(config, "other", hosts)
    other.start(START_S)
    assert not left.exists()
    assert not (hosts / "key.sock").exists()
    server.start(START_S)
    assert twice(server.runtime_dir) == 6.0
    with ends(other.host):
        other.close()
    with ends(server.host):
        server.close()


def test_a_failed_start_raises_the_reason(tmp_path: Path, hosts: Path) -> None:
    server = NodeServer(ServerConfig((str(tmp_path / "none"),)), "key", hosts)
    with pytest.raises(shmserve.Unavailable, match="exited with code"):
        server.start(START_S)


def test_arguments_of_the_application_are_validated() -> None:
    config = AppConfig.of({"models": "/srv/{revision}/models", "revision": "r7", "gpus": "1", "options": "--a 'b c'"})
    assert (config.repositories, config.gpus) == (("/srv/r7/models",), 1.0)
    assert config.server().options == ("--a", "b c")
    for arguments, text in (
        ({"models": ""}, "names no repository"),
        ({"models": "m", "replica": 3}, "replica"),
        ({"models": "m", "replicas": "three"}, "replicas"),
        ({"models": "m", "replicas": 3, "max_replicas": 2}, "max_replicas=2 is below replicas=3"),
    ):
        with pytest.raises(shmserve.InvalidRequest, match=text):
            AppConfig.of(arguments)
