"""A stop ends a few seconds after --exit-timeout-secs, even if the core, the event loop or a disk hangs. Requests to a
killed server are answered by the next one."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import shmserve
from shmserve.testing import Server
from tests.support.ensemble_models import config_text
from tests.support.launch import END_S, Launched, await_end, children_of, identity
from tests.support.model_files import parameters, python_model, write_model
from tests.support.patience import PATIENCE_S

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


RESUMED_CONFIG = config_text("python", "x", "y", "max_batch_size: 4 dynamic_batching { }")


RESUMED = python_model(
    """
    if self.first:
        open(self.folder + "/begun", "w").close()
        select.select([], [], [], 600)
    return self.respond(x * 2)
    """,
    """
    self.folder = json.loads(args["model_config"])["parameters"]["folder"]["string_value"]
    self.first = not os.path.exists(self.folder + "/seen")
    open(self.folder + "/seen", "w").close()
    if not self.first:
        open(self.folder + "/go").read()  # a pipe: blocks until the test writes
    """,
)


def test_requests_survive_a_server_restart(tmp_path: Path) -> None:
    """The models have begun to run the requests. The next server receives them, and requests of a new client, while its
    models are still loading."""
    cases = [(link, size) for link in ("lane", "zmq") for size in (3, 30_000)]
    folders = [tmp_path / "models" / f"{link}_{size}" for link, size in cases]
    for folder in folders:
        config = RESUMED_CONFIG + parameters(folder=str(folder))
        write_model(folder.parent, folder.name, config, RESUMED)
        os.mkfifo(folder / "go")
    with (
        Server(tmp_path / "models") as server,
        shmserve.Client(server.url, reconnect_timeout=PATIENCE_S) as lane,
        shmserve.Client(server.zmq_url, reconnect_timeout=PATIENCE_S) as zmq,
        ThreadPoolExecutor(2 * len(cases)) as pool,
    ):
        inputs = [np.arange(size, dtype=np.float32)[None] for _, size in cases]
        results = []
        for (link, _), folder, x in zip(cases, folders, inputs, strict=True):
            client = lane if link == "lane" else zmq
            results.append(pool.submit(client.submit(folder.name, {"x": x}).result, PATIENCE_S))
        while not all((folder / "begun").exists() for folder in folders):
            server.client().close()
        server.kill()
        restarted = pool.submit(server.restart)
        with connected(server) as new:
            later = [new.submit(folder.name, {"x": x}) for folder, x in zip(folders, inputs, strict=True)]
            new.flush()
            while any(not model["queued"] for model in new.activity()["models"]):
                assert not restarted.done()
            gates = [pool.submit((folder / "go").write_text, "") for folder in folders]
            for x, result, after in zip(inputs, results, later, strict=True):
                assert np.array_equal(result.result()["y"], x * 2)
                assert np.array_equal(after.result(PATIENCE_S)["y"], x * 2)
            restarted.result()
        for gate in gates:
            gate.result()


def connected(server: Server) -> shmserve.Client:
    """A client of a server that is being started."""
    client = shmserve.Client(server.url)
    while not client.live():
        pass
    return client
