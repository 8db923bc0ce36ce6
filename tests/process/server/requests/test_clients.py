"""Both clients over every link against a real server with the identity model. The oracle is numpy."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmserve
from shmserve.dtypes import ITEM_BYTES
from shmserve.shm import views
from shmserve.testing import Server
from tests.conformance.client_ways import NUMBERS, data
from tests.support.clients.client_faces import FACES, connect
from tests.support.gateway.running_gateway import model
from tests.support.model_files import parameters

pytestmark = pytest.mark.process

WAYS = ["sync lane", "sync ipc", "sync frames", "asyncio lane", "uvloop ipc"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("models")
    model(repository, "types", list(ITEM_BYTES), "[ -1, -1 ]", 0)
    model(repository, "batched", ["FP32"], "[ -1 ]", 8, "dynamic_batching { }\n")
    model(repository, "slow", ["FP32"], "[ -1 ]", 1, parameters(delay_us="200000"))
    queue = "dynamic_batching { default_queue_policy { default_timeout_microseconds: 1000 } }\n"
    model(repository, "impatient", ["FP32"], "[ -1 ]", 1, queue + parameters(delay_us="200000"))
    with Server(repository, "--exit-on-error", "true") as running:
        with shmserve.Client(running.zmq_url) as client:
            # Named segments stay while their workers live: create all that the tests need before the leak check starts.
            x = np.zeros((2, 150_000), np.float32)
            futures = [client.submit("batched", {"i_FP32": x}) for _ in range(24)]
            futures += [client.submit(name, {"i_FP32": x[:1]}) for name in ("slow", "impatient")]
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


@pytest.mark.parametrize("shape", [(3, 5), (7, 600), (0, 4), (1, 1)], ids=str)
def test_all_types(client: Any, shape: tuple[int, int]) -> None:
    inputs = {f"i_{name}": data(name, shape) for name in NUMBERS}
    words = [[f"{row}.{column}".encode() for column in range(shape[1])] for row in range(shape[0])]
    inputs["i_BYTES"] = np.array(words, object).reshape(shape)
    result = client.infer("types", inputs)
    for name in ITEM_BYTES:
        np.testing.assert_array_equal(result[f"o_{name}"], inputs[f"i_{name}"])
        assert result[f"o_{name}"].dtype == inputs[f"i_{name}"].dtype
        assert not result[f"o_{name}"].flags.writeable


@pytest.mark.parametrize("width", [10, 50_000])
def test_many_requests_share_batches(client: Any, width: int) -> None:
    x = np.arange(2 * width, dtype=np.float32).reshape(2, width)
    futures = [client.submit("batched", {"i_FP32": x + number}) for number in range(24)]
    for number, future in enumerate(futures):
        np.testing.assert_array_equal(future.result()["o_FP32"], x + number)


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


def test_deadlines_queue_timeouts_and_cancellation(client: Any) -> None:
    x = np.zeros((1, 30_000), np.float32)
    with pytest.raises(shmserve.DeadlineExceeded):
        client.infer("slow", {"i_FP32": x}, timeout=0.05)
    first = client.submit("impatient", {"i_FP32": x + 1})
    behind = [client.submit("impatient", {"i_FP32": x}) for _ in range(3)]
    cancelled = client.submit("slow", {"i_FP32": x})
    assert cancelled.cancel()
    failed = []
    for future in [first, *behind]:
        try:
            future.result()
        except shmserve.QueueTimeout as error:
            failed.append(error)
    assert failed, "those behind waited for longer than their queue allows"
    again = client.infer("batched", {"i_FP32": x + 2})["o_FP32"]
    assert (again == 2).all()


def test_a_failed_request_does_not_affect_the_next(client: Any) -> None:
    x = np.zeros((1, 4), np.float32)
    with pytest.raises(shmserve.NotFound, match="unknown model: 'nope'"):
        client.infer("nope", {"x": x})
    with pytest.raises(shmserve.InvalidRequest, match="wrong"):
        client.infer("batched", {"wrong": x})
    with pytest.raises(shmserve.InvalidRequest, match="i_FP32"):
        client.infer("batched", {"i_FP32": x.astype(np.float64)})
    assert client.infer("batched", {"i_FP32": x})["o_FP32"].shape == (1, 4)


def test_queries_about_the_server_and_its_models(client: Any, server: Server) -> None:
    assert client.live()
    assert client.ready()
    assert client.ready("types")
    client.wait_ready("types", timeout=60)
    assert {entry["name"] for entry in client.models()} == {"types", "batched", "slow", "impatient"}
    assert {entry["datatype"] for entry in client.metadata("types")["inputs"]} == set(ITEM_BYTES)
    assert client.metadata()["name"] == "shmserve"
    assert client.config("batched")["max_batch_size"] == 8
    assert client.statistics("batched")["model_stats"][0]["name"] == "batched"
    with pytest.raises(shmserve.NotFound):
        client.metadata("nope")


@pytest.mark.parametrize("face", ["sync", "asyncio"])
def test_requests_are_answered_after_a_crash_of_the_server(tmp_path: Path, face: str) -> None:
    model(tmp_path / "models", "slow", ["FP32"], "[ -1 ]", 1, parameters(delay_us="300000"))
    with Server(tmp_path / "models") as server, FACES[face](server.url, reconnect_timeout=30) as client:
        x = np.arange(10_000, dtype=np.float32).reshape(1, -1)
        own = client.empty((1, 10_000))
        own[:] = x
        received = client.infer("slow", {"i_FP32": x})["o_FP32"]
        futures = [client.submit("slow", {"i_FP32": array}) for array in (x, own, received)]
        server.kill()
        server.start()
        for future in futures:
            np.testing.assert_array_equal(future.result()["o_FP32"], x)
        np.testing.assert_array_equal(received, x)
        del received, futures
        gc.collect()
        assert client.infer("slow", {"i_FP32": own})["o_FP32"].shape == (1, 10_000)
