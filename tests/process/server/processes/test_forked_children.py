"""Child processes of a model end with its worker, and workers are forked only if --prepared-process is set."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

import shmserve
from tests.support.launch import Launched, await_end, children_of
from tests.support.model_files import python_model, write_model

pytestmark = pytest.mark.process

CONFIG = """
backend: "python" max_batch_size: 1
input { name: "x" data_type: TYPE_FP32 dims: -1 } output { name: "y" data_type: TYPE_INT64 dims: -1 }
"""
STARTS_CHILD = 'import subprocess; self.child = subprocess.Popen(["sleep", "100000"])'
FORKS = python_model("return self.respond(np.array([[self.child.pid]], np.int64))", STARTS_CHILD)


@pytest.mark.parametrize("is_prepared", [True, False], ids=["prepared", "fresh"])
def test_child_processes_of_a_model_end_with_its_worker(tmp_path: Path, is_prepared: bool) -> None:
    write_model(tmp_path / "models", "forks", CONFIG, FORKS)
    options = ["--model-control-mode", "explicit", "--prepared-process", str(is_prepared).lower()]
    with (
        Launched(tmp_path / "models", tmp_path / "run", *options) as server,
        shmserve.Client(f"unix://{server.lane}") as client,
    ):
        for end_worker in (kill_worker, unload):
            client.load("forks")
            child = int(client.infer("forks", {"x": np.ones((1, 1), np.float32)}, timeout=60)["y"][0, 0])
            assert (children_of(server.process.pid) == server.workers()) is not is_prepared
            end_worker(server, client)
            await_end(child, 60)


def kill_worker(server: Launched, _: shmserve.Client) -> None:
    (worker,) = server.workers()
    os.kill(worker, signal.SIGKILL)
    await_end(worker)


def unload(_: Launched, client: shmserve.Client) -> None:
    client.unload("forks", timeout=60)
