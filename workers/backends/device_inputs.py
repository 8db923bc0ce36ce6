"""Inputs on this process's GPU for engines with their own GPU memory and streams: one address for all requests of a
batch.

Invariants: an input passed to the engine is complete and does not change until the batch is over; the batch locates its
inputs within `copies`, which waits before the engine reads them, and before their sources are released after an error.
Small inputs that are entirely on the host are left to the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shmserve.workers.backends.base import GpuTensor
from shmserve.workers.backends.device_buffers import DIRECT_BYTES, PINNED_BYTES, Feed, Pinned
from shmserve.workers.gpu.shared import DevicePiece

if TYPE_CHECKING:
    from shmserve.gpu.interface import GpuDevice
    from shmserve.workers.batch.gather import GatherGroup
    from shmserve.workers.batch.specs import Spec

Array = np.ndarray[Any, np.dtype[Any]]


class _OpenDevice(NamedTuple):
    """The device, and what copies to it."""

    cuda: GpuDevice
    stream: int
    pinned: Pinned
    feed: Feed


class DeviceInputs:
    """The device inputs of one model. Its buffers are created when the first batch needs them, and grow."""

    def __init__(self, cuda: GpuDevice | None = None, limit: int = PINNED_BYTES) -> None:
        """With `cuda`, large inputs on the host are also copied to the GPU, directly from callers' memory. `limit`: the
        bytes of callers' memory that may be pinned."""
        self._cuda = cuda
        self._limit = limit
        self._device: _OpenDevice | None = None
        self._queued = False
        """Copies are queued that nothing has waited for."""
        self._buffers: dict[int, tuple[int, int]] = {}

    @contextmanager
    def copies(self) -> Iterator[None]:
        """Waits for the copies that `locate` queues within it, also after an error."""
        try:
            yield
        finally:
            self._wait()

    def locate(self, group: GatherGroup, index: int, spec: Spec) -> GpuTensor | None:
        """Returns an input of all requests, complete after `copies`; None if it is left to the engine."""
        pieces: Any = group.pieces(index)
        shape = group.shape(index)
        if not pieces or shape is None:
            return None
        piece = next((piece for piece in pieces if isinstance(piece, DevicePiece)), None)
        if piece is not None:
            device = self._device or self._open(piece.cuda)
        elif self._cuda is not None and any(part.nbytes >= DIRECT_BYTES for part in pieces):
            device = self._device or self._open(self._cuda)
        else:
            return None
        address = device.feed.address_on_device(group, index)
        if address:
            return GpuTensor(address, shape)
        cuda, size = device.cuda, sum(part.nbytes for part in pieces)
        target = self._buffer(cuda, index, size)
        self._queued = True
        try:
            device.feed.put(group, index, spec.numpy, shape, size, target)
        except cuda.errors as error:
            raise cuda.failure(error) from error
        return GpuTensor(target, shape)

    def _wait(self) -> None:
        device = self._device
        if self._queued and device is not None:
            self._queued = False
            try:
                device.cuda.synchronize_stream(device.stream)
            except device.cuda.errors as error:
                raise device.cuda.failure(error) from error

    def pin(self, output: Array) -> None:
        """Pins the memory of an output, so that the engine copies to it directly."""
        if self._cuda is not None:
            (self._device or self._open(self._cuda)).pinned.ensure(output)

    def _open(self, cuda: GpuDevice) -> _OpenDevice:
        stream, pinned = cuda.stream(), Pinned(cuda, self._limit)
        self._device = _OpenDevice(cuda, stream, pinned, Feed(cuda, pinned, True, 0, stream))
        return self._device

    def _buffer(self, cuda: GpuDevice, index: int, size: int) -> int:
        address, room = self._buffers.get(index, (0, 0))
        if room < size:
            if address:
                del self._buffers[index]
                cuda.free(address)
            address = cuda.allocate(size)
            self._buffers[index] = address, size
        return address

    def close(self) -> None:
        device, self._device = self._device, None
        if device is None:
            return
        for address, _ in self._buffers.values():
            device.cuda.free(address)
        self._buffers.clear()
        device.feed.close()
        device.pinned.close()
        device.cuda.destroy_stream(device.stream)
