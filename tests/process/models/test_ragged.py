"""Ragged batches through a server: requests of different shapes run together."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import shmserve
from shmserve.testing import Server
from tests.support.model_files import write_model
from tests.support.shared_server import SharedServer
from tests.support.workers.models.worker_models import Graph

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


XS = [np.random.default_rng(1).random(shape, np.float32) for shape in ((1, 2, 3), (1, 70, 90), (1, 1, 1))]
"""A batch starts when it is full: after three requests with different shapes."""


@pytest.fixture(scope="module")
def server(shared_server: SharedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("models")
    write_model(root, "same", IDENTITY.replace('"y"', '"x"'))
    graph = Graph().input("x", "FP32", [-1]).output("y", "FP32", [-1]).weight("two", np.float32(2))
    graph.input("sums", "INT32", [-1]).output("upto", "INT32", [-1, 1]).weight("column", np.array([-1, 1]))
    graph.node("Mul", ["x", "two"], ["y"]).node("Reshape", ["sums", "column"], ["upto"])
    graph.save(write_model(root, "ragged", CONFIG))
    with shared_server.serving(root) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[shmserve.Client]:
    with server.client() as client:
        yield client


def test_identity_returns_ragged_inputs_unchanged(client: shmserve.Client) -> None:
    """It needs no batch_output, like Triton's backend of that name."""
    futures = [client.submit("same", {"x": x, "plain": np.array([[number]], np.int32)}) for number, x in enumerate(XS)]
    for number, (future, x) in enumerate(zip(futures, XS, strict=True)):
        found = future.result()
        np.testing.assert_array_equal(found["x"], x)
        assert found["z"].tolist() == [[number]]
    assert client.statistics("same")["model_stats"][0]["execution_count"] == 1


def test_requests_of_different_shapes_share_a_batch(client: shmserve.Client) -> None:
    futures = [client.submit("ragged", {"x": x}) for x in XS]
    for total, future, x in zip(np.cumsum([x.size for x in XS]), futures, XS, strict=True):
        found = future.result()
        assert found["upto"].tolist() == [[total]]
        np.testing.assert_array_equal(found["y"], 2 * x)
