"""A server and its clients without a GPU import nothing for GPUs, whatever they are asked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shmserve.testing import Server
from tests.process.server.processes.test_gpus import chained
from tests.support.ensemble_models import config_text
from tests.support.gateway.running_gateway import Gateway
from tests.support.model_files import python_model, write_model
from tests.support.patience import PATIENCE_S
from tests.support.workers.models.worker_models import Graph

pytestmark = pytest.mark.process

GPU_MODULES = (
    "cupy pynvml tensorrt shmserve.gpu shmserve.session.gpu shmserve.shm.extents.cuda shmserve.workers.gpu "
    "shmserve.workers.backends.device_buffers shmserve.workers.backends.device_inputs "
    "shmserve.workers.backends.python.pb_device shmserve.workers.backends.tensorrt"
)
JOURNAL = """
import os, sys


class Journal:
    @staticmethod
    def find_spec(name, path=None, target=None):
        with open(f"{folder}/{{os.getpid()}}", "a") as file:
            file.write(name + "\\n")


sys.meta_path.insert(0, Journal)
"""
TENSORS = ("x:FP32:[40000]", "y:FP32:[40000]", "max_batch_size: 8")
CLIENT = """
import asyncio, sys
import numpy as np
import shmserve

with shmserve.Client(sys.argv[1]) as client:
    for model in ("same", "code", "engine", "both"):
        x = client.empty((2, 40000))
        x[...] = 1
        for given in (x, np.ones((2, 40000), np.float32)):
            assert client.infer(model, {"x": given}, outputs={"y": np.empty((2, 40000), np.float32)})["y"].shape
async def ask():
    async with shmserve.AsyncClient(sys.argv[1]) as client:
        await client.infer("same", {"x": np.ones((1, 40000), np.float32)})


asyncio.run(ask())
"""


def is_for_gpus(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in GPU_MODULES.split())


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each process writes the names of the modules that it looks for, found or not."""
    folder, place = tmp_path / "journal", tmp_path / "site"
    for made in (folder, place):
        made.mkdir()
    (place / "sitecustomize.py").write_text(JOURNAL.format(folder=folder))
    monkeypatch.setenv("PYTHONPATH", f"{place}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return folder


def test_no_process_imports_a_module_for_gpus(tmp_path: Path, journal: Path) -> None:
    repository = tmp_path / "models"
    write_model(repository, "same", config_text("identity", *TENSORS))
    write_model(repository, "code", config_text("python", *TENSORS), python_model("return self.respond(x + 1)"))
    engine = write_model(repository, "engine", config_text("onnxruntime", *TENSORS))
    graph = Graph().input("x", "FP32", [-1, 40000]).output("y", "FP32", [-1, 40000])
    graph.node("Identity", ["x"], ["y"]).save(engine)
    chained(repository, "both", "code", "same")
    with Server(repository) as server:
        gateway = Gateway(server, "--allow-client-shm")
        body = {"inputs": [{"name": "x", "shape": [1, 40000], "datatype": "FP32", "data": [1.0] * 40000}]}
        assert gateway.ask("POST", "/v2/models/both/infer", body)[0] == 200
        gateway.stop()
        subprocess.run([sys.executable, "-c", CLIENT, server.url], check=True, timeout=PATIENCE_S)
    found = {int(path.name): path.read_text().split() for path in journal.iterdir()}
    for module in ("broker.loop", "gateway.main", "workers.loading", "session.session", "workers.backends.onnx.run"):
        assert any(f"shmserve.{module}" in names for names in found.values()), f"no process imports {module}"
    used = {pid: [name for name in names if is_for_gpus(name)] for pid, names in found.items()}
    assert [names for names in used.values() if names] == [["pynvml"]], "only the broker looks for GPUs, once"
