"""The reader thread of the client for threads, which only exists for callbacks and other watchers."""

from __future__ import annotations

import queue
import threading
from typing import Any

import numpy as np
import pytest

import shmserve
from shmserve.transport.lane import Lane
from shmserve.transport.zmq import ZmqLink
from tests.support.broker.fake_broker import FakeBroker
from tests.support.clients.client_faces import await_leader

X = np.arange(4, dtype=np.float32)


def test_callbacks_run_once_and_their_errors_are_logged(
    client: shmserve.Client, broker: FakeBroker, caplog: pytest.LogCaptureFixture
) -> None:
    called: queue.SimpleQueue[Any] = queue.SimpleQueue()
    future = client.submit("hold", {"x": X})
    future.add_done_callback(lambda _: 1 // 0)
    future.add_done_callback(called.put)
    broker.answer()
    assert called.get(timeout=20) is future
    np.testing.assert_array_equal(future.result()["x"], X)
    assert "ZeroDivisionError" in caplog.text
    future.add_done_callback(called.put)
    assert called.get(timeout=0) is future, "at once, as it is done"

    def again(found: Any) -> None:
        """A callback may use the client."""
        called.put(client.infer("echo", {"x": X + 1})["x"][0])

    client.submit("echo", {"x": X}).add_done_callback(again)
    assert called.get(timeout=20) == 1
    client.submit("nope", {}).add_done_callback(called.put)
    assert isinstance(called.get(timeout=20).exception(), shmserve.NotFound)
    cancelled = client.submit("hold", {"x": X})
    cancelled.add_done_callback(called.put)
    assert cancelled.cancel()
    assert called.get(timeout=20).cancelled()


def test_a_deadline_is_kept_while_the_reader_waits_or_is_about_to(
    client: shmserve.Client, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits without a limit; then it has released the lock, and does not wait yet."""
    called: queue.SimpleQueue[Any] = queue.SimpleQueue()
    client.submit("hold", {"x": X}).add_done_callback(called.put)
    client.submit("hold", {"x": X}, timeout=0.02).add_done_callback(called.put)
    assert isinstance(called.get(timeout=20).exception(), shmserve.DeadlineExceeded)
    about, go = threading.Event(), threading.Event()

    def pausing(kind: Any) -> Any:
        real = kind.receive_or_event

        def receive(*arguments: Any) -> Any:
            about.set()
            assert go.wait(20)
            return real(*arguments)

        return receive

    for kind in (Lane, ZmqLink):
        monkeypatch.setattr(kind, "receive_or_event", pausing(kind))
    client.submit("hold", {"x": X}).add_done_callback(lambda _: None)
    assert about.wait(20)
    client.submit("hold", {"x": X}, timeout=0.02).add_done_callback(called.put)
    go.set()
    assert isinstance(called.get(timeout=20).exception(), shmserve.DeadlineExceeded)


def test_a_deadline_is_kept_while_another_thread_reads(client: shmserve.Client, broker: FakeBroker) -> None:
    asked = client.submit("hold", {"x": X})
    waiting = threading.Thread(target=asked.result)
    waiting.start()
    await_leader(client)
    client.submit("hold", {"x": X}).add_done_callback(lambda _: None)
    while not client._link._gates:  # noqa: SLF001 - until the reader is a follower
        assert waiting.is_alive()
    called: queue.SimpleQueue[Any] = queue.SimpleQueue()
    client.submit("hold", {"x": X}, timeout=0.02).add_done_callback(called.put)
    assert isinstance(called.get(timeout=20).exception(), shmserve.DeadlineExceeded)
    broker.answer()
    waiting.join()


def test_the_reader_thread_starts_with_the_first_callback(client: shmserve.Client) -> None:
    before = threading.active_count()
    client.infer("echo", {"x": X})
    futures = [client.submit("echo", {"x": X}) for _ in range(50)]
    assert [future.result()["x"].size for future in futures] == [4] * 50
    assert threading.active_count() == before
    called: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for _ in range(3):
        client.submit("echo", {"x": X}).add_done_callback(called.put)
        called.get(timeout=20)
        assert threading.active_count() == before + 1
        assert client.infer("echo", {"x": X})["x"].size == 4
    client.close()
    assert threading.active_count() == before
