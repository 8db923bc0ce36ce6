"""The implementation of the interface to GPUs: CuPy over the stand-in of its runtime, and on a real device
(`pytest -m gpu`).
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from shmserve.errors import HandleLost, ModelFailed, Unavailable
from shmserve.gpu.interface import ALIGN, UNIT_BYTES, ClientDevices, DeviceLost, GpuDevice
from shmserve.session.gpu import cuda
from shmserve.shm.extents.cuda import UUID_BYTES, parts_of
from shmserve.workers.gpu import api
from tests.support.workers.gpu.device_arrays import end
from tests.support.workers.gpu.harness import standins

SIZE = 1 << 20
WAYS = ["stand-in", pytest.param("real", marks=pytest.mark.gpu)]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Chooses an implementation. What a test leaves behind is an error."""
    with ExitStack() as stack:
        if request.param == "stand-in":
            runtime, _ = stack.enter_context(standins())
            yield request.param
            end(runtime)
            assert runtime.state.left() == {}
            assert runtime.state.violations == []
        else:
            cupy: Any = pytest.importorskip("cupy")
            if not cupy.is_available():
                pytest.skip("there is no GPU")
            yield request.param


@pytest.fixture
def device(way: str) -> GpuDevice:
    return api.open_device()


@pytest.fixture
def stream(device: GpuDevice) -> Iterator[int]:
    made = device.stream()
    yield made
    device.destroy_stream(made)


@pytest.fixture
def memory(device: GpuDevice) -> Iterator[list[int]]:
    """Two allocations."""
    made = [device.allocate(SIZE), device.allocate(SIZE)]
    yield made
    device.settle()
    for address in made:
        device.free(address)


def address(array: Any) -> int:
    found: int = array.ctypes.data
    return found


def put(device: GpuDevice, stream: int, memory: int, given: Any) -> None:
    device.copy(memory, address(given), SIZE, device.to_device, stream)


def got(device: GpuDevice, stream: int, memory: int) -> Any:
    found = np.zeros(SIZE, np.uint8)
    device.copy(address(found), memory, SIZE, device.to_host, stream)
    device.synchronize_stream(stream)
    return found


def bytes_of(seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, SIZE, np.uint8)


@pytest.mark.parametrize("kind", [GpuDevice, ClientDevices])
def test_every_member_of_the_interface_exists(way: str, kind: Any) -> None:
    made: Any = api.open_device() if kind is GpuDevice else cuda.open_devices()
    names = [name for name in (*vars(kind), *inspect.get_annotations(kind)) if not name.startswith("_")]
    assert len(names) > 5
    assert [name for name in names if not hasattr(made, name)] == []


def test_what_the_device_says_of_itself(device: GpuDevice) -> None:
    major, _, minor = device.capability.partition(".")
    assert major.isdecimal()
    assert minor.isdecimal()
    assert len(device.uuid) == UUID_BYTES
    assert issubclass(device.errors, Exception)


def test_copies_of_a_stream_run_in_order(device: GpuDevice, stream: int, memory: list[int]) -> None:
    given, found, part = bytes_of(1), np.zeros(SIZE, np.uint8), np.zeros(500, np.uint8)
    first, second = memory
    device.copy(first, address(given), SIZE, device.to_device, stream)
    device.copy(second, first, SIZE, device.within, stream)
    device.copy(address(found), second, SIZE, device.to_host, stream)
    device.copy(address(part), first + 1000, 500, device.to_host, stream)
    device.synchronize_stream(stream)
    np.testing.assert_array_equal(found, given)
    np.testing.assert_array_equal(part, given[1000:1500])


@pytest.mark.parametrize("spin", [False, True])
def test_an_event_orders_two_streams(device: GpuDevice, stream: int, memory: list[int], spin: bool) -> None:
    """With so many copies before the event that the second stream could overtake them."""
    other, event, last = device.stream(-1), device.event(spin), device.event()
    for seed in range(4):
        given, found = bytes_of(seed), np.zeros(SIZE, np.uint8)
        device.copy(memory[0], address(given), SIZE, device.to_device, stream)
        for _ in range(50):
            device.copy(memory[1], memory[0], SIZE, device.within, stream)
        device.record(event, stream)
        device.wait_for(other, event)
        device.copy(address(found), memory[1], SIZE, device.to_host, other)
        device.record(last, other)
        device.synchronize(last)
        np.testing.assert_array_equal(found, given)
    device.destroy_event(event)
    device.destroy_event(last)
    device.destroy_stream(other)


def settle(device: GpuDevice, stream: int, event: int) -> None:
    device.settle()


def poll(device: GpuDevice, stream: int, event: int) -> None:
    device.record(event, stream)
    while not device.reached(event):
        pass


@pytest.mark.parametrize("wait", [settle, poll])
def test_work_is_done_after_other_ways_to_wait(
    device: GpuDevice, stream: int, memory: list[int], wait: Callable[[GpuDevice, int, int], None]
) -> None:
    given, found, event = bytes_of(5), np.zeros(SIZE, np.uint8), device.event()
    device.copy(memory[0], address(given), SIZE, device.to_device, stream)
    device.copy(address(found), memory[0], SIZE, device.to_host, stream)
    wait(device, stream, event)
    np.testing.assert_array_equal(found, given)
    device.destroy_event(event)


def test_a_captured_graph_runs_each_time_that_it_is_launched(device: GpuDevice, stream: int, memory: list[int]) -> None:
    """And what was captured and given up never runs."""
    first, second = memory
    device.begin_capture(stream)
    device.copy(first, second, SIZE, device.within, stream)
    device.give_up_capture(stream)
    device.begin_capture(stream)
    device.copy(second, first, SIZE, device.within, stream)
    graph = device.end_capture(stream)
    for seed in (5, 6):
        put(device, stream, first, given := bytes_of(seed))
        device.launch(graph, stream)
        np.testing.assert_array_equal(got(device, stream, second), given)
    device.destroy_graph(graph)


def test_pinned_host_memory(device: GpuDevice, stream: int, memory: list[int]) -> None:
    pinned, given = device.allocate_host(SIZE), bytes_of(11)
    ctypes.memmove(pinned, address(given), SIZE)
    device.copy(memory[0], pinned, SIZE, device.to_device, stream)
    device.synchronize_stream(stream)
    ctypes.memset(pinned, 0, SIZE)
    device.copy(pinned, memory[0], SIZE, device.to_host, stream)
    device.synchronize_stream(stream)
    assert ctypes.string_at(pinned, SIZE) == given.tobytes()
    device.free_host(pinned)


def test_allocations_are_aligned_and_have_their_size(device: GpuDevice, way: str) -> None:
    for size in (1, 1000, SIZE):
        made = device.allocate(size)
        assert made % ALIGN == 0
        assert device.room(made) >= size
        assert way == "stand-in" or device.room(made) - device.room(made + size - 1) == size - 1, "no driver"
        device.free(made)


def test_an_allocation_that_does_not_fit_is_an_error_with_the_numbers(device: GpuDevice) -> None:
    with pytest.raises(Unavailable, match=rf"no room for {1 << 60} bytes on the GPU: \d+ of \d+ bytes are free"):
        device.allocate(1 << 60)
    device.free(device.allocate(SIZE))


@pytest.mark.parametrize("writable", [True, False])
def test_mapped_memory_is_pinned_if_possible(device: GpuDevice, stream: int, memory: list[int], writable: bool) -> None:
    pinned = device.register(address(given := bytes_of(8)), SIZE, writable)
    put(device, stream, memory[0], given)
    np.testing.assert_array_equal(got(device, stream, memory[0]), given)
    if pinned:
        device.unregister(address(given))


def test_exported_memory(device: GpuDevice, way: str) -> None:
    size, other = UNIT_BYTES, api.open_device()
    made = device.allocate(size)
    exported = device.export(made)
    assert len(exported) == 64
    if way != "real":  # CUDA refuses to open a handle in the process that exported it; tests/gpu uses two
        opened = other.open(exported)
        assert other.room(opened) >= size
        streams = device.stream(), other.stream()
        put(device, streams[0], made, given := bytes_of(9))
        device.synchronize_stream(streams[0])
        np.testing.assert_array_equal(got(other, streams[1], opened), given)
        other.close_opened(opened)
        device.destroy_stream(streams[0])
        other.destroy_stream(streams[1])
    device.free(made)


def test_memory_that_does_not_exist_is_not_opened(device: GpuDevice) -> None:
    with pytest.raises(HandleLost, match="memory of another process on the GPU can no longer be opened"):
        device.open(bytes(64))


def test_errors_are_classified(device: GpuDevice) -> None:
    assert device.lost(DeviceLost("gone"))
    assert not device.lost(ModelFailed("no"))
    assert not device.lost(ValueError("no"))
    assert type(device.failure(ValueError("no"))) is ModelFailed
    assert type(device.failure(DeviceLost("gone"))) is DeviceLost
    assert str(device.failure(ValueError("a reason"))) == "the GPU failed: a reason"


@pytest.fixture
def devices(way: str) -> ClientDevices:
    return cuda.open_devices()


def test_memory_of_a_client(devices: ClientDevices) -> None:
    stream = devices.stream(0)
    extent = devices.extent(0, SIZE)
    assert extent.size == UNIT_BYTES
    assert devices.device_of(extent.address) == 0
    given, found = bytes_of(10), np.zeros(SIZE, np.uint8)
    devices.copy(0, extent.address, address(given), SIZE, "to_device", stream)
    devices.copy(0, extent.address + SIZE, extent.address, SIZE, "within", stream)
    devices.copy(0, address(found), extent.address + SIZE, SIZE, "to_host", stream)
    np.testing.assert_array_equal(found, given)
    devices.synchronize(0, stream)
    devices.synchronize(0, None)
    devices.end_stream(0, stream)
    assert extent.name is not None
    exported, uuid = parts_of(extent.name)
    assert uuid == api.open_device().uuid
    assert len(exported) == 64
    extent.close()
