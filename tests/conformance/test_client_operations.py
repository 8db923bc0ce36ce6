"""Operations on models through both clients and every link. The oracle is what the broker was told."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmserve
from shmserve.protocol.messages import Ask, Cancel
from tests.conformance.client_ways import ways
from tests.support.broker.fake_broker import NOTHING, FakeBroker

DONE = {"model": "m", "versions": [{"version": "1", "state": "READY", "seconds": 0.5}], "changed": True, "warnings": []}


class Noting:
    """Answers every operation and keeps what it was told."""

    def __init__(self, broker: FakeBroker) -> None:
        self.told: list[tuple[str, str, int, bytes]] = []
        for what in ("load", "unload", "restart", "origins"):
            broker.answers[what] = lambda model, version, body, what=what: self.note(what, model, version, body)

    def note(self, *told: Any) -> Any:
        self.told.append(told)
        if told[1] == "broken":
            raise shmserve.Unavailable("failed to load 'broken', no version is available")
        return DONE


@pytest.fixture
def noting(broker: FakeBroker) -> Noting:
    return Noting(broker)


def test_what_is_asked(client: Any, noting: Noting) -> None:
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
    assert noting.told == [
        ("load", "m", 0, b""),
        ("load", "m", 0, config),
        ("load", "m", 0, config),
        ("unload", "m", 0, b'{"unload_dependents": false, "wait": true}'),
        ("unload", "m", 0, b'{"unload_dependents": true, "wait": false}'),
        ("unload", "m", 0, b'{"unload_dependents": false, "wait": true, "force": true, "timeout": 5}'),
        ("restart", "m", 0, b'{"instance": ""}'),
        ("restart", "m", 2, b'{"instance": "m_0_1"}'),
        ("origins", "m", 2, b""),
    ]
    with pytest.raises(shmserve.Unavailable, match="failed to load 'broken', no version is available"):
        client.load("broken")
    with pytest.raises(shmserve.InvalidRequest, match="files= needs config="):
        client.load("m", files={"1/a": b""})
    assert len(noting.told) == 10


def test_files_of_megabytes(client: Any, noting: Noting, broker: FakeBroker, tmp_path: Path) -> None:
    data = np.random.default_rng(1).integers(0, 256, 3_000_000, np.uint8).tobytes()
    (tmp_path / "model.onnx").write_bytes(data)
    files = {"1/model.onnx": tmp_path / "model.onnx", "1/empty": b"", "labels.txt": b"a\nb\n", "2/x": data[:100_000]}
    assert client.load("m", config={"backend": "onnxruntime"}, files=files) == DONE
    ((_, _, _, body),) = noting.told
    line, _, rest = body.partition(b"\n")
    header = json.loads(line)
    assert header["config"] == {"backend": "onnxruntime"}
    assert header["files"] == [["1/model.onnx", 3_000_000], ["1/empty", 0], ["labels.txt", 4], ["2/x", 100_000]]
    assert rest == data + b"a\nb\n" + data[:100_000]
    assert broker.bodies == {}
    assert client.infer("echo", {"x": 1})["x"] == 1


def test_an_operation_has_no_timeout_but_its_own(connect: Callable[..., Any], broker: FakeBroker) -> None:
    broker.answers["load"] = NOTHING
    with connect() as client:
        client.live()
        with pytest.raises(shmserve.DeadlineExceeded, match="the server continues it"):
            client.load("m", timeout=0.02)
    broker.answers["load"] = DONE
    with connect(timeout=1e-6) as client:
        assert client.load("m") == DONE


def test_a_body_that_the_server_does_not_take(client: Any, noting: Noting, broker: FakeBroker) -> None:
    client.live()
    broker.pongs = False
    with pytest.raises(shmserve.DeadlineExceeded, match="could not be sent within its timeout; nothing was changed"):
        client.load("m", config={}, files={"1/a": bytes(20_000_000)}, timeout=0.1)
    assert client.live()
    client.flush()
    assert broker.wait_for(Cancel)
    assert noting.told == []
    assert broker.bodies == {}


@ways("lane")
def test_a_connection_that_ends_in_an_operation(client: Any, broker: FakeBroker) -> None:
    asked = 0

    def die(model: str, version: int, body: bytes) -> Any:
        nonlocal asked
        asked += 1
        for peer in list(broker.peers.values()):
            broker.drop(peer)
        return NOTHING

    broker.answers["load"] = die
    with pytest.raises(shmserve.ConnectionLost, match="it may have taken effect"):
        client.load("m")
    assert client.live()
    assert asked == 1


@pytest.mark.parametrize("way", ["sync lane", "sync ipc"], indirect=True)
def test_requests_of_other_threads_go_on(client: Any, noting: Noting, broker: FakeBroker) -> None:
    """While a body is being sent, and is waited for."""
    client.live()
    broker.pongs = False
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(client.load("m", config={}, files={"1/a": bytes(3_000_000)})))
    thread.start()
    assert broker.wait_for(Ask).what == "live"
    assert broker.wait_for(Ask).what == "load"
    assert client.infer("echo", {"x": 5})["x"] == 5
    broker.do(broker.pong)
    thread.join(20)
    assert found == [DONE]


def test_many_files(client: Any, noting: Noting, tmp_path: Path) -> None:
    """More than there may be open files would be too many to open at once."""
    paths = []
    for number in range(300):
        path = tmp_path / str(number)
        path.write_bytes(os.urandom(number))
        paths.append(path)
    client.load("m", config={}, files={f"1/{path.name}": path for path in paths})
    assert noting.told[0][3].endswith(b"".join(path.read_bytes() for path in paths))
