"""Python models in a server: calls of other models, loading, metrics, logs, and what is copied."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmserve
from shmserve.shm import views
from tests.support.docs import pages
from tests.support.ensemble_models import config_text
from tests.support.launch import Launched
from tests.support.living import until
from tests.support.model_files import parameters, write_model
from tests.support.patience import PATIENCE_S
from tests.support.workers.models.python_models import (
    CALLER,
    CONTROL,
    GATHER,
    LEAF,
    MANY,
    READY,
    RELAY,
    STACKED,
    SUMS,
    WIDE,
)

pytestmark = pytest.mark.process

LARGE = np.arange(300_000, dtype=np.float32).reshape(1, -1)

FORKING = """
import asyncio
from multiprocessing import get_context

import numpy as np
import triton_python_backend_utils as pb_utils


def ask(how, value):
    x = pb_utils.Tensor("x", np.full((1, 1), value, np.float32))
    request = pb_utils.InferenceRequest("none" if how == "unknown" else "leaf", ["y"], [x])
    if how == "soon":
        response = asyncio.run(request.async_exec())
    elif how == "parts":
        (response,) = request.exec(decoupled=True)
    else:
        response = request.exec()
    if response.has_error():
        return -1 if "none" in response.error().message() else -2
    return float(pb_utils.get_output_tensor_by_name(response, "y").as_numpy()[0, 0])


class TritonPythonModel:
    def execute(self, requests):
        with get_context("fork").Pool(2) as pool:  # ends its processes by SIGTERM
            found = pool.starmap(ask, [("exec", 5), ("soon", 6), ("parts", 7), ("unknown", 8)])
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([found], np.float32))]) for _ in requests]
"""
IS_STACKED = parameters(stacked="true")
DECOUPLED = "model_transaction_policy { decoupled: true }"


def add(repository: Path, name: str, source: str, more: str = "") -> None:
    write_model(repository, name, config_text("python", "x", "y", f"max_batch_size: 4 {more}"), source)


def on_the_page(repository: Path) -> None:
    """Writes the models of the page, and the model that they call."""
    blocks = pages.blocks(pages.page("python"), "python")
    for name, sign, given, made, more in (
        ("centred", "x.mean", "X", "Y", f"max_batch_size: 8 {IS_STACKED}"),
        ("asks", 'model_name="scale"', "X", "Y", "max_batch_size: 8"),
        ("words", "words_total", "TEXT:STRING", "COUNT:INT32", ""),
    ):
        (source,) = [block for block in blocks if sign in block]
        write_model(repository, name, config_text("python", given, made, more), source)
    config = config_text("python", "X", "Y", "max_batch_size: 4")
    write_model(repository, "scale", config, LEAF.replace('"y"', '"Y"').replace("leaf_requests", "scale_requests"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    repository = tmp_path_factory.mktemp("models")
    add(repository, "leaf", LEAF, "instance_group [ { count: 2 kind: KIND_CPU } ]")
    for name, source, more in (
        ("caller", CALLER, ""), ("gather", GATHER, ""), ("many", MANY, DECOUPLED),
        ("sums", SUMS, DECOUPLED), ("wide", WIDE, DECOUPLED), ("relay", RELAY, DECOUPLED),
        ("spare", STACKED, ""), ("control", CONTROL, ""), ("moody", READY, ""),
        ("stacked", STACKED, IS_STACKED), ("forking", FORKING, ""),
    ):  # fmt: skip
        add(repository, name, source, more)
    on_the_page(repository)
    options = ["--model-control-mode", "explicit"]
    for folder in sorted(repository.iterdir()):
        if folder.name not in ("spare", "control"):
            options += ["--load-model", folder.name]
    with Launched(repository, tmp_path_factory.mktemp("run") / "r", *options) as launched:
        yield launched


@pytest.fixture
def client(server: Launched) -> Iterator[shmserve.Client]:
    with shmserve.Client(f"unix://{server.lane}") as found:
        yield found


def maker(array: np.ndarray[Any, Any]) -> int:
    """The pid of the process that owns the memory."""
    hold = views.hold_of(array)
    assert hold is not None
    return int(hold.what.segment) >> 32


def test_outputs_are_copied_once_and_inputs_never(client: shmserve.Client) -> None:
    copies = []
    for _ in range(8):
        found = client.infer("leaf", {"x": LARGE})
        assert (found["y"] == LARGE * 2).all()
        assert found.parameters["shared"] is True
        copies.append(json.loads(found.parameters["copied"]))
    assert [LARGE.nbytes] in copies
    assert all(sizes in ([], [LARGE.nbytes]) for sizes in copies)  # it reports the copies made before


def test_responses_of_a_called_model_are_relayed_as_they_arrive(client: shmserve.Client) -> None:
    """Tested with a slow reader, and with one that closes the stream early. Nothing is copied or kept."""
    (made,) = {maker(answer["y"]) for answer in client.stream("wide", {"x": np.full((1, 1), 3, np.float32)})}
    with client.stream("relay", {"x": np.full((1, 1), 300, np.float32)}, window=2) as answers:
        for number, answer in enumerate(answers):
            assert (answer["y"] == number).all()
            assert maker(answer["y"]) == made
    assert number == 299
    with client.stream("relay", {"x": np.full((1, 1), 1e6, np.float32)}, window=2) as answers:
        assert (next(answers)["y"] == 0).all()
    del answer, answers
    nothing_is_held(client)


def nothing_is_held(client: shmserve.Client) -> None:
    for _ in range(200):
        if not held_bytes(client):
            return
        client.infer("caller", {"x": np.zeros((1, 1), np.float32)})
    raise AssertionError("handles were not given back")


def held_bytes(client: shmserve.Client) -> float:
    line = next(line for line in client.metrics().splitlines() if line.startswith("shmserve_held_bytes "))
    return float(line.split()[1])


def test_many_concurrent_calls_return_all_memory(server: Launched, client: shmserve.Client) -> None:
    random = np.random.default_rng(7)
    inputs = [np.full((1, size), number, np.float32) for number, size in enumerate((1, 700, 1500, 40_000, 300_000))]
    found = []
    for _ in range(120):
        x = inputs[random.integers(len(inputs))]
        name = ("gather", "caller")[random.integers(2)]
        found.append((name, x, client.submit(name, {"x": x}, timeout=PATIENCE_S)))
        if random.random() < 0.1:
            found.pop()[2].cancel()
    with client.stream("sums", {"x": np.ones((1, 500), np.float32)}) as answers:
        assert float(next(answers)["y"][0, 0]) == 1  # but no further ones
    for name, x, future in found:
        y = future.result()["y"]
        assert y.shape == x.shape
        assert (y == x * (4 if name == "gather" else 2)).all()
    assert server.process.poll() is None
    del found, future, y, answers
    nothing_is_held(client)
    assert " ended: " not in server.log


def test_processes_of_a_pool_call_models(client: shmserve.Client) -> None:
    assert client.infer("forking", {"x": np.zeros((1, 1), np.float32)})["y"].tolist() == [[10, 12, 14, -1]]


def test_the_examples_of_the_page(client: shmserve.Client) -> None:
    x = np.array([[1, 2, 6]], np.float32)
    assert client.infer("centred", {"X": x})["Y"].tolist() == [[-2, -1, 3]]
    assert (client.infer("asks", {"X": LARGE})["Y"] == LARGE * 2).all()
    found = client.infer("words", {"TEXT": np.array(["to be or not to be"], object)})["COUNT"]
    assert found.dtype == np.int32
    assert found.tolist() == [6]
    lines = client.metrics().splitlines()
    assert 'words_total{model="words"} 6' in lines
    assert 'text_bytes_bucket{le="100"} 1' in lines


def test_a_model_loads_and_unloads_other_models(client: shmserve.Client) -> None:
    client.load("control")
    for expected in ([0, 1], [1, 0]):
        assert client.infer("control", {"x": np.zeros((1, 1), np.float32)})["y"].tolist()[0] == expected
    client.unload("control")


def test_a_model_reports_whether_it_is_ready(server: Launched, client: shmserve.Client) -> None:
    assert client.ready("moody")
    for number, ready in ((2, False), (1, True), (3, False), (4, False), (1, True)):
        client.infer("moody", {"x": np.full((1, 1), number, np.float32)})
        assert client.ready("moody") is ready
        assert client.ready()
    # Output of a worker may be logged after its answers.
    until(client, lambda: "is_ready of model instance 'moody_0_0' returned int, not True or False" in server.log)
    until(client, lambda: "ValueError: it broke" in server.log)


def test_metrics_of_models_survive_a_restart(client: shmserve.Client) -> None:
    def counts() -> dict[str, float]:
        lines = client.metrics().splitlines()
        assert "# TYPE leaf_requests counter" in lines
        pairs = [line.rsplit(" ", 1) for line in lines if line.startswith("leaf_requests")]
        return {name: float(value) for name, value in pairs}

    before = counts()
    for _ in range(7):
        client.infer("leaf", {"x": LARGE})
    after = counts()
    assert after["leaf_requests"] == before["leaf_requests"] + 7
    instances = [value for name, value in after.items() if name.startswith('leaf_requests{instance="leaf_0_')]
    assert (len(instances), sum(instances)) == (2, after["leaf_requests"])
    client.restart("leaf")
    assert counts() == after
