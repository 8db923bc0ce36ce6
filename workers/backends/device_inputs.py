"""Inputs on this process's GPU for engines with their own GPU memory and streams: one address for all requests of a
batch.

Invariants: an input passed to the engine is complete and does not change until the batch is over; the batch locates its
inputs within `copies`, which waits before the engine reads them, and before their sources are released after an error.
Small inputs that are entirely on the host are left to the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from shmserve.workers.backends.base import GpuTensor
from shmserve.workers.backends.device_buffers import DIRECT_BYTES, PINNED_BYTES, Feed, Pinned
from shmserve.workers.gpu.shared import DevicePiece

if TYPE_CHECKING:
    from shmserve.gpu.interface import GpuDevice
    from shmserve.workers.batch.gather import GatherGroup
    from shmserve.workers.batch.specs import Spec

Array = np.ndarray[Any, np.dtype[Any]]


class DeviceInputs:
    """The device inputs of one model. Its buffers are created when the first batch needs them, and grow."""

    def __init__(self, cuda: GpuDevice | None = None, limit: int = PINNED_BYTES) -> None:
        """With `cuda`, large inputs on the host are also copied to the GPU, directly from callers' memory. `limit`: the
        bytes of callers' memory that may be pinned."""
        self._cuda = cuda
        self._from_host = cuda is not None
        self._limit = limit
        self._pinned: Pinned | None = None
        self._feed: Feed | None = None
        self._stream = 0
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
        if piece is None and not (self._from_host and any(part.nbytes >= DIRECT_BYTES for part in pieces)):
            return None
        feed = self._feed or self._set_up(piece.cuda if piece is not None else self._cuda)
        cuda = self._cuda
        assert cuda is not None
        address = feed.address_on_device(group, index)
        if address:
            return GpuTensor(address, shape)
        size = sum(piece.nbytes for piece in pieces)
        target = self._buffer(index, size)
        self._queued = True
        try:
            feed.put(group, index, spec.numpy, shape, size, target)
        except cuda.errors as error:
            raise cuda.failure(error) from error
        return GpuTensor(target, shape)

    def _wait(self) -> None:
        cuda = self._cuda
        if self._queued and cuda is not None:
            self._queued = False
            try:
                cuda.synchronize_stream(self._stream)
            except cuda.errors as error:
                raise cuda.failure(error) from error

    def pin(self, output: Array) -> None:
        """Pins the memory of an output, so that the engine copies to it directly."""
        if self._from_host:
            if self._pinned is None:
                self._set_up(self._cuda)
            assert self._pinned is not None
            self._pinned.ensure(output)

    def _set_up(self, cuda: Any) -> Feed:
        self._cuda, self._stream = cuda, cuda.stream()
        self._pinned = Pinned(cuda, self._limit)
        self._feed = Feed(cuda, self._pinned, True, 0, self._stream)
        return self._feed

    def _buffer(self, index: int, size: int) -> int:
        cuda = self._cuda
        assert cuda is not None
        address, room = self._buffers.get(index, (0, 0))
        if room < size:
            if address:
                del self._buffers[index]
                cuda.free(address)
            address = cuda.allocate(size)
            self._buffers[index] = address, size
        return address

    def close(self) -> None:
        cuda, self._cuda = self._cuda, None
        if cuda is None or self._feed is None or self._pinned is None:
            return
        for address, _ in self._buffers.values():
            cuda.free(address)
        self._buffers.clear()
        self._feed.close()
        self._pinned.close()
        self._feed = self._pinned = None
        cuda.destroy_stream(self._stream)
