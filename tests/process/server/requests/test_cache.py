"""The response cache of a real server: it copies and compares inputs from frames and from shared memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import shmserve
from shmserve.testing import Server
from tests.support.broker.metrics import Seen
from tests.support.ensemble_models import model
from tests.support.model_files import python_model

pytestmark = pytest.mark.process

NUMBER = python_model(
    """
    self.executions += 1
    return self.respond(np.full(1, self.executions, np.float32))
    """,
    "self.executions = 0",
)
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


def test_inputs_in_shared_memory_are_cached(server: Server) -> None:
    """Requests are equal if their bytes are, in any array. If the owner changes the bytes, the request is a different
    one."""
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


def test_large_responses_are_kept_in_the_broker(server: Server) -> None:
    """They outlive the worker's memory, are shared by all clients, and are read-only."""
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
