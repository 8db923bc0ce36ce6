"""Calls between models while the calling worker, the called worker or the server ends."""

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
from tests.support.model_files import python_model, write_model

pytestmark = pytest.mark.process

X = np.arange(50_000, dtype=np.float32).reshape(1, -1)

CONFIG = """
backend: "python" max_batch_size: 4
input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""

GATE = python_model(
    """
    folder = json.loads(request.parameters()).get("gate")
    if folder:
        with open(f"{folder}/begun", "wb") as begun:
            begun.write(b"x")
        with open(f"{folder}/go", "rb") as go:
            go.read(1)
    return self.respond(x + 1)
    """
)
CALLER = python_model(
    """
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
)


class Gate:
    """Two pipes at which the called model waits until the test opens the gate."""

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
        write_model(repository, name, CONFIG, source)
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
    """Submits a request, and returns when the called model waits at the gate."""
    future: Future[Any] = client.submit("caller", {"x": X}, parameters={"gate": str(gate.folder)}, **more)
    gate.reached()
    return future


def kill(client: shmserve.Client, model: str) -> None:
    (version,) = [entry for entry in client.models() if entry["name"] == model]
    os.kill(version["instances"][0]["pid"], signal.SIGKILL)


def test_killing_the_calling_worker_runs_the_request_again(client: shmserve.Client, gate: Gate) -> None:
    future = under_way(client, gate)
    kill(client, "caller")
    gate.open()
    gate.reached()
    gate.open()
    assert (future.result(30)["y"] == X + 2).all()


def test_a_stop_waits_for_a_call_in_flight(server: Launched, client: shmserve.Client, gate: Gate) -> None:
    future = under_way(client, gate)
    server.signal(signal.SIGTERM)
    while client.ready():
        pass
    gate.open()
    assert (future.result(30)["y"] == X + 2).all()
    assert server.wait() == 0
