"""Streamed responses for both clients over every kind of link. The broker counts how many may be in flight."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import shmserve
from shmserve.protocol.messages import Cancel, FailHeld, Part, Released, Tensor
from tests.conformance.client_ways import place_of, shared_only, ways
from tests.support.broker.fake_broker import FakeBroker

LARGE = 3000


def ask(client: Any, count: int, *, window: int = 16, **parameters: Any) -> Any:
    return client.stream("parts", {"x": np.array([count], np.float32)}, window=window, parameters=parameters)


@pytest.mark.parametrize("size", [1, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("full_end", [False, True], ids=["empty end", "full end"])
def test_parts_arrive_in_order(client: Any, size: int, full_end: bool) -> None:
    for count in (0, 1, 40):
        found = list(ask(client, count, size=size, full_end=full_end and count > 0))
        assert [part.parameters["index"] for part in found] == list(range(1, count + 1))
        for index, part in enumerate(found):
            assert part.version == 1
            assert part["y"].shape == (size,)
            assert (part["y"] == index).all()
            assert not part["y"].flags.writeable


@ways("lane")
def test_several_streams_and_requests_at_once(client: Any) -> None:
    streams = [ask(client, 10, window=2) for _ in range(5)]
    for index in range(10):
        for stream in streams:
            assert next(stream)["y"] == index
        x = np.array([index], np.float32)
        assert client.infer("echo", {"x": x})["x"] == index
    assert [next(stream, None) for stream in streams] == [None] * 5


@shared_only
def test_parts_keep_their_memory_until_they_are_dropped(client: Any, broker: FakeBroker) -> None:
    stream = ask(client, 6, window=2, size=LARGE)
    kept = [next(stream) for _ in range(4)]
    for index, part in enumerate(kept):
        assert (part["y"] == index).all()
    del kept, part
    rest = list(stream)
    assert [part["y"][0].item() for part in rest] == [4, 5]
    del rest
    gc.collect()
    client.flush()
    client.infer("echo", {"x": np.zeros(1)})
    assert broker.held_handles == []


@shared_only
def test_unread_parts_are_returned(client: Any, broker: FakeBroker) -> None:
    stream = ask(client, 6, window=4, size=LARGE)
    next(stream)
    stream.close()
    stream.close()
    broker.wait_for(Cancel)
    gc.collect()
    client.infer("echo", {"x": np.zeros(1)})
    client.flush()
    client.infer("echo", {"x": np.zeros(1)})
    assert broker.held_handles == []


def test_dropping_the_iterator_cancels_the_stream(client: Any, broker: FakeBroker) -> None:
    for part in ask(client, 100, window=2):
        assert part["y"] == 0
        break
    client.flush()
    broker.wait_for(Cancel)
    with ask(client, 100, window=2) as stream:
        next(stream)
    broker.wait_for(Cancel)
    assert client.infer("echo", {"x": np.ones(1)})["x"] == 1


@ways("lane")
def test_a_single_response_is_a_stream_of_one_part(client: Any, broker: FakeBroker) -> None:
    stream = client.stream("echo", {"x": np.arange(3.0)})
    assert [part["x"].tolist() for part in stream] == [[0, 1, 2]]
    stream = client.stream("echo", {"x": np.arange(3000.0)}, outputs=["x"])
    assert [part["x"].shape for part in stream] == [(3000,)]


@ways("lane")
def test_invalid_windows_and_outputs_are_refused(client: Any) -> None:
    x = {"x": np.ones(1, np.float32)}
    for window in (0, -1, (1 << 20) + 1, 1.0, True):
        with pytest.raises(shmserve.InvalidRequest, match="responses in flight must be from 1 to 1048576"):
            client.stream("parts", x, window=window)
    with pytest.raises(shmserve.InvalidRequest, match="output 'y' cannot be written to an array"):
        client.stream("parts", x, outputs={"y": np.zeros(1, np.float32)})
    assert client.infer("echo", x)["x"] == 1


@ways("lane", "ipc")
def test_the_timeout_applies_to_the_whole_stream(client: Any, broker: FakeBroker) -> None:
    y = Tensor("y", "FP32", (1,), np.float32(5).tobytes())
    for timeout in (0.2, 2, 20):
        stream = client.stream("hold", {"x": np.ones(1, np.float32)}, timeout=timeout)
        peer, infer, _ = broker.next_parked()
        assert infer.timeout_us == timeout * 1e6
        broker.do(partial(peer.send, Part(infer.request, 1, (y,))))
        with contextlib.suppress(shmserve.DeadlineExceeded):  # too short for a busy machine
            assert next(stream)["y"] == 5
            break
    text = rf"model 'hold' did not complete its responses within .* {timeout} s"
    with pytest.raises(shmserve.DeadlineExceeded, match=text):
        next(stream)
    broker.wait_for(Cancel)


@ways("lane")
def test_inputs_are_kept_until_the_last_part(client: Any, broker: FakeBroker) -> None:
    x = np.arange(LARGE, dtype=np.float32)
    y = Tensor("y", "FP32", (1,), np.float32(5).tobytes())
    stream = client.stream("hold", {"x": x})
    peer, infer, frames = broker.next_parked()
    assert peer.bytes_of(infer.inputs[0], frames) == x.tobytes()
    broker.do(lambda: peer.send(Part(infer.request, 1, (y,))))
    next(stream)
    client.infer("echo", {"x": x})
    assert place_of(broker.requests[-1].inputs[0]) != place_of(infer.inputs[0])
    broker.do(lambda: peer.send(FailHeld(infer.request, "DEADLINE_EXCEEDED", "too late"), Released(infer.request)))
    with pytest.raises(shmserve.DeadlineExceeded, match="too late"):
        next(stream)
    client.infer("echo", {"x": x})
    assert place_of(broker.requests[-1].inputs[0]) == place_of(infer.inputs[0])


@ways("lane", "ipc")
def test_only_a_stream_without_a_part_is_sent_again(connect: Callable[..., Any], broker: FakeBroker) -> None:
    x = {"x": np.ones(1, np.float32)}
    y = Tensor("y", "FP32", (1,), np.float32(5).tobytes())
    with connect() as client:
        begun, fresh = client.stream("hold", x), client.stream("hold", x)
        peer, infer, _ = broker.next_parked()
        assert broker.next_parked()[1].request != infer.request
        broker.do(lambda: peer.send(Part(infer.request, 1, (y,))))
        assert next(begun)["y"] == 5
        broker.stop()
        broker.start()
        with pytest.raises(shmserve.ConnectionLost, match="during the responses"):
            next(begun)
        future = client.submit("echo", x)
        assert future.result()["x"] == 1
        peer, again, _ = broker.next_parked()
        assert again.options is not None
        assert (again.request == infer.request, again.options.window) == (False, 16)
        broker.do(lambda: peer.send(Part(again.request, 1, (y,), None, True)))
        assert [part["y"].item() for part in fresh] == [5]


@ways("lane")
def test_an_invalid_part_fails_the_stream(client: Any, broker: FakeBroker) -> None:
    stream = client.stream("hold", {"x": np.ones(1, np.float32)})
    peer, infer, _ = broker.next_parked()
    broker.do(lambda: peer.send(Part(infer.request, 1, (Tensor("y", "FP32", (5,), b"abc"),))))
    with pytest.raises(shmserve.Internal, match="output 'y'"):
        next(stream)
    client.flush()
    broker.wait_for(Cancel)


@ways("lane")
def test_closing_the_client_ends_the_stream(client: Any, broker: FakeBroker) -> None:
    stream = ask(client, 100, window=2)
    assert next(stream)["y"] == 0
    closing = client.client.close()
    if closing is not None:
        client.run(closing)
    found: list[float] = []
    with pytest.raises(shmserve.Cancelled):
        found.extend(part["y"].item() for part in stream)
    assert found == [1, 2][: len(found)]  # as many as had arrived
