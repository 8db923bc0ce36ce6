"""A stop ends a few seconds after --exit-timeout-secs, even if the core, the event loop or a disk hangs."""

from __future__ import annotations

import contextlib
import re
import signal
import threading
from pathlib import Path

import pytest

import shmserve
from tests.support.launch import END_S, Launched, await_end, children_of, identity

pytestmark = pytest.mark.process

THREADS = 16
ROUNDS = 20
PATCHED = """
import sys
import threading
from shmserve.broker import main
from shmserve.core.models.lifecycle import Lifecycle

{patch}
sys.exit(main.main())
"""
NEVER_DRAINED = "Lifecycle.settle_drain = lambda self: None"
NO_DISK = """
from shmserve.broker.models.repositories import Repositories
Repositories.read = lambda *arguments: print("READING", file=sys.stderr, flush=True) or threading.Event().wait()
"""
STUCK = "Lifecycle.drain = lambda *arguments: threading.Event().wait()"


def patched(folder: Path, patch: str, *options: str) -> Launched:
    identity(folder / "models", "m")
    program = PATCHED.format(patch=patch)
    return Launched(folder / "models", folder / "run", "--exit-timeout-secs", "0.1", *options, program=program)


def stop_with_children(server: Launched) -> int:
    children = children_of(server.process.pid)
    assert children
    server.signal(signal.SIGTERM)
    code = server.wait()
    for pid in children:
        await_end(pid)
    return code


def test_the_server_stops_while_clients_load_and_unload(tmp_path: Path) -> None:
    identity(tmp_path / "models", "m")
    options = ("--model-control-mode", "explicit", "--exit-timeout-secs", "20")
    with Launched(tmp_path / "models", tmp_path / "run", *options) as server:
        half, stopping = threading.Semaphore(0), threading.Event()

        def work() -> None:
            with shmserve.Client(f"unix://{server.lane}", timeout=END_S) as client:
                for round in range(ROUNDS):
                    for change in (client.load, client.restart, client.unload):
                        with contextlib.suppress(shmserve.ServeError):  # another thread has overtaken it
                            change("m")
                        if stopping.is_set():
                            return
                    if round == ROUNDS // 2:
                        half.release()

        threads = [threading.Thread(target=work) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for _ in range(THREADS // 2):
            assert half.acquire(timeout=END_S)
        stopping.set()
        assert stop_with_children(server) == 0
        for thread in threads:
            thread.join()
        assert "did not stop" not in server.log
        assert "internal error of the server" not in server.log


def test_the_server_stops_if_the_core_never_drains(tmp_path: Path) -> None:
    with patched(tmp_path, NEVER_DRAINED) as server:
        assert stop_with_children(server) == 0
        found = re.search(
            r"ERROR the server did not stop within 0.1 s \(--exit-timeout-secs\) plus 2 s; killing what is left: "
            r"0 request\(s\), (\d) process\(es\): (.*)",
            server.log,
        )
        assert found, server.log
        assert "the process that workers are forked from (pid " in found[2]
        assert not (tmp_path / "run" / "lane.sock").exists()


def test_the_server_stops_if_the_event_loop_hangs(tmp_path: Path) -> None:
    with patched(tmp_path, STUCK) as server:
        assert stop_with_children(server) == 1
        assert "m_0_0 of model 'm' (pid " in server.log


def test_the_server_stops_if_a_disk_hangs(tmp_path: Path) -> None:
    """The thread that reads repositories hangs, and the interpreter would wait for this thread."""
    with (
        patched(tmp_path, NO_DISK, "--model-control-mode", "explicit") as server,
        shmserve.Client(f"unix://{server.lane}") as client,
    ):
        load = threading.Thread(target=load_fails, args=(client, "m"))
        load.start()
        while "READING" not in server.log:
            load.join(0.01)
        server.signal(signal.SIGTERM)
        assert server.wait() == 1
        load.join()


def load_fails(client: shmserve.Client, model: str) -> None:
    with pytest.raises(shmserve.ServeError):
        client.load(model)
