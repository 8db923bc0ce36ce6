"""Both clients over every kind of link: deadlines, cancellation and the connection."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shmserve
from shmserve.protocol.messages import (
    OWNER_SHIFT,
    Bye,
    Cancel,
    FailHeld,
    Goodbye,
    Ping,
    Pong,
    Reclaim,
    Released,
    Reply,
    Return,
)
from tests.conformance.client_ways import CANCELLED, place_of, shared_only, ways
from tests.support.broker.fake_broker import MODELS, FakeBroker, echo
from tests.support.patience import PATIENCE_S


def test_the_client_enforces_the_deadline_too(client: Any, broker: FakeBroker) -> None:
    x = np.zeros((100, 100))
    client.live()  # connects
    with pytest.raises(shmserve.DeadlineExceeded, match=r"model 'hold' did not respond within the timeout of 0\.02 s"):
        client.infer("hold", {"x": x}, timeout=0.02)
    client.live()
    assert broker.requests[0].timeout_us == 20_000
    assert broker.wait_for(Cancel).request == broker.requests[0].request
    broker.answer()  # too late
    client.live()
    client.flush()
    client.live()
    assert broker.held_handles == []
    assert client.infer("echo", {"x": x})["x"].shape == (100, 100)


def test_the_default_timeout(connect: Callable[..., Any]) -> None:
    with connect(timeout=0.02) as client:
        with pytest.raises(shmserve.DeadlineExceeded):
            client.infer("hold", {"x": np.int64(1)})
        with pytest.raises(TimeoutError):
            client.submit("hold", {"x": np.int64(1)}).result()


def test_cancel(client: Any, broker: FakeBroker) -> None:
    future = client.submit("hold", {"x": np.zeros((100, 100))})
    assert not future.done()
    peer, infer, frames = broker.next_parked()
    assert future.cancel()
    assert future.cancelled()
    assert future.done()
    with pytest.raises(CANCELLED):
        future.result()
    assert broker.wait_for(Cancel).request == infer.request
    broker.do(lambda: echo(broker, peer, infer, frames))
    client.live()
    client.flush()
    client.live()
    assert broker.held_handles == []
    done = client.submit("echo", {"x": np.int64(1)})
    done.result()
    assert not done.cancel()


@shared_only
def test_memory_of_a_request_is_kept_until_it_is_released(client: Any, broker: FakeBroker) -> None:
    """Also after its error, while a worker may still read the inputs and write the output. Then it is reused."""
    own, place = (client.empty((100, 100)) for _ in range(2))
    own[:] = 1
    inputs = {"own": own, "copied": np.full((100, 100), 2, np.float32)}
    future = client.submit("hold", inputs, outputs={"own": place, "copied": None})
    peer, infer, _ = broker.next_parked()
    assert infer.outputs is not None
    kept = [*map(place_of, infer.inputs), infer.outputs[0].place]
    del own, inputs, place
    gc.collect()

    def places_of_the_next(count: int) -> list[Any]:
        client.infer("echo", {str(number): client.empty((100, 100)) for number in range(count)})
        return [place_of(tensor) for tensor in broker.requests[-1].inputs]

    assert not {*kept} & {*places_of_the_next(3)}, "it is in flight"
    broker.do(lambda: peer.send(FailHeld(infer.request, "QUEUE_TIMEOUT", "it waited for too long")))
    with pytest.raises(shmserve.QueueTimeout, match="waited for too long"):
        future.result()
    assert not {*kept} & {*places_of_the_next(3)}
    assert (np.frombuffer(peer.mapped.memory(place_of(infer.inputs[0])), np.float32) == 1).all()
    broker.do(lambda: peer.send(Released(infer.request)))
    client.live()
    assert {*kept} <= {*places_of_the_next(6)}


@shared_only
def test_reclaim_is_answered_with_returns(client: Any, broker: FakeBroker) -> None:
    result = client.infer("echo", {"x": np.zeros(10_000, np.uint8)})
    del result
    gc.collect()
    (peer,) = broker.peers.values()
    broker.do(lambda: peer.send(Reclaim()))
    client.live()
    assert broker.wait_for(Return)


def test_ping_is_answered(client: Any, broker: FakeBroker) -> None:
    client.live()
    (peer,) = broker.peers.values()
    broker.do(lambda: peer.send(Ping(77)))
    client.live()
    client.live()
    assert broker.wait_for(Pong).number == 77


def test_close_sends_bye_and_cancels_requests(client: Any, broker: FakeBroker) -> None:
    client.live()
    future = client.submit("hold", {"x": np.int64(1)})
    client.close()
    assert broker.wait_for(Bye)
    with pytest.raises(shmserve.Cancelled, match="closed before the response"):
        future.result()
    with pytest.raises(shmserve.Unavailable, match="the client is closed"):
        client.infer("echo", {"x": np.int64(1)})


@ways("lane", "ipc", "frames")  # with tcp, the new broker has another port
def test_an_unanswered_request_is_sent_again(
    client: Any, broker: FakeBroker, link: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.arange(20_000, dtype=np.float64)
    own = client.empty((20_000,), "float64")
    own[:] = x + 1
    received = client.infer("echo", {"x": x + 2})["x"]
    inputs = {"copied": x, "own": own, "received": received}
    if link == "lane":
        result = client.infer("die", inputs)
        assert broker.deaths == 1
    else:  # with ZeroMQ, a connection ends only with the server
        future = client.submit("hold", inputs)
        broker.next_parked()
        broker.stop()
        monkeypatch.setitem(MODELS, "hold", echo)
        broker.start()
        result = future.result()
        del future
    del inputs
    np.testing.assert_array_equal(result["copied"], x)
    np.testing.assert_array_equal(result["own"], x + 1)
    np.testing.assert_array_equal(result["received"], x + 2)
    if link in ("lane", "ipc"):
        owners = {place_of(tensor).segment >> OWNER_SHIFT for tensor in broker.requests[-1].inputs}
        assert owners == {broker.owners}, "all in segments of the new connection"
    del received  # belongs to the old connection: it is not returned on the new one
    gc.collect()
    client.flush()
    client.infer("echo", {"own": own})


@ways("lane", "ipc")
def test_a_request_with_a_short_timeout_fails_while_others_wait_for_the_server(
    client: Any, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient = client.submit("hold", {"x": np.arange(3)})
    broker.next_parked()
    broker.stop()
    with pytest.raises((shmserve.DeadlineExceeded, shmserve.ConnectionLost)):
        client.infer("echo", {"x": np.int64(1)}, timeout=0.3)
    monkeypatch.setitem(MODELS, "hold", echo)
    broker.start()
    np.testing.assert_array_equal(patient.result()["x"], np.arange(3))


def test_no_server(broker: FakeBroker, connect: Callable[..., Any], link: str) -> None:
    broker.stop()
    with connect(reconnect_timeout=0.3) as client:
        with pytest.raises(shmserve.ConnectionLost, match=r"no server at .*start one with `shmserve serve"):
            client.infer("echo", {"x": np.zeros(10_000)})
        assert client.live() is False
        assert client.ready() is False
        with pytest.raises(shmserve.DeadlineExceeded, match=r"not ready after 1 s: no server"):
            client.wait_ready(timeout=1)
        if link != "tcp":
            broker.start()
            client.wait_ready(timeout=PATIENCE_S)
            assert client.infer("echo", {"x": np.int64(1)})["x"] == 1
            broker.stop()
            with pytest.raises(shmserve.ConnectionLost, match="no server at"):
                client.infer("echo", {"x": np.int64(1)})


def test_wait_ready_waits_for_the_models(client: Any, broker: FakeBroker) -> None:
    broker.ready = False
    broker.answers["models"] = [{"name": "m", "version": "1", "state": "LOADING", "reason": "half way"}]
    with pytest.raises(shmserve.DeadlineExceeded, match=r"not ready after 0\.1 s: m 1 is LOADING \(half way\)"):
        client.wait_ready(timeout=0.1)
    broker.ready = True
    client.wait_ready(timeout=PATIENCE_S)
    client.wait_ready("m")


def test_goodbye_fails_requests_and_the_client_connects_again(client: Any, broker: FakeBroker) -> None:
    future = client.submit("hold", {"x": np.int64(1)})
    peer, _, _ = broker.next_parked()
    broker.do(lambda: peer.send(Goodbye("DENIED", "not for you")))
    with pytest.raises(shmserve.Denied, match="not for you"):
        future.result()
    assert client.infer("echo", {"x": np.int64(1)})["x"] == 1, "over a new connection"


def test_outputs_of_an_unknown_request_are_returned(client: Any, broker: FakeBroker, link: str) -> None:
    client.live()
    (peer,) = broker.peers.values()

    def reply_to_nothing() -> None:
        frames: list[bytes] = []
        tensor = peer.tensor("x", "UINT8", (5000,), bytes(5000), frames)
        peer.send(Reply(999, 1, (tensor,)), frames=tuple(frames))

    broker.do(reply_to_nothing)
    client.live()
    client.flush()
    client.live()
    assert broker.held_handles == []
