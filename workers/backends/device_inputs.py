"""Inputs on this process's GPU for engines with their own GPU memory and streams: one address for all requests of a
batch.

Invariant: an input passed to the engine is complete and does not change until the batch is over. Inputs that are
entirely on the host are left to the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shmserve.workers.backends.base import GpuTensor as GpuTensor
from shmserve.workers.backends.device_buffers import Feed, Pinned
from shmserve.workers.gpu.shared import DevicePiece

if TYPE_CHECKING:
    from shmserve.gpu.interface import GpuDevice
    from shmserve.workers.batch.gather import GatherGroup
    from shmserve.workers.batch.specs import Spec


class DeviceInputs:
    """The device inputs of one model. Its buffers are created when requests must be concatenated, and grow."""

    def __init__(self) -> None:
        self._cuda: GpuDevice | None = None
        self._pinned: Pinned | None = None
        self._feed: Feed | None = None
        self._stream = 0
        self._buffers: dict[int, tuple[int, int]] = {}

    def locate(self, group: GatherGroup, index: int, spec: Spec) -> GpuTensor | None:
        """Returns an input of all requests, complete; None if no part of it is on the GPU."""
        pieces: Any = group.pieces(index)
        piece = next((piece for piece in pieces or () if isinstance(piece, DevicePiece)), None)
        shape = group.shape(index)
        if piece is None or shape is None:
            return None
        feed = self._feed or self._set_up(piece.cuda)
        address = feed.address_on_device(group, index)
        if address:
            return GpuTensor(address, shape)
        size = sum(piece.nbytes for piece in pieces)
        target = self._buffer(index, size)
        cuda = piece.cuda
        try:
            feed.put(group, index, spec.numpy, shape, size, target)
            cuda.synchronize_stream(self._stream)
        except cuda.errors as error:
            raise cuda.failure(error) from error
        return GpuTensor(target, shape)

    def _set_up(self, cuda: GpuDevice) -> Feed:
        self._cuda, self._stream = cuda, cuda.stream()
        self._pinned = Pinned(cuda)
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
        if cuda is None:
            return
        for address, _ in self._buffers.values():
            cuda.free(address)
        self._buffers.clear()
        for owner in (self._feed, self._pinned):
            if owner is not None:
                owner.close()
        self._feed = self._pinned = None
        cuda.destroy_stream(self._stream)
