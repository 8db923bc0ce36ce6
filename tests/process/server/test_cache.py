"""The response cache of a real server: what comes in frames, or lies in shared memory, is copied and compared."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import shmserve
from shmserve.testing import Server
from tests.process.pipelines.test_ensembles import model
from tests.unit.broker.observability.test_metrics import Seen

pytestmark = pytest.mark.process

NUMBER = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.asked = 0

    def execute(self, requests):
        return [self.one() for _ in requests]

    def one(self):
        self.asked += 1
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", np.full(1, self.asked, np.float32))])
"""


MANY = NUMBER.replace("np.full(1,", "np.full(50_000,")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("models")
    model(root, "number", NUMBER, "response_cache { enable: true }")
    model(root, "many", MANY, "response_cache { enable: true }")
    with Server(root, "--cache-config", "local,size=4MiB", "--exit-on-error", "true") as running:
        yield running


def hits(client: shmserve.Client) -> float:
    return Seen(client.metrics())("nv_cache_num_hits_per_model", model="number", version="1")


@pytest.mark.parametrize("size", [10, 100_000])
def test_what_comes_in_frames(server: Server, size: int) -> None:
    x = np.arange(size, dtype=np.float32)
    with shmserve.Client(server.zmq_url, memory="frames") as client:
        before = hits(client)
        first, again = (client.infer("number", {"x": x})["y"][0] for _ in range(2))
        assert first == again
        x[-1] += 1
        assert client.infer("number", {"x": x})["y"][0] == first + 1
        x[-1] -= 1
        assert client.infer("number", {"x": x})["y"][0] == first
        assert hits(client) - before == 2


def test_shared_memory_of_clients(server: Server) -> None:
    """Compared by what lies there, whatever array it is; what its owner writes later is another request."""
    with server.client() as client, server.client() as other:
        before = hits(client)
        x = client.empty((100_000,), np.float32)
        x[:] = np.arange(100_000)
        x[0] = 0.5
        first, again = (client.infer("number", {"x": x})["y"][0] for _ in range(2))
        assert again == first
        assert other.infer("number", {"x": x.copy()})["y"][0] == first
        x[-1] = 0
        assert client.infer("number", {"x": x})["y"][0] == first + 1
        assert other.infer("number", {"x": x})["y"][0] == first + 1
        assert hits(client) - before == 3


def test_memory_with_a_name_is_not_read(server: Server) -> None:
    x = np.arange(100_000, dtype=np.float32) + 0.25
    with shmserve.Client(server.zmq_url) as client:
        before = hits(client)
        first, again = (client.infer("number", {"x": x})["y"][0] for _ in range(2))
        assert again == first + 1
        assert hits(client) == before


def test_large_answers_are_kept_in_the_broker(server: Server) -> None:
    """They outlive the worker's memory, are given to whoever asks, and nobody can write to them."""
    x = np.arange(5, dtype=np.float32)
    with server.client() as client, server.client() as other:
        first = client.infer("many", {"x": x})["y"]
        again = other.infer("many", {"x": x})["y"]
        assert np.array_equal(first, np.full(50_000, first[0]))
        assert np.array_equal(again, first)
        assert not again.flags.writeable
        own = Seen(client.metrics())("shmserve_segment_bytes", owner="broker")
        assert own >= again.nbytes
        del first
        assert np.array_equal(client.infer("many", {"x": x})["y"], again)
