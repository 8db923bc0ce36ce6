"""What the server relies on in CUDA within one process: streams, events, pinned memory, the driver's facts."""

from __future__ import annotations

import ctypes
import importlib
import os
from typing import Any

import numpy as np
import pytest

from shmserve.errors import HandleLost
from shmserve.repo.gpus import discover
from shmserve.shm.extents import memfd
from shmserve.shm.extents.cuda import device_id, uuid_bytes

pytestmark = [pytest.mark.gpu, pytest.mark.process]

SIZE = 32 << 20


@pytest.fixture
def cuda(cupy: Any) -> Any:
    return importlib.import_module("shmserve.workers.gpu.api").Cuda()


def test_the_functions_used_of_cupy_exist(cuda: Any) -> None:
    assert cuda.devices >= 1


def test_cupy_and_nvml_report_the_same_device_uuid(cuda: Any) -> None:
    """As far as a uuid without a zero byte can show."""
    (first, *_) = discover().found
    assert cuda.uuid == device_id(uuid_bytes(first.uuid))


def test_the_driver_reports_the_size_of_an_allocation(hardware: None, cuda: Any) -> None:
    address = cuda.allocate(5 << 20)
    try:
        assert 5 << 20 <= cuda.room(address) < 8 << 20
        assert cuda.room(address) - cuda.room(address + 4096) == 4096
    finally:
        cuda.free(address)


def test_an_invalid_memory_handle_is_refused_and_the_device_stays_usable(hardware: None, cuda: Any) -> None:
    with pytest.raises(HandleLost):
        cuda.open(bytes(64))
    cuda.free(cuda.allocate(4096))


@pytest.mark.parametrize("writable", [True, False])
def test_a_clients_segment_is_pinned_and_copied(cuda: Any, writable: bool) -> None:
    """Also memory that is mapped read-only, if the device supports that: a worker maps clients' segments so."""
    stream, event = cuda.stream(), cuda.event()
    device = cuda.allocate(SIZE)
    extent = memfd.create(SIZE)
    extent.memory[:] = np.random.default_rng(1).bytes(SIZE)
    mapped = memfd.attach(os.dup(extent.fd), SIZE, writable)
    back = np.zeros(SIZE, np.uint8)
    pinned = cuda.register(mapped.address, mapped.size, writable)
    try:
        assert pinned or not writable, "writable shared memory cannot be pinned"
        cuda.copy(device, mapped.address, SIZE, cuda.to_device, stream)
        cuda.copy(back.ctypes.data, device, SIZE, cuda.to_host, stream)
        cuda.record(event, stream)
        cuda.synchronize(event)
        assert back.tobytes() == bytes(extent.memory)
    finally:
        if pinned:
            cuda.unregister(mapped.address)
        cuda.free(device)
        cuda.destroy_event(event)
        cuda.destroy_stream(stream)
        mapped.close()
        extent.close()


def test_a_segment_is_pinned_again_after_it_was_unpinned(cuda: Any) -> None:
    extent = memfd.create(1 << 20)
    try:
        for _ in range(3):
            assert cuda.register(extent.address, extent.size, True)
            assert not cuda.register(extent.address, extent.size, True), "pinned twice"
            cuda.unregister(extent.address)
    finally:
        extent.close()


def test_work_after_an_event_sees_what_was_queued_before_it(runtime: Any) -> None:
    """Two streams that do not synchronise by themselves, with copies that take long enough to be overtaken."""
    first, second = (runtime.streamCreateWithFlags(runtime.streamNonBlocking) for _ in range(2))
    event = runtime.eventCreateWithFlags(runtime.eventDisableTiming)
    device, other = runtime.malloc(SIZE), runtime.malloc(SIZE)
    source, back = runtime.hostAlloc(SIZE, 0), runtime.hostAlloc(SIZE, 0)
    given, found = (np.ctypeslib.as_array(_bytes(address)) for address in (source, back))
    try:
        for value in range(1, 9):
            given[:] = value
            runtime.memcpyAsync(device, source, SIZE, runtime.memcpyHostToDevice, first)
            runtime.memcpyAsync(other, device, SIZE, runtime.memcpyDeviceToDevice, first)
            runtime.eventRecord(event, first)
            runtime.streamWaitEvent(second, event)
            runtime.memcpyAsync(back, other, SIZE, runtime.memcpyDeviceToHost, second)
            runtime.streamSynchronize(second)
            assert np.unique(found).tolist() == [value]
    finally:
        for address in (source, back):
            runtime.freeHost(address)
        for address in (device, other):
            runtime.free(address)
        runtime.eventDestroy(event)
        for stream in (first, second):
            runtime.streamDestroy(stream)


def _bytes(address: int) -> Any:
    return (ctypes.c_ubyte * SIZE).from_address(address)
