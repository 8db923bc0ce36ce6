"""How calls between models end when processes do: that of the caller, that of the called, and the server's own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmserve
from tests.support.launch import Launched

pytestmark = pytest.mark.process

X = np.arange(50_000, dtype=np.float32).reshape(1, -1)

CONFIG = """
backend: "python" max_batch_size: 4
input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""

GATE = """\
import json

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.one(request) for request in requests]

    def one(self, request):
        folder = json.loads(request.parameters()).get("gate")
        if folder:
            with open(f"{folder}/begun", "wb") as begun:
                begun.write(b"x")
            with open(f"{folder}/go", "rb") as go:
                go.read(1)
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", request.inputs()[0].as_numpy() + 1)])
"""

CALLER = """\
import json

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.one(request) for request in requests]

    def one(self, request):
        tensor = request.inputs()[0]
        for wish in (json.loads(request.parameters()), {}):
            response = pb_utils.InferenceRequest(
                model_name="gate", requested_output_names=["y"], inputs=[pb_utils.Tensor("x", tensor.as_numpy())],
                parameters=wish,
            ).exec()
            if response.has_error():
                return pb_utils.InferenceResponse(error=response.error())
            tensor = response.output_tensors()[0]
        return pb_utils.InferenceResponse([tensor])
"""


class Gate:
    """Where the called model stops, until it is let go on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        for name in ("begun", "go"):
            os.mkfifo(folder / name)

    def reached(self) -> None:
        assert (self.folder / "begun").read_bytes() == b"x"

    def open(self) -> None:
        (self.folder / "go").write_bytes(b"x")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    repository = tmp_path_factory.mktemp("models")
    for name, source in (("gate", GATE), ("caller", CALLER)):
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "1" / "model.py").write_text(source)
        (repository / name / "config.pbtxt").write_text(CONFIG)
    with Launched(repository, tmp_path_factory.mktemp("run") / "r") as launched:
        yield launched


@pytest.fixture
def client(server: Launched) -> Iterator[shmserve.Client]:
    with shmserve.Client(f"unix://{server.lane}") as found:
        yield found


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path / "gate")


def under_way(client: shmserve.Client, gate: Gate, **more: Any) -> Future[Any]:
    """A request whose model waits for the one that has stopped."""
    future: Future[Any] = client.submit("caller", {"x": X}, parameters={"gate": str(gate.folder)}, **more)
    gate.reached()
    return future


def kill(client: shmserve.Client, model: str) -> None:
    (version,) = [entry for entry in client.models() if entry["name"] == model]
    os.kill(version["instances"][0]["pid"], signal.SIGKILL)


def serves(client: shmserve.Client) -> None:
    """And nothing is held any more."""
    found = client.infer("caller", {"x": X}, timeout=30)
    assert (found["y"] == X + 2).all()


def test_the_caller_dies(client: shmserve.Client, gate: Gate) -> None:
    future = under_way(client, gate)
    kill(client, "caller")
    with pytest.raises(shmserve.ModelFailed, match="SIGKILL"):
        future.result(30)
    gate.open()
    serves(client)


def test_the_called_dies(client: shmserve.Client, gate: Gate) -> None:
    future = under_way(client, gate)
    kill(client, "gate")
    with pytest.raises(shmserve.ServeError, match="model 'gate' version 1: the worker process"):
        future.result(30)
    serves(client)


def test_the_one_who_asked_waits_no_longer(client: shmserve.Client, gate: Gate) -> None:
    """Nor does anybody on the way."""
    future = under_way(client, gate, timeout=1)
    with pytest.raises(shmserve.DeadlineExceeded):
        future.result(30)
    gate.open()
    serves(client)
    statistics = client.statistics("gate")["model_stats"][0]["inference_stats"]
    assert statistics["fail"]["count"] >= 1


def test_the_server_stops(server: Launched, client: shmserve.Client, gate: Gate) -> None:
    """What is under way is finished, with the calls that are still made for it."""
    future = under_way(client, gate)
    server.signal(signal.SIGTERM)
    while client.ready():
        pass
    gate.open()
    assert (future.result(30)["y"] == X + 2).all()
    assert server.wait() == 0
