"""Many sequences at once over several instances, with their states in the workers. The responses to a sequence are
compared with numpy's result for that sequence alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmserve.testing import Server
from tests.support.clients.client_faces import connect
from tests.support.ensemble_models import config_text
from tests.support.living import write
from tests.support.workers.models.worker_models import Graph

pytestmark = pytest.mark.process

Array = np.ndarray[Any, np.dtype[Any]]

SEQUENCES = 32
WIDTH, STATES = 3, 5
WEIGHTS = np.random.default_rng(5)
W = WEIGHTS.standard_normal((WIDTH, STATES)).astype(np.float32)
U = (WEIGHTS.standard_normal((STATES, STATES)) / STATES).astype(np.float32)
V = WEIGHTS.standard_normal((STATES, 2)).astype(np.float32)

RECURRENT = config_text(
    "onnxruntime", f"x:FP32:[{WIDTH}]", "y:FP32:[2]", "max_batch_size: 8 instance_group { count: 2 kind: KIND_CPU }"
)
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


def write_models(root: Path) -> None:
    for name, strategy in WAYS.items():
        recurrent(root, name, strategy)


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
