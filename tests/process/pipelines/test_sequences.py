"""Sequences: many at once over several instances, crashes, reloads, timeouts and cancellation.

The responses to a sequence are compared with numpy's result for that sequence alone.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmserve
from shmserve.testing import Server
from tests.support.clients.client_faces import connect
from tests.support.living import group, pids, renew, until, write
from tests.support.model_files import python_model, write_model
from tests.support.shared_server import SharedServer
from tests.support.workers.models.worker_models import Graph

pytestmark = pytest.mark.process

Array = np.ndarray[Any, np.dtype[Any]]
Name = int | str

SEQUENCES = 32
WIDTH, STATES = 3, 5
WEIGHTS = np.random.default_rng(5)
W = WEIGHTS.standard_normal((WIDTH, STATES)).astype(np.float32)
U = (WEIGHTS.standard_normal((STATES, STATES)) / STATES).astype(np.float32)
V = WEIGHTS.standard_normal((STATES, 2)).astype(np.float32)

RECURRENT = f"""
backend: "onnxruntime" max_batch_size: 8
input [ {{ name: "x" data_type: TYPE_FP32 dims: [ {WIDTH} ] }} ]
output [ {{ name: "y" data_type: TYPE_FP32 dims: [ 2 ] }} ]
instance_group [ {{ count: 2 kind: KIND_CPU }} ]
"""
STATE = f"""
  max_sequence_idle_microseconds: 60000000
  state [ {{ input_name: "h" output_name: "h2" data_type: TYPE_FP32 dims: [ {STATES} ] }} ]
"""
WAYS = {
    "direct": "direct { }",
    "patient": "direct { minimum_slot_utilization: 0.5 max_queue_delay_microseconds: 2000 }",
    "oldest": "oldest { max_candidate_sequences: 16 }",
    "oldest_delay": "oldest { max_candidate_sequences: 6 preferred_batch_size: [ 4 ] "
    "max_queue_delay_microseconds: 2000 }",
}

SUMS = python_model(
    """
    name, flags = request.correlation_id(), request.flags()
    if flags & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
        self.sums[name] = 0.0
    self.sums[name] += x[0, 0]
    found = [self.sums[name], self.generation, os.getpid()]
    if flags & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END:
        del self.sums[name]
    return self.respond(np.array([found], np.float64))
    """,
    """
    with open(os.path.join(args["model_repository"], args["model_version"], "generation")) as file:
        self.generation = float(file.read())
    self.sums = {}
    """,
)
PYTHON = """
backend: "python" max_batch_size: 4
input [ { name: "x" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "y" data_type: TYPE_FP64 dims: [ -1 ] } ]
"""


def summing(root: Path, name: str, instances: int = 1) -> None:
    batching = "sequence_batching { direct { } max_sequence_idle_microseconds: 60000000 }\n"
    renew(write_model(root, name, PYTHON + batching + group(instances), SUMS), 1)


def recurrent(root: Path, name: str, strategy: str) -> None:
    """h' = tanh(x W + h U), y = h' V: the state stays with the worker."""
    folder = root / name
    folder.mkdir()
    graph = Graph().input("x", "FP32", [-1, WIDTH]).input("h", "FP32", [-1, STATES])
    graph.output("y", "FP32", [-1, 2]).output("h2", "FP32", [-1, STATES])
    graph.weight("w", W).weight("u", U).weight("v", V)
    graph.node("MatMul", ["x", "w"], ["xw"]).node("MatMul", ["h", "u"], ["hu"]).node("Add", ["xw", "hu"], ["sum"])
    graph.node("Tanh", ["sum"], ["h2"]).node("MatMul", ["h2", "v"], ["y"]).save(folder)
    write(folder / "config.pbtxt", f"{RECURRENT} sequence_batching {{ {strategy} {STATE} }}")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name, strategy in WAYS.items():
        recurrent(root, name, strategy)
    summing(root, "mortal", instances=2)
    summing(root, "renewed")
    return root


@pytest.fixture(scope="module")
def server(shared_server: SharedServer, repository: Path) -> Iterator[Server]:
    with shared_server.serving(repository) as made:
        yield made


@pytest.fixture
def client(server: Server) -> Iterator[shmserve.Client]:
    with server.client() as made:
        yield made


class Summed:
    """A sequence of a summing model, and the expected sum."""

    def __init__(self, client: shmserve.Client, model: str, name: Name) -> None:
        self.client, self.model, self.name = client, model, name
        self.sum = 0.0
        self.generation = self.pid = 0

    def send(self, x: float, flags: str = "") -> shmserve.Result:
        start, end = "start" in flags, "end" in flags
        return self.client.infer(
            self.model,
            {"x": np.array([[x]], np.float32)},
            sequence=self.name,
            sequence_start=start,
            sequence_end=end,
            timeout=30,
        )

    def step(self, x: float, flags: str = "") -> None:
        total, generation, pid = self.send(x, flags)["y"][0].tolist()
        self.sum = x if "start" in flags else self.sum + x
        assert total == self.sum
        assert "start" in flags or (self.generation, self.pid) == (generation, pid), "it has moved"
        self.generation, self.pid = generation, int(pid)


def alone(x: Array) -> Array:
    h = np.zeros((1, STATES), np.float32)
    rows = []
    for step in x:
        h = np.tanh(step[None] @ W + h @ U)
        rows.append(h @ V)
    return np.concatenate(rows)


@pytest.mark.parametrize("link", ["lane", "zmq"])
@pytest.mark.parametrize("model", WAYS)
def test_interleaved_sequences(server: Server, model: str, link: str) -> None:
    """Interleaved at random, in order within each sequence; ids are numbers and strings."""
    made = np.random.default_rng(len(model))
    steps = [made.standard_normal((4 + number % 9, WIDTH)).astype(np.float32) for number in range(SEQUENCES)]
    turns = [number for number, x in enumerate(steps) for _ in x]
    random.Random(model + link).shuffle(turns)
    futures: list[list[Any]] = [[] for _ in steps]
    with connect(server, f"sync {link}") as client:
        for number in turns:
            at = len(futures[number])
            futures[number].append(
                client.submit(
                    model,
                    {"x": steps[number][at : at + 1]},
                    sequence=number + 1 if number % 2 else f"number {number}",
                    sequence_start=at == 0,
                    sequence_end=at == len(steps[number]) - 1,
                )
            )
        for x, found in zip(steps, futures, strict=True):
            got = np.concatenate([future.result()["y"] for future in found])
            np.testing.assert_allclose(got, alone(x), rtol=1e-4, atol=1e-5)


def test_sequences_of_a_killed_worker_end(client: shmserve.Client) -> None:
    sequences = [Summed(client, "mortal", number) for number in range(1, 9)]
    for sequence in sequences:
        sequence.step(sequence.name, "start")  # type: ignore[arg-type]
    victim = sequences[0].pid
    lost = [sequence for sequence in sequences if sequence.pid == victim]
    assert len(lost) == 4
    os.kill(victim, signal.SIGKILL)
    until(client, lambda: victim not in pids(client, "mortal").values(), "its end is noticed")
    for sequence in sequences:
        if sequence in lost:
            with pytest.raises(shmserve.Unavailable, match=f"sequence {sequence.name} has ended: .*send START again"):
                sequence.send(1)
        else:
            sequence.step(2)
    for sequence in lost:
        sequence.step(5, "start")
        assert sequence.pid != victim
    for sequence in sequences:
        sequence.step(1, "end")


def test_a_reload_keeps_live_sequences_on_the_old_generation(client: shmserve.Client, repository: Path) -> None:
    old, new = Summed(client, "renewed", 1), Summed(client, "renewed", 2)
    old.step(1, "start")
    renew(repository / "renewed", 2)
    assert client.load("renewed")["changed"] is True
    new.step(1, "start")
    old.step(2)
    new.step(3)
    old.step(4, "end")
    new.step(5, "end")
    assert (old.generation, new.generation) == (1, 2)
    old.step(7, "start end")
    assert old.generation == 2
