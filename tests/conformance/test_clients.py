"""Both clients over every kind of link, against a broker that echoes: tensors, shared memory, options of requests,
queries and operations.

Expected values come from numpy and from the messages that the broker received.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import shmserve
from shmserve.protocol.messages import FRAME_BYTES, INLINE_BYTES, Ask, Handle, Return
from shmserve.transport.address import TCP_FRAME_BYTES
from tests.conformance.client_ways import LARGE, NUMBERS, data, place_of, shared_only, ways
from tests.support.broker.fake_broker import FakeBroker
from tests.support.patience import PATIENCE_S


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


def test_shapes_strides_and_python_values(client: Any) -> None:
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
    with pytest.raises(shmserve.InvalidRequest, match="cannot have type 'COMPLEX'"):
        shmserve.Raw("COMPLEX", bits)


def test_small_tensors_are_inline_and_large_ones_are_not(client: Any, broker: FakeBroker, link: str) -> None:
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
    assert kinds == [bytes] * 12 + [shared] * 4, "a message has at most 48 KiB inline"


def test_more_requests_than_buffers_hold_before_a_result_is_read(client: Any) -> None:
    """Sends 4 KiB in each direction. The broker does not read while it cannot write."""
    x = np.zeros(1024, np.float32)
    futures = [client.submit("echo", {"x": x + number}) for number in range(1500)]
    for number, future in enumerate(futures):
        assert (future.result()["x"] == number).all()


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


def test_empty_returns_arrays_over_every_link(client: Any) -> None:
    for shape, dtype in (((2, 3), "float32"), ((0, 5), "int8"), ((), "float64"), (7, "bool"), ((3,), object)):
        x = client.empty(shape, dtype)
        assert x.dtype == np.dtype(dtype)
        assert x.shape == ((shape,) if isinstance(shape, int) else shape)
    with pytest.raises(shmserve.InvalidRequest, match="negative dim"):
        client.empty((2, -1))


@shared_only
def test_received_outputs_are_sent_without_a_copy(client: Any, broker: FakeBroker) -> None:
    x = np.arange(50_000, dtype=np.float64).reshape(50, 1000)
    first = client.infer("echo", {"x": x})["x"]
    (output,) = broker.held_handles
    second = client.infer("echo", {"x": first, "rows": first[10:20]})
    np.testing.assert_array_equal(second["x"], x)
    np.testing.assert_array_equal(second["rows"], x[10:20])
    whole, rows = map(place_of, broker.requests[1].inputs)
    assert whole == output
    assert rows == Handle(output.segment, output.offset + 80_000, 80_000)


@shared_only
def test_dropped_outputs_are_returned_once(client: Any, broker: FakeBroker) -> None:
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
    client.infer("echo", {"x": np.int64(1)})  # returns are sent with the next message
    assert broker.held_handles == []
    assert [type(message).__name__ for message in broker.packets[-1]] == ["Return", "Infer"]


@shared_only
def test_large_dropped_outputs_are_returned_without_another_call(client: Any, broker: FakeBroker) -> None:
    result = client.infer("echo", {"x": np.zeros(300_000, np.uint8)})
    del result
    gc.collect()
    if hasattr(client, "turn"):
        client.turn()
    assert broker.wait_for(Return)
    assert broker.held_handles == []


@shared_only
def test_an_output_in_several_parts(client: Any, broker: FakeBroker) -> None:
    x = np.arange(60_000, dtype=np.int64).reshape(60, 1000)
    result = client.infer("rows", {"x": x})
    np.testing.assert_array_equal(result["x"], x)
    assert not result["x"].flags.writeable
    client.flush()
    broker.wait_for(Return)
    assert broker.held_handles == []


@shared_only
def test_outputs_are_written_to_shared_memory_of_the_client(client: Any, broker: FakeBroker) -> None:
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


def test_outputs_are_copied_to_arrays_outside_of_shared_memory(client: Any) -> None:
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


def test_all_options_of_a_request(client: Any, broker: FakeBroker) -> None:
    result = client.infer(
        "echo", {"x": 1, "y": np.int64(2)}, outputs=["y"], version="3", timeout=7.5, priority=2, sequence=42,
        sequence_start=True, sequence_end=True, parameters={"a": 1, "b": "two", "timeout": 1500}, request_id="id-1",
    )  # fmt: skip
    assert (list(result), result.version, result.parameters) == (["y"], 3, {"a": 1, "b": "two"})
    (request,) = broker.requests
    assert (request.version, request.timeout_us) == (3, 7_500_000)
    options = request.options
    assert options is not None
    assert (options.id, options.priority, options.queue_timeout_us) == ("id-1", 2, 1500)
    assert (options.sequence, options.sequence_start, options.sequence_end) == (42, True, True)
    assert [wanted.name for wanted in request.outputs or ()] == ["y"]


@ways("lane")
def test_an_invalid_request_is_refused_before_it_is_sent(client: Any, broker: FakeBroker) -> None:
    def refused(text: str, *args: Any, **kwargs: Any) -> None:
        with pytest.raises(shmserve.InvalidRequest, match=text):
            client.infer(*args, **kwargs)

    x = np.zeros(3, np.float32)
    refused("has 300 characters; the limit is 128", "m" * 300, {})
    refused("has 200 characters; the limit is 128", "echo", {"n" * 200: x})
    refused("has 200 characters; the limit is 128", "echo", {"x": x}, outputs=["n" * 200])
    refused("has 10000 inputs; the limit is 256", "echo", {str(number): x for number in range(10_000)})
    refused("has 40 dims; the limit is 32", "echo", {"x": np.zeros((1,) * 40)})
    refused("complex128 has no wire type", "echo", {"x": np.zeros(3, complex)})
    refused("must be str or bytes", "echo", {"x": np.array([1, None], object)})
    refused("mapping of names", "echo", [x])
    refused("mapping of names", "echo", {7: x})
    refused("lists have different lengths", "echo", {"x": [[1, 2], [3]]})
    refused("not a number", "echo", {"x": x}, version="latest")
    refused("must be a number of seconds above 0", "echo", {"x": x}, timeout=0)
    refused("must be a number of seconds above 0", "echo", {"x": np.zeros(10_000)}, timeout=-1)
    refused("need sequence=", "echo", {"x": x}, sequence_start=True)
    refused("not a number from 0 to 2", "echo", {"x": x}, priority=-1)
    refused("queue timeout in microseconds", "echo", {"x": x}, parameters={"timeout": "long"})
    refused("must be str, int, float or bool", "echo", {"x": x}, parameters={"p": [1]})
    refused("has 65 parameters; the limit is 64", "echo", {"x": x}, parameters={str(number): 1 for number in range(65)})
    refused("names and parameters make a message of", "echo", {"x": x}, parameters={"p": "x" * 200_000})
    refused("outputs must be a list of names", "echo", {"x": x}, outputs="x")
    refused("cannot be sent", "echo", {"\ud800": x})
    refused("does not fit in 64 bits", "echo", {"x": x}, sequence=2**64)
    assert broker.requests == []
    assert client.infer("echo", {"x": x})["x"].shape == (3,)


@ways("frames", "tcp")
def test_frames_have_a_limit(client: Any, link: str) -> None:
    half = np.zeros(FRAME_BYTES // 2, np.uint8)
    result = client.infer("echo", {"a": half, "b": half})
    assert result["b"].nbytes == FRAME_BYTES // 2
    most = FRAME_BYTES if link == "frames" else TCP_FRAME_BYTES
    with pytest.raises(shmserve.InvalidRequest, match=f"over the limit of {most} for one message"):
        client.infer("echo", {"a": half, "b": np.zeros(most - half.nbytes + 1, np.uint8)})


@shared_only
def test_own_memory_has_a_limit(connect: Callable[..., Any]) -> None:
    with connect(memory_bytes=1 << 20) as client:
        client.infer("echo", {"x": np.zeros(1 << 20, np.uint8)})
        with pytest.raises(shmserve.Unavailable, match="raise memory_bytes of the client"):
            client.empty((1 << 20) + 1, np.uint8)
        with pytest.raises(shmserve.Unavailable, match="raise memory_bytes of the client"):
            client.infer("echo", {"x": np.zeros(1 << 19, np.uint8), "y": np.zeros(1 << 20, np.uint8)})
        kept = client.empty(1 << 20, np.uint8)
        assert kept.nbytes == 1 << 20, "the memory of the refused request is free again"


def test_errors_have_their_class(client: Any) -> None:
    with pytest.raises(shmserve.NotFound, match="Request for unknown model: 'nope' is not found"):
        client.infer("nope", {"x": np.zeros((200, 200))})
    with pytest.raises(shmserve.Internal, match=r"output 'x' \(FP32 \[1000\]\) cannot be read"):
        client.infer("garble", {})
    with pytest.raises(shmserve.NotFound):
        client.config("nope")


def test_status_queries(client: Any, broker: FakeBroker) -> None:
    broker.answers["statistics"] = {"model_stats": [{"name": "m" * 100, "version": str(n)} for n in range(2000)]}
    broker.answers["metadata"] = {"name": "shmserve", "version": "1", "extensions": []}
    broker.answers["activity"] = {"models": [], "clients": [{"number": 1}]}
    assert client.activity() == broker.answers["activity"]
    broker.answers["logs"] = {"records": [{"number": 8, "text": "x"}], "next": 9, "more": False}
    assert client.logs() == client.logs("echo", after=2**62) == broker.answers["logs"]
    assert client.live() is True
    assert client.ready() is True
    assert client.models() == [{"name": "echo", "version": "1", "state": "READY", "reason": ""}]
    assert client.statistics() == broker.answers["statistics"]
    assert client.metadata()["name"] == "shmserve"


DONE = {"model": "m", "versions": [{"version": "1", "state": "READY", "seconds": 0.5}], "changed": True, "warnings": []}


def test_each_operation_and_its_options(client: Any, broker: FakeBroker) -> None:
    received: list[tuple[Any, ...]] = []

    def record(*operation: Any) -> Any:
        received.append(operation)
        if operation[1] == "broken":
            raise shmserve.Unavailable("failed to load 'broken', no version is available")
        return DONE

    for what in ("load", "unload", "restart", "origins"):
        broker.answers[what] = partial(record, what)
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
    assert received == [
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
    assert len(received) == 10


def test_the_default_timeout_does_not_apply_to_operations(connect: Callable[..., Any], broker: FakeBroker) -> None:
    broker.answers["load"] = DONE
    with connect(timeout=1e-6) as client:
        assert client.load("m") == DONE


@pytest.mark.parametrize("way", ["sync lane", "sync ipc"], indirect=True)
def test_requests_of_threads_continue_during_operations(client: Any, broker: FakeBroker) -> None:
    """Tested while the body is sent, and while the client waits for the answer."""
    broker.answers["load"] = DONE
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
