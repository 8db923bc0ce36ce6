"""Processes that a model started end with its worker, however that ends."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import shmserve
from bench.lib import models
from tests.support.launch import Launched

pytestmark = pytest.mark.process

FORKS = """
import signal
import subprocess

import numpy
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.child = subprocess.Popen(["sleep", "100000"])

    def execute(self, requests):
        pid = pb_utils.Tensor("y", numpy.array([[self.child.pid]], numpy.int64))
        return [pb_utils.InferenceResponse([pid]) for _ in requests]
"""


@pytest.fixture(params=["true", "false"], ids=["prepared", "fresh"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Launched]:
    root = tmp_path / "models"
    model = models.Model("python", {"x": ("FP32", [-1])}, {"y": ("INT64", [-1])}, max_batch=1)
    models.write(root, "forks", model, {"model.py": FORKS})
    options = ["--model-control-mode", "explicit", "--load-model", "forks", "--prepared-process", request.param]
    with Launched(root, tmp_path / "run", *options) as server:
        yield server


@pytest.mark.parametrize("how", ["killed", "unloaded"])
def test_what_a_model_started_ends_with_its_worker(server: Launched, how: str) -> None:
    with shmserve.Client(f"unix://{server.lane}") as client:
        child = int(client.infer("forks", {"x": np.ones((1, 1), np.float32)}, timeout=60)["y"][0, 0])
        watched = os.pidfd_open(child)
        try:
            if how == "killed":
                (worker,) = server.workers()
                os.kill(worker, signal.SIGKILL)
            else:
                client.unload("forks", timeout=60)
            assert select.select([watched], [], [], 60)[0], "it outlives its worker"
        finally:
            os.close(watched)
