"""Operations on models through both clients and every link. Expected values are what the broker received."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shmserve
from shmserve.protocol.messages import Ask
from tests.support.broker.fake_broker import FakeBroker
from tests.support.patience import PATIENCE_S

DONE = {"model": "m", "versions": [{"version": "1", "state": "READY", "seconds": 0.5}], "changed": True, "warnings": []}


class Operations:
    """Answers every operation and records it."""

    def __init__(self, broker: FakeBroker) -> None:
        self.received: list[tuple[str, str, int, bytes]] = []
        for what in ("load", "unload", "restart", "origins"):
            broker.answers[what] = lambda model, version, body, what=what: self.record(what, model, version, body)

    def record(self, *operation: Any) -> Any:
        self.received.append(operation)
        if operation[1] == "broken":
            raise shmserve.Unavailable("failed to load 'broken', no version is available")
        return DONE


@pytest.fixture
def operations(broker: FakeBroker) -> Operations:
    return Operations(broker)


def test_each_operation_and_its_options(client: Any, operations: Operations) -> None:
    assert client.load("m") == DONE
    client.load("m", config={"max_batch_size": 3})
    client.load("m", config='{"max_batch_size": 3}')
    client.unload("m")
    client.unload("m", unload_dependents=True, wait=False)
    client.unload("m", force=True, timeout=5)
    client.restart("m")
    client.restart("m", version=2, instance="m_0_1")
    assert client.origins("m", 2) == DONE
    config = b'{"config": {"max_batch_size": 3}}\n'
    assert operations.received == [
        ("load", "m", 0, b""),
        ("load", "m", 0, config),
        ("load", "m", 0, config),
        ("unload", "m", 0, b'{"unload_dependents": false, "wait": true}'),
        ("unload", "m", 0, b'{"unload_dependents": true, "wait": false}'),
        ("unload", "m", 0, b'{"unload_dependents": false, "wait": true, "force": true, "timeout": 5.0}'),
        ("restart", "m", 0, b'{"instance": ""}'),
        ("restart", "m", 2, b'{"instance": "m_0_1"}'),
        ("origins", "m", 2, b""),
    ]
    with pytest.raises(shmserve.Unavailable, match="failed to load 'broken', no version is available"):
        client.load("broken")
    with pytest.raises(shmserve.InvalidRequest, match="files= needs config="):
        client.load("m", files={"1/a": b""})
    assert len(operations.received) == 10


def test_the_default_timeout_does_not_apply_to_operations(connect: Callable[..., Any], broker: FakeBroker) -> None:
    broker.answers["load"] = DONE
    with connect(timeout=1e-6) as client:
        assert client.load("m") == DONE


@pytest.mark.parametrize("way", ["sync lane", "sync ipc"], indirect=True)
def test_requests_of_threads_continue_during_operations(
    client: Any, operations: Operations, broker: FakeBroker
) -> None:
    """Tested while the body is sent, and while the client waits for the answer."""
    client.live()
    broker.pongs = False
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(client.load("m", config={}, files={"1/a": bytes(3_000_000)})))
    thread.start()
    assert broker.wait_for(Ask).what == "live"
    assert broker.wait_for(Ask).what == "load"
    assert client.infer("echo", {"x": np.int64(5)})["x"] == 5
    broker.do(broker.pong)
    thread.join(PATIENCE_S)
    assert found == [DONE]
