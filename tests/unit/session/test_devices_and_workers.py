"""Tensors of a client on a GPU, as a worker sees them: both on one fake GPU, in a process each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shmserve.protocol.messages import Handle
from shmserve.session.gpu import tensors
from shmserve.session.memory import SessionMemory
from shmserve.shm.mapped import Mapped
from shmserve.workers.gpu.shared import DevicePiece, memory_of
from tests.support.gpu.fake_device import TO_HOST, FakeGpu, fake_gpu

SHAPE = (2, 30_000)
FP32 = np.dtype(np.float32)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    monkeypatch.setattr(tensors, "_spare", {})
    with fake_gpu() as gpu:
        yield gpu
        assert gpu.left() == {"device": 1}, "exported memory is kept for later clients of the process"


@pytest.fixture
def memory(gpu: FakeGpu) -> Iterator[SessionMemory]:
    made = SessionMemory("memfd", 1 << 28)
    made.connected(3, {"device_memory": 1})
    yield made
    made.close()


@pytest.fixture
def worker(gpu: FakeGpu, memory: SessionMemory) -> Iterator[Mapped]:
    made = Mapped()
    with gpu.process("worker"):
        memory_of(made)
    yield made
    made.close()


def piece(memory: SessionMemory, worker: Mapped, handle: Handle) -> DevicePiece:
    for segment in memory.announcements.maps:
        message: Any = segment.map()
        if message.segment not in worker:
            worker.add(message.segment, message.size, name=message.name)
    return memory_of(worker).piece(handle, FP32, SHAPE)


def test_a_worker_reads_and_writes_memory_of_a_client(gpu: FakeGpu, memory: SessionMemory, worker: Mapped) -> None:
    x = memory.empty_on("cuda:0", SHAPE, FP32)
    source = memory.devices.source("x", x, x.__cuda_array_interface__)
    given = np.arange(60_000, dtype=np.float32).reshape(SHAPE)
    memory.devices.store(source, given)
    handle = memory.devices.export(source)
    gpu.copies.clear()
    np.testing.assert_array_equal(piece(memory, worker, handle).host(), given)
    assert gpu.copies == [(given.nbytes, TO_HOST)], "the worker reads it in place"
    memory_of(worker).store(handle, given + 1)
    np.testing.assert_array_equal(x.numpy(), given + 1)
    del x, source


def test_memory_of_a_closed_client_is_used_by_the_next(gpu: FakeGpu, memory: SessionMemory) -> None:
    x = memory.empty_on(0, SHAPE, FP32)
    address = x.block.address
    del x
    memory.close()
    other = SessionMemory("memfd", 1 << 28)
    y = other.empty_on(0, SHAPE, FP32)
    assert y.block.address == address
    assert gpu.allocations == 1
    del y
    other.close()
