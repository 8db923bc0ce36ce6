"""The client for threads: threads that read for each other, and which requests share a packet."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import shmserve
from shmserve.protocol.messages import Cancel, Infer, Reply
from tests.support.broker.fake_broker import MODELS, FakeBroker, Peer

X = np.arange(4, dtype=np.float32)


# ------------------------------------------------------------------------------------------------ threads


def run_all(jobs: list[Callable[[], Any]]) -> list[Any]:
    """Runs each job in a separate thread. Returns their results, or raises the first error."""
    pool = concurrent.futures.ThreadPoolExecutor(len(jobs))
    futures = [pool.submit(job) for job in jobs]
    _, hanging = concurrent.futures.wait(futures, timeout=60)
    pool.shutdown(wait=not hanging)
    return [future.result(0) for future in futures]


def test_threads_share_a_client(client: shmserve.Client) -> None:
    def work(thread: int) -> int:
        size = 5 if thread % 2 else 2000  # inline, and in shared memory
        inputs = [np.full(size, thread * 1000 + number, np.float64) for number in range(200)]
        return sum(bool((client.infer("echo", {"x": x})["x"] == x).all()) for x in inputs)

    assert run_all([partial(work, thread) for thread in range(8)]) == [200] * 8


def test_threads_wait_for_each_others_futures(client: shmserve.Client) -> None:
    futures = [client.submit("echo", {"x": X + number}) for number in range(100)]

    def collect(start: int) -> list[float]:
        found = [float(future.result(30)["x"][0]) for future in futures[start:] + futures[:start]]
        return found[100 - start :] + found[: 100 - start]

    expected = [float(number) for number in range(100)]
    assert run_all([partial(collect, start) for start in range(4)]) == [expected] * 4


def test_another_thread_reads_once_the_leader_has_its_answer(client: shmserve.Client, broker: FakeBroker) -> None:
    first, second = client.submit("hold", {"x": X}), client.submit("hold", {"x": X + 1})
    waiting = threading.Barrier(3)

    def wait(future: Any) -> Any:
        waiting.wait()
        return future.result(30)["x"]

    def answer() -> None:
        waiting.wait()
        broker.answer()
        broker.answer()

    results = run_all([partial(wait, first), partial(wait, second), answer])
    np.testing.assert_array_equal(results[0], X)
    np.testing.assert_array_equal(results[1], X + 1)


def test_each_thread_keeps_its_own_deadline(client: shmserve.Client, broker: FakeBroker) -> None:
    long = client.submit("hold", {"x": X})

    def short() -> str:
        with pytest.raises(shmserve.DeadlineExceeded) as caught:
            client.infer("hold", {"x": X}, timeout=0.05)
        return str(caught.value)

    def release() -> None:
        assert broker.wait_for(Cancel)
        broker.answer()

    found = run_all([partial(long.result, 60), short, release])
    np.testing.assert_array_equal(found[0]["x"], X)
    assert "timeout of 0.05 s" in found[1]


def test_close_wakes_threads_that_wait_for_results(client: shmserve.Client, broker: FakeBroker) -> None:
    futures = [client.submit("hold", {"x": X}) for _ in range(3)]
    broker.parked.get(timeout=20)

    errors = run_all([*[future.exception for future in futures], client.close, client.close])[:3]
    assert [type(error) for error in errors] == [shmserve.Cancelled] * 3
    assert {str(error) for error in errors} == {"the client was closed before the response arrived"}
    with pytest.raises(shmserve.Unavailable, match="the client is closed"):
        client.submit("echo", {"x": X})


# ------------------------------------------------------------------------------------------------ packets


def infers(packets: list[list[Any]]) -> list[int]:
    return [count for packet in packets if (count := sum(isinstance(message, Infer) for message in packet))]


def test_requests_are_sent_at_once_unless_results_are_unread(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    parked: list[tuple[Peer, Infer]] = []

    def in_batches(broker: FakeBroker, peer: Peer, infer: Infer, frames: list[bytes]) -> None:
        """Sends the answers to eight requests in one packet, as for a batch of a model."""
        parked.append((peer, infer))
        if len(parked) == 8:
            messages: list[Any] = []
            for _, request in parked:
                (tensor,) = request.inputs
                messages.append(Reply(request.request, 1, (tensor,)))
            parked.clear()
            peer.send(*messages)

    monkeypatch.setitem(MODELS, "batch", in_batches)
    with shmserve.Client(broker.lane) as client:
        futures = [client.submit("batch", {"x": X + number}) for number in range(8)]
        assert futures[0].result()["x"][0] == 0
        assert infers(broker.packets) == [1] * 8
        for number in range(8):
            assert futures[number].result()["x"][0] == number
            futures[number] = client.submit("batch", {"x": X + number + 8})
        assert futures[0].result()["x"][0] == 8
        assert infers(broker.packets)[8:] == [8], "the loop that collects and submits fills packets"
        for number in range(1, 8):
            assert futures[number].result()["x"][0] == number + 8


def test_buffered_requests_are_sent_by_any_other_call(broker: FakeBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    def pair(broker: FakeBroker, peer: Peer, infer: Infer, frames: list[bytes]) -> None:
        """Sends nothing at first, then two answers in one packet."""
        broker.parked.put((peer, infer, frames))
        if infer.request % 2 == 0:
            found = [broker.parked.get()[1] for _ in range(2)]
            peer.send(*[Reply(one.request, 1, one.inputs) for one in found])

    monkeypatch.setitem(MODELS, "pair", pair)

    def buffered(client: shmserve.Client) -> Any:
        first, second = client.submit("pair", {"x": X}), client.submit("pair", {"x": X})
        first.result()
        count = len(broker.requests)
        future = client.submit("echo", {"x": X})
        assert len(broker.requests) == count
        assert not second.cancelled()
        return future, second

    for send in (
        lambda client, future: future.done(),
        lambda client, future: client.flush(),
        lambda client, future: client.live(),
        lambda client, future: future.result(),
        lambda client, future: future.add_done_callback(lambda _: None),
        lambda client, future: concurrent.futures.wait([future], timeout=20),
    ):
        with shmserve.Client(broker.lane) as client:
            future, second = buffered(client)
            send(client, future)
            np.testing.assert_array_equal(future.result(20)["x"], X)
            second.result()
