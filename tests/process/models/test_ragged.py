"""Ragged batches by way of a server: requests of different shapes run together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shmserve.testing import Server
from tests.support.workers.worker_models import Graph

pytestmark = pytest.mark.process

CONFIG = """backend: "onnxruntime"
max_batch_size: 3
input { name: "x" data_type: TYPE_FP32 dims: [ -1, -1 ] allow_ragged_batch: true }
output { name: "y" data_type: TYPE_FP32 dims: [ -1, -1 ] }
output { name: "upto" data_type: TYPE_INT32 dims: 1 }
batch_input { kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "sums" data_type: TYPE_INT32 source_input: "x" }
batch_output { kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "y" source_input: "x" }
dynamic_batching { max_queue_delay_microseconds: 60000000 }
instance_group { count: 1 }
"""


IDENTITY = """backend: "identity"
max_batch_size: 3
input { name: "x" data_type: TYPE_FP32 dims: [ -1, -1 ] allow_ragged_batch: true }
input { name: "plain" data_type: TYPE_INT32 dims: 1 }
output { name: "y" data_type: TYPE_FP32 dims: [ -1, -1 ] }
output { name: "z" data_type: TYPE_INT32 dims: 1 }
dynamic_batching { max_queue_delay_microseconds: 60000000 }
instance_group { count: 1 }
"""


def test_identity_repeats_ragged_inputs(tmp_path: Path) -> None:
    """Without batch_output, as with Triton's backend of that name."""
    (tmp_path / "same" / "1").mkdir(parents=True)
    (tmp_path / "same" / "config.pbtxt").write_text(IDENTITY.replace('"y"', '"x"'))
    xs = [np.random.default_rng(1).random(shape, np.float32) for shape in ((1, 2, 3), (1, 70, 90), (1, 1, 1))]
    with Server(tmp_path) as server, server.client() as client:
        futures = [
            client.submit("same", {"x": x, "plain": np.array([[number]], np.int32)}) for number, x in enumerate(xs)
        ]
        for number, (future, x) in enumerate(zip(futures, xs, strict=True)):
            found = future.result()
            assert (found["x"] == x).all()
            assert found["x"].shape == x.shape
            assert found["z"].tolist() == [[number]]
            del found
        assert client.statistics("same")["model_stats"][0]["execution_count"] == 1


def test_requests_of_different_shapes_share_a_batch(tmp_path: Path) -> None:
    """A batch starts when it is full: three requests, none of which has the shape of another."""
    graph = Graph().input("x", "FP32", [-1]).output("y", "FP32", [-1]).weight("two", np.float32(2))
    graph.input("sums", "INT32", [-1]).output("upto", "INT32", [-1, 1]).weight("column", np.array([-1, 1]))
    graph.node("Mul", ["x", "two"], ["y"]).node("Reshape", ["sums", "column"], ["upto"]).save(tmp_path / "ragged")
    (tmp_path / "ragged" / "config.pbtxt").write_text(CONFIG)
    xs = [np.random.default_rng(1).random(shape, np.float32) for shape in ((1, 2, 3), (1, 70, 90), (1, 1, 1))]
    with Server(tmp_path) as server, server.client() as client:
        futures = [client.submit("ragged", {"x": x}) for x in xs]
        total = 0
        for future, x in zip(futures, xs, strict=True):
            found = future.result()
            total += x.size
            assert found["upto"].tolist() == [[total]]
            assert (found["y"] == 2 * x).all()
            del found
