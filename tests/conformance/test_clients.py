"""What both clients do over every kind of link, against a broker that echoes. The oracle is numpy, and what the broker
was told.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import shmserve
from shmserve.dtypes import ITEM_BYTES
from shmserve.messages import (
    FRAME_BYTES,
    INLINE_BYTES,
    OWNER_SHIFT,
    Bye,
    Cancel,
    Goodbye,
    Handle,
    Ping,
    Pong,
    Reclaim,
    Released,
    Reply,
    Return,
    Tensor,
)
from tests.client_faces import FACES
from tests.fake_broker import MODELS, FakeBroker, echo

LINKS: dict[str, tuple[Callable[[FakeBroker], str], dict[str, Any]]] = {
    "lane": (lambda broker: broker.lane, {}),
    "ipc": (lambda broker: broker.ipc, {}),
    "frames": (lambda broker: broker.ipc, {"memory": "frames"}),
    "tcp": (lambda broker: broker.tcp, {}),
}
CANCELLED = (asyncio.CancelledError, concurrent.futures.CancelledError)


@pytest.fixture
def broker() -> Iterator[FakeBroker]:
    with tempfile.TemporaryDirectory(prefix="shmserve-test-") as folder:
        made = FakeBroker(Path(folder))
        made.start()
        yield made
        made.stop()


WAYS = [
    "sync lane",
    "sync ipc",
    "sync frames",
    "sync tcp",
    "asyncio lane",
    "asyncio ipc",
    "uvloop lane",
    "uvloop frames",
    "uvloop tcp",
]


def ways(*links: str) -> pytest.MarkDecorator:
    """For tests that make sense over these links only."""
    return pytest.mark.parametrize("way", [way for way in WAYS if way.split()[1] in links], indirect=True)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def link(way: str) -> str:
    return way.split()[1]


@pytest.fixture
def connect(broker: FakeBroker, way: str) -> Callable[..., Any]:
    face, link = way.split()
    url, options = LINKS[link]
    return lambda **more: FACES[face](url(broker), **options, **more)


@pytest.fixture
def client(connect: Callable[..., Any]) -> Iterator[Any]:
    with connect() as made:
        yield made


shared_only = ways("lane", "ipc")

LARGE = (7, 600)  # in the smallest type, 4,200 bytes: over INLINE_BYTES


def data(name: str, shape: tuple[int, ...]) -> Any:
    generator = np.random.default_rng(len(name))
    if name == "BOOL":
        return generator.random(shape) < 0.5
    if name == "BF16":
        return generator.standard_normal(shape).astype(ml_dtypes.bfloat16)
    if name.startswith("FP"):
        return generator.standard_normal(shape).astype(f"float{name[2:]}")
    dtype = np.dtype(name.lower())
    info = np.iinfo(dtype)
    return generator.integers(info.min, info.max, shape, dtype, endpoint=True)


NUMBERS = [name for name in ITEM_BYTES if name != "BYTES"]


def place_of(tensor: Tensor) -> Handle:
    """The one handle that a tensor has come by."""
    assert isinstance(tensor.data, tuple)
    (handle,) = tensor.data
    return handle


# ------------------------------------------------------------------------------------------------ tensors


@pytest.mark.parametrize("shape", [(3, 5), LARGE], ids=["small", "large"])
def test_numbers_of_all_types(client: Any, broker: FakeBroker, shape: tuple[int, ...]) -> None:
    inputs = {name: data(name, shape) for name in NUMBERS}
    result = client.infer("echo", inputs)
    assert list(result) == NUMBERS
    for name, array in inputs.items():
        assert result[name].dtype == array.dtype
        np.testing.assert_array_equal(result[name], array)
        assert not result[name].flags.writeable
    assert [tensor.dtype for tensor in broker.requests[0].inputs] == NUMBERS


@pytest.mark.parametrize("count", [3, 900], ids=["small", "large"])
def test_strings(client: Any, broker: FakeBroker, count: int) -> None:
    words = np.array([f"wörd {number}" for number in range(count)]).reshape(3, -1)
    inputs = {
        "unicode": words,
        "bytes": np.char.encode(words, "utf-8"),
        "objects": np.array([text.encode() for text in words.ravel()], dtype=object).reshape(words.shape),
        "mixed": np.array(["a", b"b\x00\xff", ""], dtype=object),
    }
    result = client.infer("echo", inputs)
    for name in ("unicode", "bytes", "objects"):
        assert result[name].tolist() == np.char.encode(words, "utf-8").tolist()
        assert not result[name].flags.writeable
    assert result["mixed"].tolist() == [b"a", b"b\x00\xff", b""]
    assert {tensor.dtype for tensor in broker.requests[0].inputs} == {"BYTES"}


def test_shapes_and_things_that_are_no_arrays(client: Any) -> None:
    strided = np.arange(24_000, dtype=np.int32).reshape(40, 600)
    inputs = {
        "scalar": np.float32(2.5),
        "zero dims": np.array(7, np.int64),
        "float": 1.5,
        "list": [[1, 2], [3, 4]],
        "string": "text",
        "nothing": np.zeros((0, 3), np.float32),
        "nothing at the end": np.zeros((3, 0), np.uint8),
        "no strings": np.zeros((0,), object),
        "steps": strided[:, ::2],
        "few steps": strided[:3, ::200],
        "fortran": np.asfortranarray(strided),
        "backwards": strided[::-1],
        "other order": strided.astype(">i4"),
        "few in other order": strided[0, :4].astype(">i4"),
        "read-only": np.broadcast_to(np.float32(3), (70, 70)),
    }
    result = client.infer("echo", inputs)
    for name, given in inputs.items():
        if name == "string":
            assert result[name].item() == b"text"
            continue
        expected = np.asarray(given)
        assert result[name].shape == expected.shape, name
        assert result[name].dtype == expected.dtype.newbyteorder("="), name
        np.testing.assert_array_equal(result[name], expected)


def test_raw_types(client: Any, broker: FakeBroker) -> None:
    bits = np.array([0x3F80, 0x4000, 0xC040], np.uint16)
    result = client.infer("echo", {"x": shmserve.Raw("BF16", bits)})
    assert broker.requests[0].inputs[0].dtype == "BF16"
    assert result["x"].astype(np.float32).tolist() == [1.0, 2.0, -3.0]
    with pytest.raises(shmserve.InvalidRequest, match="elements of 2 bytes"):
        shmserve.Raw("BF16", np.zeros(3, np.float32))
    with pytest.raises(shmserve.InvalidRequest, match="cannot be of type 'COMPLEX'"):
        shmserve.Raw("COMPLEX", bits)


def test_where_bytes_travel(client: Any, broker: FakeBroker, link: str) -> None:
    small = np.zeros(INLINE_BYTES, np.uint8)
    large = np.zeros(INLINE_BYTES + 1, np.uint8)
    many = {f"x{number:02}": small for number in range(16)}
    client.infer("echo", {"small": small, "large": large})
    client.infer("echo", many)
    first, second = broker.requests
    assert isinstance(first.inputs[0].data, bytes)
    shared = tuple if link in ("lane", "ipc") else int
    assert isinstance(first.inputs[1].data, shared)
    kinds = [type(tensor.data) for tensor in second.inputs]
    assert kinds == [bytes] * 12 + [shared] * 4, "what is over 48 KiB in one message goes elsewhere"


def test_batches_and_many_in_flight(client: Any) -> None:
    x = np.arange(8 * 40, dtype=np.float32).reshape(8, 40)
    futures = [client.submit("echo", {"x": x + number}) for number in range(300)]
    for number, future in enumerate(futures):
        np.testing.assert_array_equal(future.result()["x"], x + number)


def test_more_than_any_buffer_holds_before_a_result_is_asked_for(client: Any) -> None:
    """4 KiB each way; the broker does not read while it cannot write."""
    x = np.zeros(1024, np.float32)
    futures = [client.submit("echo", {"x": x + number}) for number in range(1500)]
    for number, future in enumerate(futures):
        assert future.result()["x"][-1] == number


# ------------------------------------------------------------------------------------------------ shared memory


@shared_only
def test_arrays_of_empty_are_not_copied(client: Any, broker: FakeBroker) -> None:
    x = client.empty((8, 100, 100), "float32")
    assert x.flags.writeable
    x[:] = np.arange(x.size).reshape(x.shape)
    client.infer("echo", {"x": x})
    result = client.infer("echo", {"slice": x[2:4], "all": x, "copied": x[:, ::2]})
    np.testing.assert_array_equal(result["slice"], x[2:4])
    np.testing.assert_array_equal(result["copied"], x[:, ::2])
    first = place_of(broker.requests[0].inputs[0])
    part, whole, copied = map(place_of, broker.requests[1].inputs)
    assert whole == first
    assert part == Handle(first.segment, first.offset + 2 * 40_000, 2 * 40_000)
    assert copied.offset != first.offset


@shared_only
def test_memory_of_empty_is_used_again_when_dropped(client: Any, broker: FakeBroker) -> None:
    handles = []
    for _ in range(3):
        x = client.empty((64, 1024), np.uint8)
        x[:] = 1
        part = x[3:]
        del x
        client.infer("echo", {"x": part})
        handles.append(place_of(broker.requests[-1].inputs[0]))
        del part
    assert len(set(handles)) == 1


@shared_only
def test_memory_of_empty_stays_while_a_request_is_in_flight(client: Any, broker: FakeBroker) -> None:
    x = client.empty((4, 4096), np.uint8)
    x[:] = 9
    future = client.submit("hold", {"x": x})
    peer, infer, _ = broker.parked.get(timeout=20)
    del x
    other = client.empty((4, 4096), np.uint8)
    other[:] = 1
    broker.do(lambda: echo(broker, peer, infer, []))
    assert (future.result()["x"] == 9).all()


def test_empty_over_any_link(client: Any) -> None:
    for shape, dtype in (((2, 3), "float32"), ((0, 5), "int8"), ((), "float64"), (7, "bool"), ((3,), object)):
        x = client.empty(shape, dtype)
        assert x.dtype == np.dtype(dtype)
        assert x.shape == ((shape,) if isinstance(shape, int) else shape)
    with pytest.raises(shmserve.InvalidRequest, match="negative dim"):
        client.empty((2, -1))


@shared_only
def test_blocks_of_inputs_are_used_again(client: Any, broker: FakeBroker) -> None:
    for number in range(4):
        client.infer("echo", {"x": np.full((100, 100), number, np.float32)})
    assert len({request.inputs[0].data for request in broker.requests}) == 1


@shared_only
def test_received_outputs_are_passed_on(client: Any, broker: FakeBroker) -> None:
    x = np.arange(50_000, dtype=np.float64).reshape(50, 1000)
    first = client.infer("echo", {"x": x})["x"]
    (given,) = broker.held_handles
    second = client.infer("echo", {"x": first, "rows": first[10:20]})
    np.testing.assert_array_equal(second["x"], x)
    np.testing.assert_array_equal(second["rows"], x[10:20])
    whole, rows = map(place_of, broker.requests[1].inputs)
    assert whole == given
    assert rows == Handle(given.segment, given.offset + 80_000, 80_000)


@shared_only
def test_dropped_outputs_are_returned_once_as_they_were_given(client: Any, broker: FakeBroker) -> None:
    x = np.zeros((100, 100), np.float32)
    results = [client.infer("echo", {"x": x}) for _ in range(3)]
    assert len(broker.held_handles) == 3
    part = results[0]["x"][5:6, 7]
    keep = results[1]
    del results
    gc.collect()
    client.flush()
    assert len(broker.wait_for(Return).handles) == 1
    assert len(broker.held_handles) == 2, "a slice keeps its output"
    del part, keep
    gc.collect()
    client.infer("echo", {"x": 1})  # returns go with the next message
    assert broker.held_handles == []
    told = [type(message).__name__ for message in broker.packets[-1]]
    assert told == ["Return", "Infer"]


@shared_only
def test_much_dropped_memory_is_returned_without_a_call(client: Any, broker: FakeBroker) -> None:
    result = client.infer("echo", {"x": np.zeros(300_000, np.uint8)})
    del result
    gc.collect()
    if hasattr(client, "turn"):
        client.turn()
    assert broker.wait_for(Return)
    assert broker.held_handles == []


@shared_only
def test_rows_from_several_places(client: Any, broker: FakeBroker) -> None:
    x = np.arange(60_000, dtype=np.int64).reshape(60, 1000)
    result = client.infer("rows", {"x": x})
    np.testing.assert_array_equal(result["x"], x)
    assert not result["x"].flags.writeable
    client.flush()
    broker.wait_for(Return)
    assert broker.held_handles == []


@shared_only
def test_outputs_are_placed(client: Any, broker: FakeBroker) -> None:
    x = np.arange(10_000, dtype=np.float32).reshape(100, 100)
    place = client.empty((100, 100))
    result = client.infer("echo", {"x": x, "small": x[0]}, outputs={"x": place, "small": None})
    assert result["x"] is place
    np.testing.assert_array_equal(place, x)
    np.testing.assert_array_equal(result["small"], x[0])
    wanted = broker.requests[0].outputs
    assert wanted is not None
    assert wanted[0].place is not None
    assert wanted[1].place is None
    result = client.infer("echo", {"x": x[:50] + 1}, outputs={"x": place})
    assert result["x"].shape == (50, 100)
    assert np.shares_memory(result["x"], place)
    np.testing.assert_array_equal(place[:50], x[:50] + 1)
    assert broker.held_handles == []


def test_outputs_that_are_small_or_come_in_frames_are_written_to_their_place(client: Any) -> None:
    small, large = np.zeros((2, 3)), np.zeros((100, 100))
    x = np.random.default_rng(0).random((100, 100))
    result = client.infer("echo", {"a": x[:2, :3], "b": x}, outputs={"a": small, "b": large})
    assert result["a"] is small
    assert result["b"] is large
    np.testing.assert_array_equal(small, x[:2, :3])
    np.testing.assert_array_equal(large, x)
    with pytest.raises(shmserve.InvalidRequest, match=r"output 'a' is FP64 \[2, 3\], but the array given"):
        client.infer("echo", {"a": x[:2, :3]}, outputs={"a": np.zeros((3, 2))})
    with pytest.raises(shmserve.InvalidRequest, match="must be a writable numpy array"):
        client.infer("echo", {"a": x}, outputs={"a": np.broadcast_to(1.0, (100, 100))})


def test_results_outlive_the_client(connect: Callable[..., Any]) -> None:
    x = np.random.default_rng(1).random((300, 300))
    with connect() as client:
        own = client.empty((50, 50))
        own[:] = 5
        result = client.infer("echo", {"x": x})
    np.testing.assert_array_equal(result["x"], x)
    assert (own == 5).all()


# ------------------------------------------------------------------------------------------------ what is asked for


def test_all_that_can_be_said_of_a_request(client: Any, broker: FakeBroker) -> None:
    result = client.infer(
        "echo", {"x": 1, "y": 2}, outputs=["y"], version="3", timeout=7.5, priority=2, sequence=42,
        sequence_start=True, sequence_end=True, parameters={"a": 1, "b": "two", "timeout": 1500}, request_id="id-1",
    )  # fmt: skip
    assert list(result) == ["y"]
    assert result.version == 3
    assert result.parameters == {"a": 1, "b": "two"}
    (said,) = broker.requests
    assert (said.version, said.timeout_us) == (3, 7_500_000)
    assert said.options is not None
    assert said.options.id == "id-1"
    assert said.options.priority == 2
    assert said.options.queue_timeout_us == 1500
    assert (said.options.sequence, said.options.sequence_start, said.options.sequence_end) == (42, True, True)
    assert [wanted.name for wanted in said.outputs or ()] == ["y"]


def test_what_cannot_travel_is_refused_at_once(client: Any, broker: FakeBroker) -> None:
    def refused(text: str, *args: Any, **kwargs: Any) -> None:
        with pytest.raises(shmserve.InvalidRequest, match=text):
            client.infer(*args, **kwargs)

    x = np.zeros(3, np.float32)
    refused("has 300 characters; the limit is 128", "m" * 300, {})
    refused("has 200 characters; the limit is 128", "echo", {"n" * 200: x})
    refused("has 200 characters; the limit is 128", "echo", {"x": x}, outputs=["n" * 200])
    refused("may have 256 inputs, this one has 10000", "echo", {str(number): x for number in range(10_000)})
    refused("has 40 dims; a tensor may have 32", "echo", {"x": np.zeros((1,) * 40)})
    refused("complex128 has no wire type", "echo", {"x": np.zeros(3, complex)})
    refused("must be str or bytes", "echo", {"x": np.array([1, None], object)})
    refused("mapping of names", "echo", [x])
    refused("mapping of names", "echo", {7: x})
    refused("is no tensor", "echo", {"x": [[1, 2], [3]]})
    refused("not a number", "echo", {"x": x}, version="latest")
    refused("not a time in seconds above 0", "echo", {"x": x}, timeout=0)
    refused("not a time in seconds above 0", "echo", {"x": np.zeros(10_000)}, timeout=-1)
    refused("need sequence=", "echo", {"x": x}, sequence_start=True)
    refused("below 0", "echo", {"x": x}, priority=-1)
    refused("time in the queue in microseconds", "echo", {"x": x}, parameters={"timeout": "long"})
    refused("must be str, int, float or bool", "echo", {"x": x}, parameters={"p": [1]})
    refused("may have 64 parameters", "echo", {"x": x}, parameters={str(number): 1 for number in range(65)})
    refused("names and parameters make a message of", "echo", {"x": x}, parameters={"p": "x" * 200_000})
    refused("outputs is a list of names", "echo", {"x": x}, outputs="x")
    refused("cannot be sent", "echo", {"\ud800": x})
    refused("does not fit in 64 bits", "echo", {"x": x}, sequence=2**64)
    assert broker.requests == []
    assert client.infer("echo", {"x": x})["x"].shape == (3,)


@ways("frames", "tcp")
def test_frames_have_a_limit(client: Any) -> None:
    half = np.zeros(FRAME_BYTES // 2, np.uint8)
    result = client.infer("echo", {"a": half, "b": half})
    assert result["b"].nbytes == FRAME_BYTES // 2
    with pytest.raises(shmserve.InvalidRequest, match="over the 1048576 that one message may carry"):
        client.infer("echo", {"a": half, "b": half, "c": half})


@shared_only
def test_own_memory_has_a_limit(connect: Callable[..., Any]) -> None:
    with connect(memory_bytes=1 << 20) as client:
        client.infer("echo", {"x": np.zeros(1 << 20, np.uint8)})
        with pytest.raises(shmserve.Unavailable, match="raise memory_bytes of the client"):
            client.empty((1 << 20) + 1, np.uint8)
        with pytest.raises(shmserve.Unavailable, match="raise memory_bytes of the client"):
            client.infer("echo", {"x": np.zeros(1 << 19, np.uint8), "y": np.zeros(1 << 20, np.uint8)})
        kept = client.empty(1 << 20, np.uint8)
        assert kept.nbytes == 1 << 20, "what was taken for the refused request is free again"


def test_errors_come_as_their_class(client: Any) -> None:
    with pytest.raises(shmserve.NotFound, match="Request for unknown model: 'nope' is not found"):
        client.infer("nope", {"x": np.zeros((200, 200))})
    with pytest.raises(shmserve.Internal, match=r"output 'x' \(FP32 \[1000\]\) cannot be read"):
        client.infer("garble", {})
    with pytest.raises(shmserve.NotFound):
        client.config("nope")


def test_questions(client: Any, broker: FakeBroker) -> None:
    broker.answers["statistics"] = {"model_stats": [{"name": "m" * 100, "version": str(n)} for n in range(2000)]}
    broker.answers["metadata"] = {"name": "shmserve", "version": "1", "extensions": []}
    assert client.live() is True
    assert client.ready() is True
    assert client.models() == [{"name": "echo", "version": "1", "state": "READY", "reason": ""}]
    assert client.statistics() == broker.answers["statistics"]
    assert client.metadata()["name"] == "shmserve"


# ------------------------------------------------------------------------------------------------ time


def test_a_deadline_is_kept_by_the_client_too(client: Any, broker: FakeBroker) -> None:
    x = np.zeros((100, 100))
    with pytest.raises(shmserve.DeadlineExceeded, match=r"model 'hold' did not answer within the timeout of 0\.02 s"):
        client.infer("hold", {"x": x}, timeout=0.02)
    assert broker.requests[0].timeout_us == 20_000
    client.live()
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
            client.infer("hold", {"x": 1})
        with pytest.raises(TimeoutError):
            client.submit("hold", {"x": 1}).result()


def test_cancel(client: Any, broker: FakeBroker) -> None:
    future = client.submit("hold", {"x": np.zeros((100, 100))})
    assert not future.done()
    peer, infer, frames = broker.parked.get(timeout=20)
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
    done = client.submit("echo", {"x": 1})
    done.result()
    assert not done.cancel()


@shared_only
def test_inputs_are_not_reused_before_released(client: Any, broker: FakeBroker) -> None:
    x = np.full((100, 100), 1.0)
    with pytest.raises(shmserve.QueueTimeout, match="waited for too long"):
        client.infer("held", {"x": x})
    peer, infer, _ = broker.parked.get(timeout=20)
    still_read = place_of(infer.inputs[0])
    client.infer("echo", {"x": x + 1})
    assert place_of(broker.requests[-1].inputs[0]) != still_read
    assert (np.frombuffer(peer.mapped.memory(still_read)) == 1.0).all()
    broker.do(lambda: peer.send(Released(infer.request)))
    client.live()
    client.infer("echo", {"x": x + 2})
    assert place_of(broker.requests[-1].inputs[0]) == still_read


@shared_only
def test_a_place_is_kept_until_released(client: Any, broker: FakeBroker) -> None:
    place = client.empty((100, 100))
    with pytest.raises(shmserve.QueueTimeout):
        client.infer("held", {"x": 1}, outputs={"x": place})
    peer, infer, _ = broker.parked.get(timeout=20)
    assert infer.outputs is not None
    handle = infer.outputs[0].place
    assert handle is not None
    del place
    gc.collect()
    other = client.empty((100, 100))
    client.infer("echo", {"x": other})
    assert place_of(broker.requests[-1].inputs[0]) != handle
    broker.do(lambda: peer.send(Released(infer.request)))
    client.live()
    again = client.empty((100, 100))
    client.infer("echo", {"x": again})
    assert place_of(broker.requests[-1].inputs[0]) == handle


# ------------------------------------------------------------------------------------------------ the connection


@shared_only
def test_reclaim(client: Any, broker: FakeBroker) -> None:
    result = client.infer("echo", {"x": np.zeros(10_000, np.uint8)})
    del result
    gc.collect()
    (peer,) = broker.peers.values()
    broker.do(lambda: peer.send(Reclaim()))
    client.live()
    assert broker.wait_for(Return)


def test_ping(client: Any, broker: FakeBroker) -> None:
    client.live()
    (peer,) = broker.peers.values()
    broker.do(lambda: peer.send(Ping(77)))
    client.live()
    client.live()
    assert broker.wait_for(Pong).number == 77


def test_bye(client: Any, broker: FakeBroker) -> None:
    client.live()
    future = client.submit("hold", {"x": 1})
    client.close()
    assert broker.wait_for(Bye)
    with pytest.raises(shmserve.Cancelled, match="closed before the answer"):
        future.result()
    with pytest.raises(shmserve.Unavailable, match="the client is closed"):
        client.infer("echo", {"x": 1})


@ways("lane", "ipc", "frames")  # of tcp, the port would be another
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
    else:  # ZeroMQ: only the end of the server is the end of a connection
        future = client.submit("hold", inputs)
        broker.parked.get(timeout=20)
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
    del received  # belongs to the old connection, and is not returned on the new one
    gc.collect()
    client.flush()
    client.infer("echo", {"own": own})


@ways("lane")
def test_a_step_of_a_sequence_is_not_sent_again(client: Any, broker: FakeBroker) -> None:
    with pytest.raises(shmserve.ConnectionLost, match="in the middle of sequence 5; start it again"):
        client.infer("die", {"x": 1}, sequence=5)
    assert client.infer("echo", {"x": 1}, sequence=5, sequence_start=True)["x"] == 1


def test_no_server(broker: FakeBroker, connect: Callable[..., Any], link: str) -> None:
    broker.stop()
    with connect(reconnect_timeout=0.3) as client:
        with pytest.raises(shmserve.ConnectionLost, match=r"no server at .*start one with `shmserve serve"):
            client.infer("echo", {"x": np.zeros(10_000)})
        assert client.live() is False
        assert client.ready() is False
        with pytest.raises(shmserve.DeadlineExceeded, match=r"not ready after 0\.1 s: no server"):
            client.wait_ready(timeout=0.1)
        if link != "tcp":
            broker.start()
            client.wait_ready(timeout=10)
            assert client.infer("echo", {"x": 1})["x"] == 1
            broker.stop()
            with pytest.raises(shmserve.ConnectionLost, match="no server at"):
                client.infer("echo", {"x": 1})


def test_wait_ready(client: Any, broker: FakeBroker) -> None:
    broker.ready = False
    broker.answers["models"] = [{"name": "m", "version": "1", "state": "LOADING", "reason": "half way"}]
    with pytest.raises(shmserve.DeadlineExceeded, match=r"not ready after 0\.1 s: m 1 is LOADING \(half way\)"):
        client.wait_ready(timeout=0.1)
    broker.ready = True
    client.wait_ready(timeout=5)
    client.wait_ready("m")


def test_goodbye(client: Any, broker: FakeBroker) -> None:
    future = client.submit("hold", {"x": 1})
    peer, _, _ = broker.parked.get(timeout=20)
    broker.do(lambda: peer.send(Goodbye("DENIED", "not for you")))
    with pytest.raises(shmserve.Denied, match="not for you"):
        future.result()
    assert client.infer("echo", {"x": 1})["x"] == 1, "over a new connection"


def test_an_answer_to_nothing_is_returned(client: Any, broker: FakeBroker, link: str) -> None:
    client.live()
    (peer,) = broker.peers.values()

    def unasked() -> None:
        frames: list[bytes] = []
        tensor = peer.tensor("x", "UINT8", (5000,), bytes(5000), frames)
        peer.send(Reply(999, 1, (tensor,)), frames=tuple(frames))

    broker.do(unasked)
    client.live()
    client.flush()
    client.live()
    assert broker.held_handles == []
