"""Several instances on one GPU, without and with NVIDIA's Multi-Process Service (MPS)."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shmserve.testing import Server
from tests.gpu.conftest import Serve
from tests.gpu.gpu_models import ADD, FACTS, WHERE, WIDTH, chain, gpu_model, numbers
from tests.support import living

pytestmark = [pytest.mark.gpu, pytest.mark.process]
CONTROL = "nvidia-cuda-mps-control"
MPS_S = 20


def models(repository: Path) -> None:
    gpu_model(repository, "add", ADD, count=2)
    gpu_model(repository, "where", WHERE, out=FACTS, count=2)
    chain(repository, "seen", "add", "where", out=FACTS)


def check(server: Server) -> None:
    """Each request gets its own values, and tensors stay on the GPU between steps."""
    with server.client() as client:
        assert len(set(living.pids(client, "add").values())) == 2
        given = [numbers(1, seed) for seed in range(24)]
        futures = [client.submit("add", {"x": x}) for x in given]
        seen = [client.submit("seen", {"x": x}) for x in given]
        for x, future in zip(given, futures, strict=True):
            np.testing.assert_array_equal(future.result()["y"], x + 1)
        found = [future.result()["y"][0] for future in seen]
        assert all(not on_host and address for _, on_host, address in found)
        assert {int(pid) for pid, _, _ in found} <= set(living.pids(client, "where").values())


def test_two_instances_on_one_gpu(serve: Serve, tmp_path: Path) -> None:
    models(tmp_path)
    server = serve(tmp_path)
    check(server)
    with server.client() as client:
        there = client.empty((1, WIDTH), "float32", device="cuda:0")
        assert not client.infer("where", {"x": there})["y"][0, 1]


@pytest.fixture
def mps(hardware: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The variables of a control daemon of its own. A GPU in another compute mode, or a container, may refuse it."""
    program = shutil.which(CONTROL)
    if program is None:
        pytest.skip(f"{CONTROL} is not installed")
    pipes, logs = tmp_path_factory.mktemp("mps"), tmp_path_factory.mktemp("mps-log")
    variables = {"CUDA_MPS_PIPE_DIRECTORY": str(pipes), "CUDA_MPS_LOG_DIRECTORY": str(logs)}
    environment = os.environ | variables
    with (logs / "start").open("w+") as log:  # a pipe would stay open in the daemon
        done = subprocess.run([program, "-d"], env=environment, stdout=log, stderr=log, timeout=MPS_S)
        log.seek(0)
        if done.returncode:
            pytest.skip(f"{CONTROL} did not start: {log.read()}")
        try:
            yield variables
        finally:
            subprocess.run([program], input=b"quit\n", env=environment, stdout=log, stderr=log, timeout=MPS_S)


def test_two_instances_on_one_gpu_with_mps(
    mps: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client does not use MPS: its context was created before. So its tensors on the GPU are in another context,
    as those of a client in another container are."""
    models(tmp_path)
    for name, value in mps.items():
        monkeypatch.setenv(name, value)
    server = Server(tmp_path, "--exit-on-error", "true", start_timeout=120)
    try:
        server.start()
    except RuntimeError as error:
        if "mps" in str(error).lower():
            pytest.skip(f"the GPU cannot be used under MPS here: {str(error)[-300:]}")
        raise
    try:
        check(server)
    finally:
        server.stop()
