"""The server for users' own tests: ready when the block begins, stopped when it ends, or an error with the reason."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import shmserve
from shmserve import testing
from shmserve.repo import samples
from shmserve.testing import Server
from tests import ROOT
from tests.support.launch import identity
from tests.support.model_files import write_model
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.process

X = np.arange(3, dtype=np.float32)[None]


@pytest.fixture
def models(tmp_path: Path) -> Path:
    identity(tmp_path / "models", "echo")
    return tmp_path / "models"


def test_a_server_uses_a_temporary_directory_and_leaves_nothing_behind(models: Path) -> None:
    async def ask(server: Server) -> bool:
        async with server.async_client() as client:
            return np.array_equal((await client.infer("echo", {"x": X}))["y"], X)

    with Server(models) as server:
        where, pid = server.runtime_dir, server.pid
        with server.client(timeout=PATIENCE_S) as client:
            assert client.url == server.url
            assert np.array_equal(client.infer("echo", {"x": X})["y"], X)
        with shmserve.Client(server.zmq_url) as client:
            assert np.array_equal(client.infer("echo", {"x": X})["y"], X)
        assert asyncio.run(ask(server))
        assert "READY" in server.log
    assert not where.exists()
    assert "stopped" in server.log
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    for use in (lambda: server.pid, lambda: server.url):
        with pytest.raises(RuntimeError, match="not running"):
            use()


def test_a_server_without_a_block_with_options_and_a_directory(models: Path, tmp_path: Path) -> None:
    server = Server(models, "--log-verbose", "1", runtime_dir=tmp_path / "here")
    server.stop()
    with pytest.raises(RuntimeError, match="not running"):
        server.kill()
    for _ in range(2):
        server.start()
        assert (tmp_path / "here" / "lane.sock").is_socket()
        with pytest.raises(RuntimeError, match="running already"):
            server.start()
        server.stop()
        server.stop()
        assert not (tmp_path / "here" / "lane.sock").exists()


def test_a_failed_start_raises_the_reason(models: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)ended with code 2 before it was ready:.*--nonsense"):
        Server(models, "--nonsense").start()
    with pytest.raises(RuntimeError, match=r"(?s)ended with code 2 before it was ready:.*is not a directory"):
        Server(tmp_path / "nowhere").start()
    write_model(models, "broken", 'name: "broken" backend: "no_such_backend"')
    with pytest.raises(RuntimeError, match=r"(?s)ended with code 1 before it was ready:.*no_such_backend"):
        Server(models, "--exit-on-error", "true").start()


def test_a_crashed_server_is_an_error(models: Path) -> None:
    def crash() -> None:
        with Server(models) as server:
            os.kill(server.pid, signal.SIGKILL)
            os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)

    with pytest.raises(RuntimeError, match=r"(?s)exited unexpectedly with code -9:.*ready: serving 1 of 1 models"):
        crash()


def test_a_server_that_takes_too_long_is_killed(models: Path) -> None:
    with pytest.raises(RuntimeError, match=r"was not ready within 0\.001 s:"):
        Server(models, start_timeout=0.001).start()
    server = Server(models, stop_timeout=0.2)
    with pytest.raises(RuntimeError, match=r"did not stop within 0\.2 s of SIGTERM and was killed"), server:
        os.kill(server.pid, signal.SIGSTOP)


def test_leftover_shared_memory_is_an_error(models: Path, tmp_path: Path) -> None:
    name = Path("/dev/shm")
    server = Server(models, runtime_dir=tmp_path / "run")
    server.start()
    name /= f"shmserve-{server.pid}-1-left"
    name.touch()
    try:
        with pytest.raises(RuntimeError, match=rf"has left {name.name} behind"):
            server.stop()
    finally:
        name.unlink()


def test_the_example_in_the_docstring_works(models: Path) -> None:
    example = "\n".join(
        line[4:] for line in (testing.__doc__ or "").splitlines() if line.startswith("    ") or not line
    )
    folder = models.parent
    samples.build(models, lambda text: None)
    (folder / "test_example.py").write_text(example)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_example.py"]
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert "1 passed" in ran.stdout, ran.stdout
