"""The fake GPU of the tests finds misuse that a real one may not report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from shmserve.shm.extents.cuda import EXPORTED_BYTES
from tests.support.gpu.fake_device import TO_DEVICE, TO_HOST, WITHIN, FakeDevice, FakeGpu, Violation

SIZE = 4096
HOST = np.zeros(SIZE, np.uint8)


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    made = FakeGpu()
    yield made
    made.violations.clear()
    made.close()


def host() -> int:
    found: int = HOST.ctypes.data
    return found


def test_work_runs_only_when_something_waits_for_it(gpu: FakeGpu) -> None:
    device = gpu.device()
    made, stream, found = device.allocate(SIZE), device.stream(), np.zeros(SIZE, np.uint8)
    device.copy(found.ctypes.data, made, SIZE, TO_HOST, stream)
    assert not found.any()
    device.synchronize_stream(stream)
    assert found.all()
    assert gpu.violations == []


def use_after_free(gpu: FakeGpu, device: FakeDevice) -> None:
    made = device.allocate(SIZE)
    device.free(made)
    device.copy(made, host(), SIZE, TO_DEVICE, device.stream())


def double_free(gpu: FakeGpu, device: FakeDevice) -> None:
    made = device.allocate(SIZE)
    device.free(made)
    device.free(made)


def free_of_a_part(gpu: FakeGpu, device: FakeDevice) -> None:
    device.free(device.allocate(SIZE) + 256)


def free_with_pending_work(gpu: FakeGpu, device: FakeDevice) -> None:
    made = device.allocate(SIZE)
    device.copy(made, host(), SIZE, TO_DEVICE, device.stream())
    device.free(made)


def free_of_pinned_memory_with_pending_work(gpu: FakeGpu, device: FakeDevice) -> None:
    pinned = device.allocate_host(SIZE)
    device.copy(device.allocate(SIZE), pinned, SIZE, TO_DEVICE, device.stream())
    device.free_host(pinned)


def unregister_with_pending_work(gpu: FakeGpu, device: FakeDevice) -> None:
    device.register(host(), SIZE, False)
    device.copy(device.allocate(SIZE), host(), SIZE, TO_DEVICE, device.stream())
    device.unregister(host())


def free_while_another_process_has_it_open(gpu: FakeGpu, device: FakeDevice) -> None:
    made = device.allocate(SIZE)
    with gpu.process("other") as other:
        other.open(device.export(made))
    device.free(made)


def close_with_pending_work(gpu: FakeGpu, device: FakeDevice) -> None:
    with gpu.process("other") as other:
        opened = other.open(device.export(device.allocate(SIZE)))
    other.copy(host(), opened, SIZE, TO_HOST, other.stream())
    other.close_opened(opened)


def open_of_own_memory(gpu: FakeGpu, device: FakeDevice) -> None:
    exported = device.export(device.allocate(SIZE))
    assert len(exported) == EXPORTED_BYTES
    device.open(exported)


def out_of_bounds(gpu: FakeGpu, device: FakeDevice) -> None:
    device.copy(host(), device.allocate(SIZE) + 1, SIZE, TO_HOST, device.stream())


def host_memory_as_device_memory(gpu: FakeGpu, device: FakeDevice) -> None:
    device.copy(device.allocate(SIZE), host(), SIZE, WITHIN, device.stream())


def unordered_streams(gpu: FakeGpu, device: FakeDevice) -> None:
    made = device.allocate(SIZE)
    device.copy(made, host(), SIZE, TO_DEVICE, device.stream())
    device.copy(host(), made, SIZE, TO_HOST, device.stream())


def wait_for_an_event_before_it_is_recorded(gpu: FakeGpu, device: FakeDevice) -> None:
    device.wait_for(device.stream(), device.event())


def wait_for_an_event_recorded_too_early(gpu: FakeGpu, device: FakeDevice) -> None:
    made, first, second, event = device.allocate(SIZE), device.stream(), device.stream(), device.event()
    device.record(event, first)
    device.copy(made, host(), SIZE, TO_DEVICE, first)
    device.wait_for(second, event)
    device.copy(host(), made, SIZE, TO_HOST, second)


def synchronize_during_a_capture(gpu: FakeGpu, device: FakeDevice) -> None:
    stream = device.stream()
    device.begin_capture(stream)
    device.synchronize_stream(stream)


def use_of_a_destroyed_stream(gpu: FakeGpu, device: FakeDevice) -> None:
    stream = device.stream()
    device.destroy_stream(stream)
    device.synchronize_stream(stream)


@pytest.mark.parametrize(
    ("misuse", "text"),
    [
        (use_after_free, "the target of a copy was freed"),
        (double_free, "device memory was used after it was freed"),
        (free_of_a_part, "device memory was never created"),
        (free_with_pending_work, "device memory was released while work that uses it is pending"),
        (free_of_pinned_memory_with_pending_work, "pinned memory was released while"),
        (unregister_with_pending_work, "registered memory was released while"),
        (free_while_another_process_has_it_open, "was freed while another process has it open"),
        (close_with_pending_work, "opened memory was released while"),
        (open_of_own_memory, "a process opened its own memory"),
        (out_of_bounds, "the source of a copy is out of bounds by 1 bytes"),
        (host_memory_as_device_memory, "the source of a copy is not on the device"),
        (unordered_streams, "two streams use the same bytes, and no event orders them"),
        (wait_for_an_event_before_it_is_recorded, "an event was waited for that had not been recorded"),
        (wait_for_an_event_recorded_too_early, "no event orders them"),
        (synchronize_during_a_capture, "synchronized during a capture"),
        (use_of_a_destroyed_stream, "stream was never created"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_misuse_is_found(gpu: FakeGpu, misuse: Callable[[FakeGpu, FakeDevice], Any], text: str) -> None:
    with pytest.raises(Violation, match=text):
        misuse(gpu, gpu.device())


def test_misuse_that_the_code_under_test_catches_is_reported_at_the_end() -> None:
    gpu = FakeGpu()
    with pytest.raises(Violation):
        double_free(gpu, gpu.device())
    with pytest.raises(Violation, match="used after it was freed"):
        gpu.close()


def test_streams_that_an_event_orders_may_use_the_same_bytes(gpu: FakeGpu) -> None:
    device = gpu.device()
    made, streams, event = device.allocate(SIZE), [device.stream() for _ in range(3)], device.event()
    device.copy(made, host(), SIZE, TO_DEVICE, streams[0])
    for before, after in pairwise(streams):
        device.record(event, before)
        device.wait_for(after, event)
    device.copy(host(), made, SIZE, TO_HOST, streams[2])
    device.synchronize_stream(streams[2])
    device.copy(made, host(), SIZE, TO_DEVICE, streams[1])
    assert gpu.violations == []


def test_what_is_left(gpu: FakeGpu) -> None:
    device = gpu.device()
    assert gpu.left() == {}
    device.allocate(SIZE)
    device.event()
    with gpu.process("other") as other:
        other.allocate(SIZE)
    assert gpu.left() == {"device": 2, "events": 1}
    assert gpu.used == 2 * SIZE
