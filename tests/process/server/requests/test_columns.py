"""Many requests of one form in flight at a real server: they are sent in columns, and each gets its own result."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any

import numpy as np
import pytest

import shmserve
from shmserve.protocol.messages import InferBatch
from shmserve.session import outbox
from shmserve.session.columns import in_batches
from shmserve.testing import Server
from tests.support.clients.client_faces import FACES
from tests.support.gateway.running_gateway import model
from tests.support.shared_server import SharedServer

pytestmark = pytest.mark.process

assert FACES, "its import makes the pipe of uvloop before any test is watched"
COUNT = 64


@pytest.fixture(scope="module")
def server(shared_server: SharedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("models")
    model(repository, "pair", ["FP32", "INT32"], "[ -1 ]", 256, "dynamic_batching { }\n")
    with shared_server.serving(repository) as running:
        yield running


@pytest.fixture
def in_columns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of requests in each message with columns that this process has sent."""
    counts: list[int] = []

    def counted(messages: list[Any], most: int) -> list[Any]:
        found = in_batches(messages, most)
        counts.extend(len(one.columns.requests) for one in found if isinstance(one, InferBatch))
        return found

    monkeypatch.setattr(outbox, "in_batches", counted)
    return counts


def counted(server: Server, name: str) -> tuple[int, int, int]:
    """Successful requests, their rows, and failed requests."""
    with server.client() as client:
        (found,) = client.statistics(name)["model_stats"]
        stats = found["inference_stats"]
        return stats["success"]["count"], found["inference_count"], stats["fail"]["count"]


def inputs(number: int) -> dict[str, Any]:
    return {
        "i_FP32": np.full((1, 3), number, np.float32) + np.arange(3, dtype=np.float32),
        "i_INT32": np.full((1, 2), -number, np.int32),
    }


def assert_echoed(result: Any, number: int) -> None:
    assert (list(result), result.version, result.parameters) == (["o_FP32", "o_INT32"], 1, {})
    for name, array in inputs(number).items():
        found = result[name.replace("i_", "o_")]
        assert (found.dtype, found.flags.writeable) == (array.dtype, False)
        np.testing.assert_array_equal(found, array)


def run(main: Coroutine[Any, Any, Any]) -> Any:
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()


async def ask_all(server: Server, link: str, model: str, given: list[dict[str, Any]]) -> list[Any]:
    """The results of these requests, which are in flight together: the client sends them in one go."""
    async with shmserve.AsyncClient(server.url if link == "lane" else server.zmq_url) as client:
        assert await client.live()
        return await asyncio.gather(*[client.infer(model, one) for one in given])


@pytest.mark.parametrize("link", ["lane", "ipc"])
def test_two_clients_get_their_own_results_and_every_request_is_counted_once(
    server: Server, in_columns: list[int], link: str
) -> None:
    before = counted(server, "pair")

    async def main() -> list[list[Any]]:
        given = [[inputs(start + number) for number in range(COUNT)] for start in (0, 1000)]
        return await asyncio.gather(*[ask_all(server, link, "pair", ours) for ours in given])

    for start, results in zip((0, 1000), run(main()), strict=True):
        for number, result in enumerate(results):
            assert_echoed(result, start + number)
    assert [new - old for new, old in zip(counted(server, "pair"), before, strict=True)] == [2 * COUNT, 2 * COUNT, 0]
    assert sum(in_columns) == 2 * COUNT
