"""The fake GPU of the tests finds misuse that a real one may not report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.support.gpu.fake_device import TO_DEVICE, TO_HOST, FakeDevice, FakeGpu, Violation

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


def free_with_pending_work(gpu: FakeGpu, device: FakeDevice) -> None:
    made = device.allocate(SIZE)
    device.copy(made, host(), SIZE, TO_DEVICE, device.stream())
    device.free(made)


def free_while_another_process_has_it_open(gpu: FakeGpu, device: FakeDevice) -> None:
    made = device.allocate(SIZE)
    with gpu.process("other") as other:
        other.open(device.export(made))
    device.free(made)


def out_of_bounds(gpu: FakeGpu, device: FakeDevice) -> None:
    device.copy(host(), device.allocate(SIZE) + 1, SIZE, TO_HOST, device.stream())


def unordered_streams(gpu: FakeGpu, device: FakeDevice) -> None:
    made = device.allocate(SIZE)
    device.copy(made, host(), SIZE, TO_DEVICE, device.stream())
    device.copy(host(), made, SIZE, TO_HOST, device.stream())


def wait_for_an_event_recorded_too_early(gpu: FakeGpu, device: FakeDevice) -> None:
    made, first, second, event = device.allocate(SIZE), device.stream(), device.stream(), device.event()
    device.record(event, first)
    device.copy(made, host(), SIZE, TO_DEVICE, first)
    device.wait_for(second, event)
    device.copy(host(), made, SIZE, TO_HOST, second)


@pytest.mark.parametrize(
    ("misuse", "text"),
    [
        (use_after_free, "the target of a copy was freed"),
        (free_with_pending_work, "device memory was released while work that uses it is pending"),
        (free_while_another_process_has_it_open, "was freed while another process has it open"),
        (out_of_bounds, "the source of a copy is out of bounds by 1 bytes"),
        (unordered_streams, "two streams use the same bytes, and no event orders them"),
        (wait_for_an_event_recorded_too_early, "no event orders them"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_misuse_is_found(gpu: FakeGpu, misuse: Callable[[FakeGpu, FakeDevice], Any], text: str) -> None:
    with pytest.raises(Violation, match=text):
        misuse(gpu, gpu.device())


def test_misuse_that_the_code_under_test_catches_is_reported_at_the_end() -> None:
    gpu = FakeGpu()
    with pytest.raises(Violation):
        use_after_free(gpu, gpu.device())
    with pytest.raises(Violation, match="of a copy was freed"):
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
