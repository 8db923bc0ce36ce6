"""Models that go to sleep when they are idle, and wake for requests of every kind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shmserve
from shmserve.testing import Server
from tests.support.living import IDENTITY, ONE, answer, generation, identity, renew, until
from tests.support.model_files import parameters, write_model

pytestmark = pytest.mark.process

CALLER = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        found = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x")
            called = pb_utils.InferenceRequest(model_name="called", inputs=[x], requested_output_names=["y"])
            found.append(called.exec())
        return found
"""
CHAIN = """
platform: "ensemble" max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ -1 ] } ]
ensemble_scheduling { step [
  { model_name: "first" input_map { key: "x" value: "x" } output_map { key: "y" value: "t" } },
  { model_name: "second" input_map { key: "x" value: "t" } output_map { key: "y" value: "y" } }
] }
"""
SLEEPS = parameters(idle_unload_secs="0.05")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name in ("plain", "called", "first", "second"):
        identity(root, name, SLEEPS)
    identity(root, "awake", parameters(idle_unload_secs="0.05", stay_loaded="true"))
    generation(root, "m", 1, SLEEPS)
    write_model(root, "caller", IDENTITY.replace("identity", "python") + SLEEPS, CALLER)
    write_model(root, "chain", CHAIN)
    return root


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Server]:
    with Server(root, "--model-control-mode", "explicit", "--load-model", "*", gateway=True) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[shmserve.Client]:
    with server.client() as made:
        yield made


def entry(client: shmserve.Client, name: str) -> dict[str, Any]:
    (found,) = (entry for entry in client.models() if entry["name"] == name)
    return found


def fall_asleep(client: shmserve.Client, *names: str) -> None:
    """Waits until all processes of these models have ended."""

    def all_asleep() -> bool:
        index = {entry["name"]: entry for entry in client.models()}
        return all(one["state"] == "asleep" for name in names for one in index[name]["instances"])

    until(client, all_asleep)


def test_a_request_wakes_a_sleeping_model(server: Server, client: shmserve.Client) -> None:
    fall_asleep(client, "plain")
    found = entry(client, "plain")
    assert (found["state"], found["asleep"], found["degraded"], found["reason"]) == ("READY", True, False, "")
    assert found["instances"][0]["pid"] == 0
    assert client.ready("plain")
    assert client.metadata("plain")["inputs"][0]["name"] == "x"
    command = [sys.executable, "-m", "shmserve.clients.cli.main", "models", "plain", "--runtime-dir"]
    shown = subprocess.run([*command, str(server.runtime_dir)], capture_output=True, text=True, timeout=60, check=True)
    assert "READY (asleep)" in shown.stdout
    assert entry(client, "plain")["asleep"], "questions do not wake it"
    before = client.statistics("plain")["model_stats"][0]["inference_count"]
    assert (client.infer("plain", {"x": ONE})["y"] == ONE).all()
    assert client.statistics("plain")["model_stats"][0]["inference_count"] == before + 1


def test_ensemble_steps_and_model_calls_wake_sleeping_models(client: shmserve.Client) -> None:
    for name, members in (("chain", ("first", "second")), ("caller", ("caller", "called"))):
        fall_asleep(client, *members)
        assert client.ready(name)
        assert (client.infer(name, {"x": ONE})["y"] == ONE).all()
    assert not entry(client, "awake")["asleep"], "it has been idle for as long, and stays loaded"


def test_a_woken_model_has_the_generation_that_was_loaded(client: shmserve.Client, root: Path) -> None:
    """Not the repository's current state."""
    assert answer(client, "m") == 1
    fall_asleep(client, "m")
    renew(root / "m", 2)
    assert answer(client, "m") == 1
    fall_asleep(client, "m")
    client.load("m")
    assert answer(client, "m") == 2
    fall_asleep(client, "m")
    client.unload("m")
    assert entry(client, "m")["state"] != "READY"
    client.load("m")
    assert answer(client, "m") == 2
