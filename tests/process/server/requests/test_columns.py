"""Many requests of one form in flight at a real server: they are sent in columns, and each gets its own result."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Iterator
from typing import Any

import numpy as np
import pytest

import shmserve
from shmserve.protocol.messages import InferBatch
from shmserve.session import RowReply, outbox
from shmserve.session import session as sessions
from shmserve.session.columns import in_batches
from shmserve.testing import Server
from tests.support.clients.client_faces import FACES
from tests.support.gateway.running_gateway import model
from tests.support.model_files import parameters

pytestmark = pytest.mark.process

assert FACES, "its import makes the pipe of uvloop before any test is watched"
COUNT = 64
LINKS = ["lane", "ipc"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("models")
    batching = "dynamic_batching { }\n"
    model(repository, "pair", ["FP32", "INT32"], "[ -1 ]", 256, batching)
    model(repository, "single", ["FP32"], "[ -1 ]", 0)
    model(repository, "strings", ["BYTES"], "[ -1 ]", 64, batching)
    model(repository, "many", ["FP32"], "[ -1 ]", 4096, batching + parameters(delay_us="200000"))
    model(repository, "failing", ["FP32"], "[ -1 ]", 64, batching + parameters(fail="not today"))
    with Server(repository, "--exit-on-error", "true") as running:
        yield running
    assert "protocol" not in running.log.lower()


@pytest.fixture
def columns(monkeypatch: pytest.MonkeyPatch) -> dict[type, int]:
    """Counts the requests that this process has sent in columns, and the results that it has received in columns."""
    counts: dict[type, int] = {InferBatch: 0, RowReply: 0}
    receive = sessions.Session._on_reply_batch

    def joined(messages: list[Any], most: int) -> list[Any]:
        found = in_batches(messages, most)
        counts[InferBatch] += sum(len(one.columns.requests) for one in found if isinstance(one, InferBatch))
        return found

    def received(self: Any, message: Any) -> int:
        counts[RowReply] += len(message.columns.requests)
        return receive(self, message)

    monkeypatch.setattr(outbox, "in_batches", joined)
    monkeypatch.setattr(sessions.Session, "_on_reply_batch", received)
    return counts


def counted(server: Server, name: str) -> tuple[int, int, int]:
    """Successful requests, their rows, and failed requests."""
    with server.client() as client:
        (found,) = client.statistics(name)["model_stats"]
        stats = found["inference_stats"]
        return stats["success"]["count"], found["inference_count"], stats["fail"]["count"]


def inputs(number: int, rows: int = 1) -> dict[str, Any]:
    return {
        "i_FP32": np.full((rows, 3), number, np.float32) + np.arange(3, dtype=np.float32),
        "i_INT32": np.full((rows, 2), -number, np.int32),
    }


def assert_echoed(result: Any, number: int, rows: int = 1) -> None:
    assert (list(result), result.version, result.parameters) == (["o_FP32", "o_INT32"], 1, {})
    for name, array in inputs(number, rows).items():
        found = result[name.replace("i_", "o_")]
        assert (found.dtype, found.flags.writeable) == (array.dtype, False)
        np.testing.assert_array_equal(found, array)


def url_of(server: Server, link: str) -> str:
    return server.url if link == "lane" else server.zmq_url


def run(main: Coroutine[Any, Any, Any]) -> Any:
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()


async def ask_all(server: Server, link: str, model: str, given: list[dict[str, Any]]) -> list[Any]:
    """The results of these requests, which are in flight together. The client sends them in one go."""
    async with shmserve.AsyncClient(url_of(server, link)) as client:
        assert await client.live()
        return await asyncio.gather(*[client.infer(model, one) for one in given])


@pytest.mark.parametrize("link", LINKS)
def test_two_clients_get_their_own_results_and_every_request_is_counted_once(
    server: Server, columns: dict[type, int], link: str
) -> None:
    before = counted(server, "pair")

    async def main() -> list[list[Any]]:
        given = [[inputs(start + number) for number in range(COUNT)] for start in (0, 1000)]
        return await asyncio.gather(*[ask_all(server, link, "pair", ours) for ours in given])

    for start, results in zip((0, 1000), run(main()), strict=True):
        for number, result in enumerate(results):
            assert_echoed(result, start + number)
    assert [new - old for new, old in zip(counted(server, "pair"), before, strict=True)] == [2 * COUNT, 2 * COUNT, 0]
    assert columns[InferBatch] == 2 * COUNT
    assert columns[RowReply] > 0


@pytest.mark.parametrize("link", LINKS)
def test_two_threaded_clients_get_their_own_results_and_every_request_is_counted_once(
    server: Server, link: str
) -> None:
    """Each client submits a request for every result that it collects, so it sends several together."""
    before = counted(server, "pair")
    count = 5 * COUNT
    with shmserve.Client(url_of(server, link)) as one, shmserve.Client(url_of(server, link)) as other:
        clients = ((one, 0), (other, 1000))
        futures = [deque(client.submit("pair", inputs(start + n)) for n in range(COUNT)) for client, start in clients]
        for number in range(count):
            for (client, start), waiting in zip(clients, futures, strict=True):
                assert_echoed(waiting.popleft().result(60), start + number)
                if number + COUNT < count:
                    waiting.append(client.submit("pair", inputs(start + number + COUNT)))
    assert [new - old for new, old in zip(counted(server, "pair"), before, strict=True)] == [2 * count, 2 * count, 0]


def test_requests_of_different_rows_get_the_same_results_as_alone(server: Server) -> None:
    before = counted(server, "pair")
    rows = [1 + number // 8 % 4 for number in range(COUNT)]
    results = run(ask_all(server, "lane", "pair", [inputs(number, count) for number, count in enumerate(rows)]))
    with server.client() as client:
        for number, (result, count) in enumerate(zip(results, rows, strict=True)):
            assert_echoed(result, number, count)
            assert_echoed(client.infer("pair", inputs(number, count)), number, count)
    found = [new - old for new, old in zip(counted(server, "pair"), before, strict=True)]
    assert found == [2 * COUNT, 2 * sum(rows), 0]


def test_models_without_batching_and_string_inputs(server: Server) -> None:
    single = run(ask_all(server, "lane", "single", [{"i_FP32": np.full(2, n, np.float32)} for n in range(COUNT)]))
    words = [np.array([[b"%d" % number]], object) for number in range(COUNT)]
    strings = run(ask_all(server, "lane", "strings", [{"i_BYTES": word} for word in words]))
    assert [result["o_FP32"].tolist() for result in single] == [[number, number] for number in range(COUNT)]
    assert [result["o_BYTES"].tolist() for result in strings] == [word.tolist() for word in words]


def failures(server: Server, model: str, given: list[dict[str, Any]]) -> list[Any]:
    """The results of these requests, in flight together, or their errors."""

    async def main() -> list[Any]:
        async with shmserve.AsyncClient(server.url) as client:
            assert await client.live()
            calls = [client.infer(model, one) for one in given]
            return await asyncio.gather(*calls, return_exceptions=True)

    found: list[Any] = run(main())
    return found


def test_a_failed_batch_fails_each_request_once(server: Server) -> None:
    before = counted(server, "failing")
    for error in failures(server, "failing", [{"i_FP32": np.zeros((1, 1), np.float32)}] * COUNT):
        assert isinstance(error, shmserve.ModelFailed)
        assert "not today" in str(error)
    assert [new - old for new, old in zip(counted(server, "failing"), before, strict=True)] == [0, 0, COUNT]


@pytest.mark.parametrize(
    "wrong",
    [
        {"i_FP32": np.zeros((1, 3), np.float32), "i_INT32": np.zeros((2, 2), np.int32)},
        {"i_FP32": np.zeros((1, 3), np.float32), "i_INT32": np.zeros((1, 2), np.int64)},
        {"i_FP32": np.zeros((1, 3), np.float32)},
        {"i_FP32": np.zeros((300, 3), np.float32), "i_INT32": np.zeros((300, 2), np.int32)},
    ],
    ids=["unequal rows", "data type", "a missing input", "too many rows"],
)
def test_invalid_requests_fail_alone_with_the_same_error_as_outside_a_batch(
    server: Server, wrong: dict[str, Any]
) -> None:
    """Of every eight requests, two consecutive ones are wrong."""
    given = [wrong if number % 8 in (3, 4) else inputs(number) for number in range(COUNT)]
    results = failures(server, "pair", given)
    with server.client() as client, pytest.raises(shmserve.InvalidRequest) as alone:
        client.infer("pair", wrong)
    for number, result in enumerate(results):
        if number % 8 in (3, 4):
            assert (type(result), str(result)) == (shmserve.InvalidRequest, str(alone.value))
        else:
            assert_echoed(result, number)


def test_a_batch_of_more_requests_than_one_message_holds(server: Server, columns: dict[type, int]) -> None:
    """While the first batch runs, all others wait for the second."""
    count = 3000
    results = run(ask_all(server, "lane", "many", [{"i_FP32": np.full((1, 1), n, np.float32)} for n in range(count)]))
    assert [float(result["o_FP32"][0, 0]) for result in results] == [float(number) for number in range(count)]
    assert counted(server, "many") == (count, count, 0)
    assert columns[InferBatch] == count
