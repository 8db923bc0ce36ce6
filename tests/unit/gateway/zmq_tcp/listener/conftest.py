"""A ZeroMQ listener in a thread, connected to a fake broker and checked after each test."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.broker.fake_broker import FakeBroker
from tests.support.broker.running_broker import running
from tests.support.gateway.zmq_listener import Bare, ListenerThread


@pytest.fixture(scope="module")
def broker() -> Iterator[FakeBroker]:
    with running(FakeBroker) as made:
        yield made


@pytest.fixture(scope="module")
def listener(broker: FakeBroker) -> Iterator[ListenerThread]:
    with tempfile.TemporaryDirectory(prefix="shmserve-test-") as folder:
        made = ListenerThread(Path(folder), broker.lane)
        with made.client() as client:
            # Connects the listener to the broker, and makes both allocate all their memory.
            for future in [client.submit("echo", {"x": np.zeros(3 << 20, np.uint8)}) for _ in range(2)]:
                future.result()
            client.infer("echo", {"x": np.zeros(4 << 20, np.uint8)})
        yield made
        made.stop()


@pytest.fixture(autouse=True)
def _as_it_was(broker: FakeBroker, listener: ListenerThread) -> Iterator[None]:
    """Checks that no request or memory of a test is left in the listener or the broker."""
    yield
    gc.collect()
    listener.do(lambda: listener.listener.link.send_soon())
    with Bare(listener, "alice") as bare:  # its query is processed after the returned memory
        bare.send([9, 1, "live"])
        assert bare.receive()[:3] == [37, 1, b'{"live": true}']
    while listener.do(lambda: listener.listener.peers):
        assert listener.listener.peers < 10
    assert broker.held_handles == []
    while not broker.parked.empty():
        broker.parked.get()
    while not broker.told.empty():
        broker.told.get()


@pytest.fixture
def bare(listener: ListenerThread) -> Iterator[Callable[..., Bare]]:
    with ExitStack() as made:
        yield lambda name="alice", **more: made.enter_context(Bare(listener, name, **more))


@pytest.fixture
def client(listener: ListenerThread) -> Iterator[Any]:
    with listener.client() as made:
        yield made
