"""Client tensors on a GPU: arenas that workers on the same GPU read and write.

Invariant: a caller's other device memory, e.g. in a library's pool, is never exported itself, because that would expose
everything next to it. It is copied once, on the device, into memory allocated for this purpose.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from msgspec import Struct

from shmserve.dtypes import elements, from_numpy
from shmserve.errors import InvalidRequest
from shmserve.gpu.interface import ClientDevices, Direction
from shmserve.gpu.runtime import arrays, load, platform_of
from shmserve.protocol.messages import DIMS, Handle
from shmserve.session.announcements import Announceable, Announcements
from shmserve.shm.arena import Arena, Block
from shmserve.shm.extents.cuda import CudaExtent
from shmserve.shm.views import Array, address_of

_spare: dict[tuple[int, int], list[CudaExtent]] = {}
"""Memory of closed clients, by process and device: exported memory cannot be freed, only reused."""


class DeviceArray:
    """Memory on a GPU that models there use without a copy. CuPy, PyTorch and other libraries can wrap it like any
    other array (`cupy.asarray(x)`, `torch.as_tensor(x, device="cuda")`); their arrays keep it alive.
    """

    __slots__ = (
        "__cuda_array_interface__",
        "__weakref__",
        "_dropped",
        "_fetch",
        "_pid",
        "block",
        "device",
        "dtype",
        "shape",
    )

    def __init__(
        self,
        block: Block,
        device: int,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        fetch: Callable[[DeviceRef], Array],
        dropped: Callable[[tuple[int, Block]], object],
    ) -> None:
        self.block = block
        self.device = device
        self.dtype = dtype
        self.shape = shape
        self._pid = os.getpid()
        self._fetch = fetch
        self._dropped = dropped
        # No stream: writes by the server are complete before its answer arrives.
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": shape,
            "typestr": dtype.str,
            "data": (block.address, False),
            "strides": None,
            "version": 3,
            "stream": None,
        }

    def __del__(self, getpid: Callable[[], int] = os.getpid) -> None:
        if getpid() == self._pid:
            self._dropped((self.device, self.block))

    @property
    def nbytes(self) -> int:
        return elements(self.shape) * self.dtype.itemsize

    def numpy(self) -> Array:
        """A copy in host memory."""
        return self._fetch(DeviceRef(self, self.block.address, self.device, self.dtype, self.shape, None))

    def __dlpack__(self, **how: Any) -> Any:
        return arrays().asarray(self).__dlpack__(**how)

    def __dlpack_device__(self) -> tuple[int, int]:
        return platform_of(load()).dlpack, self.device

    def __repr__(self) -> str:
        return f"DeviceArray(shape={self.shape}, dtype={self.dtype}, device='cuda:{self.device}')"


class DeviceRef(Struct, eq=False):
    """A caller's array on a device. `stream`: the stream that writes it; None: unknown; -1: the writes are complete.
    `block`: the memory that holds a copy of it.
    """

    owner: Any
    address: int
    device: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    stream: int | None
    block: Block | None = None

    @property
    def nbytes(self) -> int:
        return elements(self.shape) * self.dtype.itemsize


def interface_from_dlpack(value: Any) -> Any:
    """The CUDA array interface of a GPU array that has only `__dlpack__`."""
    return arrays().from_dlpack(value).__cuda_array_interface__


class Devices:
    """The GPU memory of one session. Calls must be serialised, as for `Session`, except for dropped arrays."""

    def __init__(self, announcements: Announcements, limit: int) -> None:
        self.far: set[str] = set()
        """Models that could not read GPU memory on this connection."""
        self._announcements = announcements
        self._limit = limit
        self._arenas: dict[int, Arena] = {}
        self._streams: dict[int, int] = {}
        self._freed: deque[tuple[int, Block]] = deque()
        self._cuda: ClientDevices | None = None

    @property
    def cuda(self) -> ClientDevices:
        if self._cuda is None:
            from shmserve.session.gpu import cuda  # imports what only GPUs need

            self._cuda = cuda.open_devices()
        return self._cuda

    # ------------------------------------------------------------------------------------ arrays

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], device: int) -> DeviceArray:
        if dtype.hasobject or not dtype.itemsize:
            raise InvalidRequest(f"arrays of {dtype} cannot be on a GPU")
        block = self._allocate(device, elements(shape) * dtype.itemsize)
        return DeviceArray(block, device, dtype, shape, self.fetch, self._freed.append)

    def source(self, name: str, value: Any, interface: Any) -> DeviceRef:
        """Describes a caller's array. Raises InvalidRequest if it cannot be sent."""
        try:
            shape, dtype = tuple(map(int, interface["shape"])), np.dtype(interface["typestr"])
            address, strides = int(interface["data"][0]), interface.get("strides")
            wire = from_numpy(dtype)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise InvalidRequest(f"'{name}' is not a tensor: {error}") from error
        if len(shape) > DIMS or wire == "BYTES" or not dtype.isnative or interface.get("mask") is not None:
            raise InvalidRequest(
                f"'{name}' is on a GPU and cannot be sent as a tensor: it is {dtype} with {len(shape)} dims"
            )
        if strides is not None and not _is_contiguous(shape, dtype.itemsize, tuple(strides)):
            raise InvalidRequest(f"'{name}' is on a GPU and not contiguous; make it contiguous first")
        size = elements(shape) * dtype.itemsize
        device = value.device if type(value) is DeviceArray else self.cuda.device_of(address) if size else 0
        stream: int | None = None
        if type(value) is not DeviceArray and interface.get("version", 0) >= 3 and "stream" in interface:
            stream = -1 if interface["stream"] is None else int(interface["stream"])
        return DeviceRef(value, address, device, dtype, shape, stream)

    def locate(self, source: DeviceRef) -> Handle | None:
        """A handle to an array in the session's own memory, else None."""
        arena = self._arenas.get(source.device)
        location = arena.locate(source.address, source.nbytes) if arena is not None else None
        return Handle(*location, source.nbytes) if location is not None else None

    # ------------------------------------------------------------------------------------ bytes

    def synchronize(self, source: DeviceRef) -> None:
        """Waits until the caller's pending writes are complete: other processes cannot synchronise with its streams."""
        if source.stream != -1:
            self.cuda.synchronize(source.device, source.stream)
            source.stream = -1

    def export(self, source: DeviceRef) -> Handle:
        """A handle for workers: to the array in place, or to a copy of it on the device."""
        self.synchronize(source)
        shared = self.locate(source)
        if shared is None:
            block = source.block = self._allocate(source.device, source.nbytes)
            self._copy(source.device, block.address, source.address, source.nbytes, "within")
            source.address, source.owner = block.address, None
            shared = block.handle()
        return shared

    def fetch(self, source: DeviceRef) -> Array:
        array = np.empty(source.shape, source.dtype)
        self.fetch_into(source, address_of(array))
        return array

    def fetch_into(self, source: DeviceRef, target: int) -> None:
        """Copies the array to a host address."""
        self.synchronize(source)
        if source.nbytes:
            self._copy(source.device, target, source.address, source.nbytes, "to_host")

    def store(self, target: DeviceRef, array: Array) -> None:
        """Copies an array from the host."""
        self.synchronize(target)
        if array.nbytes:
            array = np.ascontiguousarray(array)
            self._copy(target.device, target.address, address_of(array), array.nbytes, "to_device")

    def _copy(self, device: int, target: int, source: int, size: int, direction: Direction) -> None:
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = self.cuda.stream(device)
        self.cuda.copy(device, target, source, size, direction, stream)

    # ------------------------------------------------------------------------------------ memory

    @property
    def used(self) -> int:
        """Bytes of the session's memory that are in use, on all devices."""
        return sum(arena.used for arena in self._arenas.values())

    def _allocate(self, device: int, size: int) -> Block:
        freed = self._freed
        while freed:
            self.free(*freed.popleft())
        arena = self._arenas.get(device)
        if arena is None:
            announcements = self._announcements
            arena = self._arenas[device] = Arena(
                announcements.owner,
                partial(self._make, device),
                limit_bytes=self._limit,
                announce=self._announce,
                setting="memory_bytes of the client",
                numbers=announcements.numbers,
                what="GPU memory",
            )
        return arena.allocate(size)

    def _make(self, device: int, size: int) -> CudaExtent:
        spare = _spare.get((os.getpid(), device), [])
        for extent in spare:
            if extent.size >= size:
                spare.remove(extent)
                return extent
        return self.cuda.extent(device, size)

    def _announce(self, segment: Announceable) -> None:
        if self._announcements.device_memory:
            self._announcements.maps.append(segment)

    def free(self, device: int, block: Block) -> None:
        self._arenas[device].free(block.segment, block.offset)

    def release(self, source: DeviceRef) -> None:
        """Frees the copy of an array."""
        block, source.block = source.block, None
        if block is not None:
            self.free(source.device, block)

    def owns(self, segment: int) -> bool:
        return any(known.id == segment for arena in self._arenas.values() for known in arena.segments)

    # ------------------------------------------------------------------------------------ connections

    def connected(self) -> dict[int, int]:
        """Assigns new segment ids after a reconnect. Returns old id -> new id."""
        self.far.clear()
        numbers: dict[int, int] = {}
        for arena in self._arenas.values():
            before = [segment.id for segment in arena.segments]
            arena.renumber(self._announcements.owner)
            numbers |= {old: segment.id for old, segment in zip(before, arena.segments, strict=True)}
        return numbers

    def close(self) -> None:
        """Releases the session's memory. Unused segments are kept for the next session of this process; segments with
        live arrays stay as they are.
        """
        while self._freed:
            self.free(*self._freed.popleft())
        for device, arena in self._arenas.items():
            idle = [segment.extent for segment in arena.segments if not segment.blocks.used]
            _spare.setdefault((os.getpid(), device), []).extend(e for e in idle if isinstance(e, CudaExtent))
        self._arenas.clear()
        streams, self._streams = self._streams, {}
        for device, stream in streams.items():
            self.cuda.end_stream(device, stream)


def _is_contiguous(shape: tuple[int, ...], item: int, strides: tuple[int, ...]) -> bool:
    step = item
    for dim, stride in zip(reversed(shape), reversed(strides), strict=True):
        if dim > 1 and stride != step:
            return False
        step *= dim
    return True
