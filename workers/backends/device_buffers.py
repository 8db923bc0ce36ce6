"""Buffers of a model for its GPU: device memory, pinned host memory, and segments of callers that are pinned while they
are mapped.

Invariant: nothing here is freed or overwritten before the stream that uses it was synchronized. The code that runs the
batch synchronizes once per batch.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from shmserve.gpu.interface import ALIGN
from shmserve.repo.backends import PINNED_LIMIT
from shmserve.shm.views import address_of, hold_of
from shmserve.workers.gpu.shared import DevicePiece

if TYPE_CHECKING:
    from shmserve.gpu.interface import GpuDevice
    from shmserve.shm.pages import Pages
    from shmserve.workers.batch.gather import GatherGroup

Array = np.ndarray[Any, np.dtype[Any]]
_BYTE = np.dtype(np.uint8)

DIRECT_BYTES = 64 * 1024
"""Pieces of at least this size are copied directly to the device. Smaller ones are gathered first, because each copy
has a fixed cost."""
PINNED_BYTES = 256 * 1024 * 1024
RECENT_USES = 64
"""A segment that was used this recently is not evicted: segments in use would evict each other in every batch, and each
eviction waits for the device."""


def pinned_limit(settings: Mapping[str, str]) -> int:
    """The bytes of callers' memory that a process may pin."""
    return int(settings.get(PINNED_LIMIT, PINNED_BYTES))


class Staging:
    """Growing host buffers, one for each tensor of a model, pinned if `pinned`."""

    def __init__(self, cuda: GpuDevice, pinned: bool) -> None:
        self._cuda = cuda
        self._pinned = pinned
        self._buffers: dict[int, Array] = {}
        self._owned: dict[int, int] = {}
        """The addresses of pinned buffers."""

    def bytes(self, index: int, size: int) -> Array:
        """Returns `size` bytes of a tensor's buffer, valid until the next call."""
        buffer = self._buffers.get(index)
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[index] = self._grown(index, size)
        return buffer[:size]

    def _grown(self, index: int, size: int) -> Array:
        if not self._pinned:
            return np.empty(size, _BYTE)
        self._free(index)
        address = self._owned[index] = self._cuda.allocate_host(size)
        return np.ndarray((size,), _BYTE, memoryview((ctypes.c_ubyte * size).from_address(address)))

    def _free(self, index: int) -> None:
        self._buffers.pop(index, None)
        owned = self._owned.pop(index, 0)
        if owned:
            self._cuda.free_host(owned)

    def close(self) -> None:
        for index in list(self._buffers):
            self._free(index)


class Pinned:
    """Mapped segments that are pinned for the device, with LRU eviction. A segment is unpinned before it is unmapped,
    whatever code releases it last."""

    def __init__(self, cuda: GpuDevice, limit: int) -> None:
        self._cuda = cuda
        self._limit = limit
        self._sizes: OrderedDict[int, int] = OrderedDict()
        """By address. 0: the segment cannot be pinned; do not try again."""
        self._last_uses: dict[int, int] = {}
        """The number of the last use, by address."""
        self._uses = 0
        self.used = 0

    def ensure(self, array: Array) -> bool:
        """Pins the segment that contains the array, if there is one and there is room. Returns whether it is pinned; a
        copy works either way."""
        hold = hold_of(array)
        if hold is None:
            return False
        pages = hold.pages
        self._uses += 1
        if pages.address in self._sizes:
            self._sizes.move_to_end(pages.address)
            self._last_uses[pages.address] = self._uses
            return self._sizes[pages.address] > 0
        if pages.size > self._limit:
            return False
        if self.used + pages.size > self._limit and not self._make_room(pages.size):
            return False
        done = self._cuda.register(pages.address, pages.size, pages.writable)
        self._sizes[pages.address] = pages.size if done else 0
        self._last_uses[pages.address] = self._uses
        self.used += pages.size if done else 0
        pages.on_unmap(self._unmapped)
        return done

    def _make_room(self, size: int) -> bool:
        """Evicts segments, the least recently used first. Returns False, and evicts none, if one of them was used
        recently."""
        evicted, remaining = 0, self.used
        for address, pinned in self._sizes.items():
            if remaining + size <= self._limit:
                break
            if pinned and self._uses - self._last_uses[address] <= RECENT_USES:
                return False
            evicted, remaining = evicted + 1, remaining - pinned
        self._cuda.settle()  # they may still be read or written for a batch
        for _ in range(evicted):
            self._evict()
        return True

    def _evict(self) -> None:
        address, size = self._sizes.popitem(last=False)
        del self._last_uses[address]
        self._release(address, size)

    def _unmapped(self, pages: Pages) -> None:
        size = self._sizes.pop(pages.address, 0)
        self._last_uses.pop(pages.address, None)
        self._release(pages.address, size)

    def _release(self, address: int, size: int) -> None:
        if size:
            self.used -= size
            self._cuda.unregister(address)

    def close(self) -> None:
        while self._sizes:
            self._evict()


class Feed:
    """Copies inputs of requests to the device, directly from where each caller wrote its rows."""

    def __init__(self, cuda: GpuDevice, pinned: Pinned, staged: bool, threshold: int, stream: int) -> None:
        """`staged`: small pieces are gathered in pinned memory. `threshold` above 0: this many pieces or more are
        gathered on the host, whatever their size."""
        self._cuda = cuda
        self._pinned = pinned
        self._threshold = threshold
        self._stream = stream
        self._staging = Staging(cuda, staged)

    def address_on_device(self, group: GatherGroup, index: int) -> int:
        """Returns the address of an input that is one aligned piece on the device; else 0."""
        pieces: Any = group.pieces(index)
        if pieces is None or len(pieces) != 1 or not isinstance(pieces[0], DevicePiece):
            return 0
        address: int = pieces[0].address
        return address if address % ALIGN == 0 and pieces[0].nbytes else 0

    def put(self, group: GatherGroup, index: int, dtype: Any, shape: tuple[int, ...], size: int, target: int) -> None:
        """Copies an input of all requests to `target`. Its sources must stay valid until the stream is synchronized."""
        pieces = group.pieces(index)
        gathers = pieces is None or 0 < self._threshold <= len(pieces)
        if pieces is None or (gathers and not any(isinstance(piece, DevicePiece) for piece in pieces)):
            staged = self._staging.bytes(index, size)
            group.copy(index, staged.view(dtype).reshape(shape))
            self._send(target, staged, 0, size)
            return
        offset = begin = 0
        buffer: Array | None = None
        piece: Any
        for piece in pieces:
            length = piece.nbytes
            if length and isinstance(piece, DevicePiece):
                if buffer is not None:
                    self._send(target, buffer, begin, offset)
                self._cuda.copy(target + offset, piece.address, length, self._cuda.within, self._stream)
                begin = offset + length
            elif length >= DIRECT_BYTES:
                if buffer is not None:
                    self._send(target, buffer, begin, offset)
                self._pinned.ensure(piece)
                self._cuda.copy(target + offset, address_of(piece), length, self._cuda.to_device, self._stream)
                begin = offset + length
            elif length:
                if buffer is None:
                    buffer = self._staging.bytes(index, size)
                buffer[offset : offset + length] = piece.reshape(-1).view(_BYTE)
            offset += length
        if buffer is not None:
            self._send(target, buffer, begin, offset)

    def _send(self, target: int, buffer: Array, begin: int, end: int) -> None:
        if end > begin:
            source = address_of(buffer) + begin
            self._cuda.copy(target + begin, source, end - begin, self._cuda.to_device, self._stream)

    def close(self) -> None:
        self._staging.close()
