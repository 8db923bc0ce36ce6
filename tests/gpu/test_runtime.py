"""What the server relies on in CUDA within one process, beyond the interface that tests/conformance/test_devices.py
tests: pinned memory of segments, and the names of devices."""

from __future__ import annotations

import importlib
import os
from typing import Any

import numpy as np
import pytest

from shmserve.repo.gpus import discover
from shmserve.shm.extents import memfd
from shmserve.shm.extents.cuda import device_id, uuid_bytes

pytestmark = [pytest.mark.gpu, pytest.mark.process]

SIZE = 32 << 20


@pytest.fixture
def cuda(cupy: Any) -> Any:
    return importlib.import_module("shmserve.workers.gpu.api").Cuda()


def test_cupy_and_nvml_report_the_same_device_uuid(cuda: Any) -> None:
    """As far as a uuid without a zero byte can show."""
    (first, *_) = discover().devices
    assert cuda.uuid == device_id(uuid_bytes(first.uuid))


@pytest.mark.parametrize("writable", [True, False])
def test_a_clients_segment_is_pinned_and_copied(cuda: Any, writable: bool) -> None:
    """Also memory that is mapped read-only, if the device supports that: a worker maps clients' segments so."""
    stream, device = cuda.stream(), cuda.allocate(SIZE)
    extent = memfd.create(SIZE)
    extent.memory[:] = np.random.default_rng(1).bytes(SIZE)
    mapped = memfd.attach(os.dup(extent.fd), SIZE, writable)
    back = np.zeros(SIZE, np.uint8)
    pinned = cuda.register(mapped.address, mapped.size, writable)
    try:
        assert pinned or not writable, "writable shared memory cannot be pinned"
        cuda.copy(device, mapped.address, SIZE, cuda.to_device, stream)
        cuda.copy(back.ctypes.data, device, SIZE, cuda.to_host, stream)
        cuda.synchronize_stream(stream)
        assert back.tobytes() == bytes(extent.memory)
    finally:
        if pinned:
            cuda.unregister(mapped.address)
        cuda.free(device)
        cuda.destroy_stream(stream)
        mapped.close()
        extent.close()
