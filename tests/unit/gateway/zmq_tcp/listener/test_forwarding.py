"""Requests, streams and operations through the ZeroMQ listener, and restarts on both sides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmserve
from shmserve.protocol.messages import Cancel, More
from tests.support.broker.fake_broker import MODELS, FakeBroker, echo
from tests.support.gateway.zmq_listener import LIMITS, ListenerThread


def test_tensors_are_forwarded(client: Any) -> None:
    for shape in ((), (0, 3), (4,), (1024,), (1025,), (300, 1000)):
        x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
        found = client.infer("echo", {"x": x, "again": x}, version=3, parameters={"a": 1, "b": "c"})
        np.testing.assert_array_equal(found["x"], x)
        np.testing.assert_array_equal(found["again"], x)
        assert (found.version, found.parameters) == (3, {"a": 1, "b": "c"})
    words = np.array([["a" * 3000, "ä"], ["", "b" * 3000]], object)
    assert client.infer("echo", {"x": words})["x"].tolist() == [[w.encode() for w in row] for row in words.tolist()]
    rows = np.arange(20_000.0).reshape(4, -1)
    np.testing.assert_array_equal(client.infer("rows", {"x": rows})["x"], rows, "outputs in parts")
    futures = [client.submit("echo", {"x": np.full(1500, n)}) for n in range(60)]
    assert [int(future.result()["x"][7]) for future in futures] == list(range(60))


def test_errors_and_queries_are_forwarded(client: Any, broker: FakeBroker) -> None:
    with pytest.raises(shmserve.NotFound, match="unknown model: 'nothing'"):
        client.infer("nothing", {"x": np.ones(1)})
    assert client.live()
    assert client.models() == [{"name": "echo", "version": "1", "state": "READY", "reason": ""}]
    broker.answers["metadata"] = {"name": "n", "texts": ["x" * 300_000]}
    assert client.metadata("n") == broker.answers["metadata"]
    with pytest.raises(shmserve.DeadlineExceeded, match=r"within the timeout of 0\.02 s"):
        client.infer("hold", {"x": np.zeros(5000)}, timeout=0.02)
    broker.answer()
    client.live()


def test_a_stream_is_requested_as_it_is_read(client: Any, broker: FakeBroker) -> None:
    count = np.array([6], np.float32)
    with client.stream("parts", {"x": count}, window=4, parameters={"size": 2000}) as stream:
        found = [next(stream), next(stream)]
        assert broker.wait_for(More).count == 2
        found += stream
    for number, part in enumerate(found):
        np.testing.assert_array_equal(part["y"], np.full(2000, number, np.float32))
        assert part.parameters == {"index": number + 1}
    assert len(found) == 6
    with client.stream("parts", {"x": count}, window=2) as stream:
        next(stream)
    assert broker.wait_for(Cancel)
    with (
        client.stream("parts", {"x": count}, parameters={"fail": True}) as stream,
        pytest.raises(shmserve.ModelFailed, match="no more of this"),
    ):
        list(stream)


def test_bodies_of_operations_are_forwarded_up_to_the_limit(client: Any, broker: FakeBroker) -> None:
    got: list[bytes] = []

    def load(model: str, version: int, body: bytes) -> Any:
        got.append(body)
        return {"model": model, "versions": [], "changed": True, "warnings": []}

    broker.answers["load"] = load
    content = np.random.default_rng(2).bytes(3_000_000)
    client.load("new", config={"backend": "x"}, files={"1/model.bin": content})
    assert got[0].endswith(b"\n" + content)
    with pytest.raises(shmserve.InvalidRequest, match=f"exceeds {LIMITS.input_bytes} bytes.*--http-max-input-size"):
        client.load("new", config={"backend": "x"}, files={"1/model.bin": bytes(LIMITS.input_bytes)})
    assert client.live()


def test_tensors_over_the_limit_or_share_are_refused(
    client: Any, broker: FakeBroker, listener: ListenerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.live()  # makes the client know the limits
    with pytest.raises(shmserve.InvalidRequest, match=f"over the limit of {LIMITS.input_bytes} for one message"):
        client.infer("echo", {"x": np.zeros(LIMITS.input_bytes + 1, np.uint8)})
    large = np.zeros(3 << 20, np.uint8)
    monkeypatch.setattr(listener.listener.link.shares.requests, "calm_bytes", 0)
    monkeypatch.setattr(listener.listener.link.shares.requests, "_input_bytes", 24 << 20)
    held = [client.submit("hold", {"x": large}) for _ in range(2)]
    with pytest.raises(shmserve.Unavailable, match=r"exceed its share \(--limit caller_share\) of 25165824 bytes"):
        client.infer("echo", {"x": large})
    for future in held:
        broker.answer()
        future.result()
    assert client.infer("echo", {"x": large})["x"].nbytes == large.nbytes


def test_a_cancelled_request_is_answered_once(broker: FakeBroker, bare: Any) -> None:
    one = bare()
    one.send([7, 5, "hold", 0, [["x", "UINT8", [5000], 0]]], frames=(bytes(5000),))
    peer, infer, frames = broker.next_parked()
    one.send([8, 5])
    assert one.receive() == [34, 5, "CANCELLED", "the request was cancelled by the client"]
    assert broker.wait_for(Cancel).request == infer.request
    broker.do(lambda: echo(broker, peer, infer, frames))  # sent before the cancellation was received
    assert one.quiet()


def test_a_restarted_server_or_gateway_gets_the_requests_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broker = FakeBroker(tmp_path)
    broker.start()
    (tmp_path / "keys").mkdir()
    listener = ListenerThread(tmp_path / "keys", broker.lane, exit_timeout_s=0.01)
    x = np.arange(5000.0)
    with listener.client() as client:
        for restarts_broker in (True, False):
            with monkeypatch.context() as patch:
                future = client.submit("hold", {"x": x})
                broker.next_parked()
                (broker if restarts_broker else listener).stop()
                patch.setitem(MODELS, "hold", echo)
                if restarts_broker:
                    broker.start()
                else:
                    listener = ListenerThread(tmp_path / "keys", broker.lane, address=listener.url)
                np.testing.assert_array_equal(future.result()["x"], x)
                del future
        broker.stop()
        with pytest.raises(shmserve.ConnectionLost, match="server behind this gateway is unreachable") as caught:
            client.infer("echo", {"x": x})
        assert "/" not in str(caught.value)
        assert client.live() is False
        broker.start()
        np.testing.assert_array_equal(client.infer("echo", {"x": x})["x"], x)
    listener.stop()
    broker.stop()
