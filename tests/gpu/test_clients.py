"""Tensors on the GPU between clients and workers, in both directions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import shmserve
from shmserve.testing import Server
from tests.gpu.gpu_models import ADD, FACTS, WHERE, WIDTH, gpu_model, numbers

pytestmark = [pytest.mark.gpu, pytest.mark.process]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, cupy: Any) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("clients")
    gpu_model(repository, "add", ADD, more="dynamic_batching { }\n")
    gpu_model(repository, "where", WHERE, out=FACTS)
    with Server(repository, "--exit-on-error", "true", start_timeout=120) as server:
        yield server


def put(cupy: Any, array: Any, values: Any) -> None:
    cupy.asarray(array)[...] = cupy.asarray(values)
    cupy.cuda.Device(0).synchronize()


def test_a_clients_tensors_on_the_gpu_are_read_and_written(cupy: Any, client: shmserve.Client) -> None:
    """The other side of the request may be on the host."""
    x, y = (client.empty((2, WIDTH), "float32", device="cuda:0") for _ in range(2))
    for seed in range(5):
        given = numbers(2, seed)
        put(cupy, x, given)
        found: Any = client.infer("add", {"x": x}, outputs={"y": y})["y"]
        assert found is y
        np.testing.assert_array_equal(cupy.asnumpy(cupy.asarray(y)), given + 1)
        np.testing.assert_array_equal(client.infer("add", {"x": x})["y"], given + 1)
        client.infer("add", {"x": given + 1}, outputs={"y": y})
        np.testing.assert_array_equal(y.numpy(), given + 2)


def test_a_worker_reads_a_clients_tensor_in_place(cupy: Any, client: shmserve.Client) -> None:
    """Rows of one array are as far apart for the worker as for the client, and at the same place each time."""
    x = client.empty((4, WIDTH), "float32", device="cuda:0")
    put(cupy, x, numbers(4))
    rows = cupy.asarray(x)
    found = [client.infer("where", {"x": rows[row : row + 1]})["y"][0] for row in (0, 1, 3, 0)]
    assert [int(on_host) for _, on_host, _ in found] == [0, 0, 0, 0]
    first = int(found[0][2])
    assert [int(address) - first for _, _, address in found] == [0, 4 * WIDTH, 12 * WIDTH, 0]


def test_an_array_of_a_library_that_is_still_being_written(cupy: Any, client: shmserve.Client) -> None:
    """In the middle of the library's pool, in a stream of its own: the client waits for that stream."""
    given = numbers(1)
    pool = cupy.zeros((3, WIDTH), cupy.float32)
    for repeat in range(5):
        with cupy.cuda.Stream(non_blocking=True):
            for _ in range(20):
                pool[1:2] = cupy.asarray(given) * 2
            pool[1:2] = cupy.asarray(given) + repeat
            np.testing.assert_array_equal(client.infer("add", {"x": pool[1:2]})["y"], given + repeat + 1)


def test_requests_in_flight_from_the_gpu_and_the_host(cupy: Any, client: shmserve.Client) -> None:
    """They are batched together, with one copy of each to the batch."""
    given = [numbers(1 + seed % 3, seed) for seed in range(12)]
    inputs: list[Any] = []
    for number, array in enumerate(given):
        inputs.append(client.empty(array.shape, "float32", device="cuda:0") if number % 2 else array)
        if number % 2:
            put(cupy, inputs[-1], array)
    futures = [client.submit("add", {"x": x}) for x in inputs]
    for array, future in zip(given, futures, strict=True):
        np.testing.assert_array_equal(future.result()["y"], array + 1)


def test_memory_is_reused_by_later_clients_of_a_process(cupy: Any, server: Server) -> None:
    given, free = numbers(2), []
    for _ in range(6):
        with server.client() as client:
            x = client.empty((2, WIDTH), "float32", device="cuda:0")
            put(cupy, x, given)
            np.testing.assert_array_equal(client.infer("add", {"x": x})["y"], given + 1)
            del x
        free.append(cupy.cuda.runtime.memGetInfo()[0])
    assert free[1] - free[-1] < 4 << 20, "each client takes memory on the GPU"
