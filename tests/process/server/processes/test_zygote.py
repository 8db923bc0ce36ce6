"""Workers forked from a prepared process: they behave like fresh interpreters, and do not depend on that process
afterwards.

A model reports the state of its worker; the rest is read from /proc.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.random import bit_generator

import shmserve
from shmserve.broker.processes.zygote import reap
from shmserve.errors import Unavailable
from shmserve.workers import zygote
from shmserve.workers.zygote import CannotFork
from tests.support.ensemble_models import config_text
from tests.support.launch import Launched, await_end, children_of, descriptors_of, identity
from tests.support.living import pids, until
from tests.support.model_files import python_model, write_model
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.process

MODEL = python_model(
    """
    square = np.ones((400, 400), np.float32)
    square @ square
    names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "SHMSERVE_THREADS")
    found = {"random": self.random, "session": os.getsid(0), "pid": os.getpid(), "parent": os.getppid(),
             "argv": sys.argv, "first_threads": self.threads, "threads": len(os.listdir("/proc/self/task")),
             "variables": {name: os.environ.get(name) for name in names}}
    return self.respond(np.array([json.dumps(found)], object))
    """,
    "self.random = [random.random(), np.random.random(), os.urandom(4).hex()];"
    'self.threads = len(os.listdir("/proc/self/task"))',
)
CONFIG = config_text("python", "x:FP32:[1]", "y:STRING:[1]", "instance_group { count: 1 kind: KIND_CPU }")
CHILD_CONFIG = config_text("python", "x", "y:INT64", "max_batch_size: 1")
STARTS_CHILD = 'import subprocess; self.child = subprocess.Popen(["sleep", "100000"])'
FORKS = python_model("return self.respond(np.array([[self.child.pid]], np.int64))", STARTS_CHILD)


class Place:
    def __init__(self, server: Launched, client: shmserve.Client) -> None:
        self.server, self.client = server, client

    def look(self) -> dict[str, Any]:
        found = self.client.infer("look", {"x": np.zeros(1, np.float32)}, timeout=PATIENCE_S)["y"][0]
        return dict(json.loads(found))

    @property
    def prepared(self) -> int:
        (found,) = set(children_of(self.server.process.pid)) - set(self.server.workers())
        return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("prepared")
    for name in ("look", "other"):
        write_model(folder / "models", name, CONFIG, MODEL)
    write_model(folder / "models", "forks", CHILD_CONFIG, FORKS)
    options = ("--model-control-mode", "explicit", "--load-model", "look")
    with (
        Launched(folder / "models", folder / "run", *options) as server,
        shmserve.Client(f"unix://{server.lane}") as client,
    ):
        client.wait_ready(timeout=PATIENCE_S)
        yield Place(server, client)


def test_a_forked_worker_equals_a_fresh_process(place: Place) -> None:
    """It inherits neither descriptors nor random state from the prepared process."""
    found = place.look()
    assert (found["parent"], found["session"]) == (place.server.process.pid, found["pid"])
    cores = len(os.sched_getaffinity(0))
    assert found["first_threads"] == 1, "those of numpy start with the first product that needs them"
    assert found["threads"] <= cores + 1, "those of numpy, and no more"
    assert (cores == 1) is (found["threads"] == 1)
    assert found["variables"]["OPENBLAS_NUM_THREADS"] in (None, found["variables"]["SHMSERVE_THREADS"])
    assert found["argv"] == [""], "as in Triton"
    command = Path(f"/proc/{found['pid']}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    assert command[1:3] == [b"-m", b"shmserve.workers.main"]
    assert b"look_0_0" in command
    assert Path(f"/proc/{place.prepared}/comm").read_text() == f"{zygote.NAME}\n"
    assert len([target for target in descriptors_of(found["pid"]) if target.startswith("socket:")]) == 1
    place.client.restart("look")
    assert not set(found["random"]) & set(place.look()["random"])


def test_workers_and_the_prepared_process_end_independently(place: Place) -> None:
    before = place.look()["pid"]
    os.kill(before, signal.SIGKILL)
    until(place.client, lambda: before not in pids(place.client, "look").values(), "its end is noticed")
    worker, prepared = place.look(), place.prepared
    assert worker["parent"] == place.server.process.pid
    os.kill(prepared, signal.SIGKILL)
    await_end(prepared)
    assert place.look()["pid"] == worker["pid"]
    place.client.load("other")
    assert place.prepared != prepared
    place.client.unload("other")


def test_a_worker_is_spawned_if_the_prepared_process_ends_first(place: Place) -> None:
    stopped = place.prepared
    os.kill(stopped, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(place.client.load, "other")
        until(place.client, lambda: "LOADING" in [entry["state"] for entry in place.client.models()], "its start")
        os.kill(stopped, signal.SIGKILL)
        load.result(PATIENCE_S)
    assert "the process that workers are forked from has exited" in place.server.log
    place.client.unload("other")


def test_a_prepared_process_that_hangs_is_killed(tmp_path: Path) -> None:
    identity(tmp_path / "models", "m")
    options = ("--model-control-mode", "explicit", "--load-model", "m", "--load-limit-secs", "5")
    with Launched(tmp_path / "models", tmp_path / "run", *options) as server:
        with shmserve.Client(f"unix://{server.lane}") as client:
            (stopped,) = set(children_of(server.process.pid)) - set(server.workers())
            client.unload("m")
            os.kill(stopped, signal.SIGSTOP)
            with pytest.raises(Unavailable, match=r"it did not load within 5 s \(--load-limit-secs\)"):
                client.load("m")
            await_end(stopped)
            client.load("m")
        assert "the process that workers are forked from does not respond" in server.log


def test_the_prepared_process_imports_only_what_every_worker_needs() -> None:
    """No engine, no configuration parser, and no module with threads or random state."""
    text = "import os, sys\nfrom shmserve.workers import zygote\nzygote._import()\nprint(*sys.modules)\n"
    modules = set(
        subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout.split()
    )
    assert modules >= set(zygote.MODULES)
    assert not modules & {"onnxruntime", "openvino", "torch", "zmq", "uvloop"}
    assert not modules & {"google.protobuf", "importlib.metadata", "numpy.random"}
    assert not {name for name in modules if name.startswith(("shmserve.broker", "shmserve.clients", "shmserve.core"))}


def test_the_number_of_threads_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy of a distribution may lack OpenBLAS, ours does not."""
    with pytest.raises(CannotFork, match="numpy is not linked with an OpenBLAS"):
        zygote._setter(bit_generator.__file__)  # noqa: SLF001 - no model can show it
    threads = zygote._threads  # noqa: SLF001 - the process that a test can look at has the threads of its instance
    monkeypatch.delenv("GOTO_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    for openblas, openmp, expected in (("", "", cores), ("", "3,1", 3), ("2", "3,1", 2), ("many", "3,1", 3)):
        monkeypatch.setenv("OPENBLAS_NUM_THREADS", openblas)
        monkeypatch.setenv("OMP_NUM_THREADS", openmp)
        assert threads() == expected


def test_reap_waits_only_for_unknown_children() -> None:
    ended = []
    for _ in range(2):
        pid = os.fork()
        if not pid:
            os._exit(7)
        ended.append(pid)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    known, stranger = ended
    reap({known})
    assert os.waitpid(known, 0)[1] == 7 << 8
    reap(set())
    with pytest.raises(ChildProcessError):
        os.waitpid(stranger, 0)


def test_child_processes_of_a_model_end_with_its_worker(place: Place) -> None:
    client = place.client
    for is_killed in (True, False):
        client.load("forks")
        child = int(client.infer("forks", {"x": np.ones((1, 1), np.float32)}, timeout=PATIENCE_S)["y"][0, 0])
        if is_killed:
            (worker,) = pids(client, "forks").values()
            os.kill(worker, signal.SIGKILL)
        else:
            client.unload("forks", timeout=PATIENCE_S)
        await_end(child, 60)
