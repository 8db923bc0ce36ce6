"""Tensors of both clients over every link through real workers, which read and write the memory in place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import shmserve
from shmserve.dtypes import ITEM_BYTES
from shmserve.shm import views
from shmserve.testing import Server
from tests.conformance.client_ways import NUMBERS, data
from tests.support.clients.client_faces import connect
from tests.support.gateway.running_gateway import model
from tests.support.shared_server import SharedServer

pytestmark = pytest.mark.process

WAYS = ["sync lane", "sync ipc", "sync frames", "asyncio lane", "uvloop ipc"]


@pytest.fixture(scope="module")
def server(shared_server: SharedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("models")
    model(repository, "types", list(ITEM_BYTES), "[ -1, -1 ]", 0)
    model(repository, "batched", ["FP32"], "[ -1 ]", 8, "dynamic_batching { }\n")
    with shared_server.serving(repository) as running:
        with shmserve.Client(running.zmq_url) as client:
            # Named segments stay while their workers live: create all that the tests need before the leak check starts.
            x = np.zeros((2, 150_000), np.float32)
            futures = [client.submit("batched", {"i_FP32": x}) for _ in range(24)]
            futures.append(client.submit("types", {f"i_{name}": data(name, (100, 600)) for name in NUMBERS}
                                         | {"i_BYTES": np.full((70, 600), b"word", object)}))  # fmt: skip
            for future in futures:
                future.result()
            del futures, future
        yield running


@pytest.fixture(params=WAYS)
def client(request: pytest.FixtureRequest, server: Server) -> Iterator[Any]:
    with connect(server, request.param) as made:
        yield made


@pytest.mark.parametrize("shape", [(3, 5), (7, 600), (0, 4)], ids=str)
def test_all_types(client: Any, shape: tuple[int, int]) -> None:
    inputs = {f"i_{name}": data(name, shape) for name in NUMBERS}
    words = [[f"{row}.{column}".encode() for column in range(shape[1])] for row in range(shape[0])]
    inputs["i_BYTES"] = np.array(words, object).reshape(shape)
    result = client.infer("types", inputs)
    for name in ITEM_BYTES:
        np.testing.assert_array_equal(result[f"o_{name}"], inputs[f"i_{name}"])
        assert result[f"o_{name}"].dtype == inputs[f"i_{name}"].dtype
        assert not result[f"o_{name}"].flags.writeable


def test_inputs_and_outputs_in_client_memory(client: Any) -> None:
    x = client.empty((1, 100_000))
    place = client.empty((1, 100_000))
    x[:] = np.arange(100_000)
    first = client.infer("batched", {"i_FP32": x}, outputs={"o_FP32": place})
    assert first["o_FP32"] is place
    np.testing.assert_array_equal(place, x)
    second = client.infer("batched", {"i_FP32": place})["o_FP32"]
    third = client.infer("batched", {"i_FP32": second})["o_FP32"]
    np.testing.assert_array_equal(third, x)
    rows = client.infer("batched", {"i_FP32": x[:, 500:90_500]}, outputs=["o_FP32"])["o_FP32"]
    np.testing.assert_array_equal(rows, x[:, 500:90_500])


def test_output_memory_is_reused(server: Server) -> None:
    with server.client() as client:
        x = np.zeros((1, 100_000), np.float32)
        places = set()
        for number in range(20):
            result = client.infer("batched", {"i_FP32": x + number})["o_FP32"]
            assert (result == number).all()
            hold = views.hold_of(result)
            assert hold is not None
            places.add(hold.what)
            del result, hold
        assert len(places) <= 3, "what is dropped goes back and is used again"
