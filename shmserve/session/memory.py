"""The memory of a session: its own arena for inputs, and the mapped segments of other processes for outputs.

Invariant: dropping an array only appends to a deque, in whichever thread the collector runs; the arena and messages are
only touched where the session's calls are serialised.

Segment ids start with the connection's owner number. After a reconnect the session's own segments get new ids and are
announced again. Mappings of others' segments belong to the old connection; their handles are not returned on the new
one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shmserve.dtypes import elements
from shmserve.errors import InvalidRequest, ProtocolError
from shmserve.protocol.messages import FRAME_BYTES, Handle, Map, Unmap
from shmserve.session.announcements import Announcements
from shmserve.session.foreign_memory import ForeignMemory
from shmserve.session.ticket import KeptInputs
from shmserve.shm.arena import Arena, Block
from shmserve.shm.extents import memfd, posix
from shmserve.shm.mapped import Mapped
from shmserve.shm.views import Array, address_of

if TYPE_CHECKING:
    from shmserve.session.gpu.tensors import DeviceArray, Devices

KINDS = ("memfd", "posix", "frames")
FLUSH_BYTES = 256 * 1024
"""Once dropped outputs have this total size, they are returned at once, without waiting for the next message."""


class SessionMemory:
    """`kind`: memfd (descriptors), posix (names) or frames (nothing is shared). `cold`: touch the pages of a memfd on
    use instead of a whole segment at once, which takes 40 ms for 64 MiB.
    """

    def __init__(
        self,
        kind: str,
        limit_bytes: int,
        on_full: Callable[[], object] | None = None,
        frame_bytes: int = FRAME_BYTES,
        cold: bool = False,
    ) -> None:
        if kind not in KINDS:
            raise InvalidRequest(f"memory {kind!r} is not one of {', '.join(KINDS)}")
        self.kind = kind
        self.shared = kind != "frames"
        self.frame_bytes = frame_bytes
        """Maximum size of the frames per message. The server's limit replaces it on connect."""
        self.announcements = announcements = Announcements(device_memory=kind == "memfd")
        self.mapped = Mapped()
        self.drops: Drops = Drops(on_full)
        self._on_full = on_full
        self._devices: Devices | None = None
        self._foreign: ForeignMemory | None = None
        self._limit_bytes = limit_bytes
        self._freed: deque[Block] = deque()
        self._arena = Arena(
            0,
            posix.create if kind != "memfd" else self._make_cold if cold else memfd.create,
            limit_bytes=limit_bytes,
            announce=announcements.maps.append,
            withdraw=announcements.unmaps.append,
            setting="memory_bytes of the client",
            numbers=announcements.numbers,
        )

    # ------------------------------------------------------------------------------------ own memory

    def _make_cold(self, size: int) -> memfd.MemfdExtent:
        return memfd.create(size, promised=self._arena.cold_bytes)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[np.generic], cold: bool = False) -> Array:
        """An array in shared memory, freed when it and all its views are dropped. `cold`: parts of it must be warmed
        before use.
        """
        if not self.shared or dtype.hasobject:
            return np.empty(shape, dtype)
        block = self._allocate(elements(shape) * dtype.itemsize, cold)
        try:
            return block.array(dtype, shape, on_drop=self._freed.append)
        except BaseException:
            self._arena.free(block.segment, block.offset)
            raise

    @property
    def devices(self) -> Devices:
        """The session's memory on GPUs."""
        if self._devices is None:
            from shmserve.session.gpu.tensors import Devices  # without a GPU array it is not imported

            self._devices = Devices(self.announcements, self._limit_bytes)
        return self._devices

    @property
    def foreign(self) -> ForeignMemory:
        """Memory of other processes that is passed on by name."""
        if self._foreign is None:
            self._foreign = ForeignMemory(self.announcements)
        return self._foreign

    def empty_for(
        self, shape: int | tuple[int, ...], dtype: npt.DTypeLike, device: str | int | None
    ) -> Array | DeviceArray:
        """The array that a caller wants: in shared memory, or on a device."""
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        if any(size < 0 for size in sizes):
            raise InvalidRequest(f"shape {list(sizes)} has a negative dim")
        return self.empty(sizes, np.dtype(dtype)) if device is None else self.empty_on(device, sizes, dtype)

    def empty_on(self, device: str | int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> DeviceArray:
        """An array on a device: "cuda:0" or the device's number in this process."""
        text = device.removeprefix("cuda").removeprefix(":") or "0" if isinstance(device, str) else str(device)
        if not (text.isascii() and text.isdecimal()) or (isinstance(device, str) and not device.startswith("cuda")):
            raise InvalidRequest(f"invalid device={device!r}: expected 'cuda', 'cuda:N' or a number")
        return self.devices.empty(shape, np.dtype(dtype), int(text))

    def copy_in(self, array: Array, kept: KeptInputs) -> Handle:
        """Copies an input from private memory into the arena, the only copy made of it."""
        block = self.block(array.nbytes, kept)
        np.copyto(block.array(array.dtype, array.shape), array, casting="no")
        return block.handle()

    def block(self, size: int, kept: KeptInputs) -> Block:
        """Allocates a block for an input of a request."""
        block = self._allocate(size)
        kept.blocks.append(block)
        return block

    @property
    def used(self) -> float:
        """The used fraction of the limit."""
        return self._arena.used / self._limit_bytes

    def warm(self, array: Array, begin: int, end: int) -> None:
        """Warms a byte range of a cold array. Raises Unavailable if the machine has no memory for it."""
        location = self._arena.locate(address_of(array) + begin, end - begin)
        if location is not None:
            self._arena.warm(location[0], location[1], location[1] + end - begin)

    def _allocate(self, size: int, cold: bool = False) -> Block:
        if self._freed:
            self._free_dropped()
        return self._arena.allocate(size, cold=cold)

    def _free_dropped(self) -> None:
        freed = self._freed
        while freed:
            block = freed.popleft()
            self._arena.free(block.segment, block.offset)

    def trim(self) -> bool:
        """Frees memory that has not been used since the last call. True: the server must be told."""
        self._free_dropped()
        gone = self._arena.trim_idle()
        self.announcements.unmaps += gone
        return bool(gone)

    def locate(self, array: Array) -> tuple[Handle, bool] | None:
        """A handle to the array's bytes, and whether they are a received output; None if the server cannot map them."""
        address: int = array.__array_interface__["data"][0]  # `address_of`
        size = array.nbytes
        own = self._arena.locate(address, size)
        if own is not None:
            return Handle(own[0], own[1], size), False
        base = self.mapped.locate_base(array)
        if base is None:
            return None
        return Handle(base.segment, base.offset + address - self.mapped.address(base), size), True

    def is_known(self, segment: int) -> bool:
        """Whether it is an announced segment of the arena without a name."""
        return self.kind == "memfd" and self._arena.owns(segment) and not self.announcements.maps

    def release_inputs(self, kept: KeptInputs) -> None:
        """Releases the memory that a request referred to, once the server no longer needs it."""
        for block in kept.blocks:
            self._arena.free(block.segment, block.offset)
        if kept.devices:
            for source in kept.devices.values():
                self.devices.release(source)
        kept.devices = None
        kept.blocks.clear()
        kept.arrays.clear()
        kept.received.clear()

    # ------------------------------------------------------------------------------------ outputs

    def on_map(self, message: Map) -> int:
        """Returns 0, the number of settled tickets, as does `on_unmap`."""
        if message.name is not None:
            self.mapped.add(message.segment, message.size, name=message.name)
        elif message.segment not in self.mapped:
            raise ProtocolError("a segment was announced without a descriptor")
        return 0

    def on_unmap(self, message: Unmap) -> int:
        if message.segment in self.mapped:
            self.mapped.remove(message.segment)
        return 0

    def is_own(self, handle: Handle) -> bool:
        if any(segment.id == handle.segment for segment in self._arena.segments):
            return True
        if self._foreign is not None and handle.segment in self._foreign.regions:
            return True
        return self._devices is not None and self._devices.owns(handle.segment)

    # ------------------------------------------------------------------------------------ connections

    def connected(self, owner: int, limits: Mapping[str, int]) -> dict[int, int]:
        """Applies the limits of a new connection and announces own segments under new ids. Returns old id -> new id."""
        self.frame_bytes = limits.get("frame_bytes", 0) or self.frame_bytes
        segments = self._arena.segments
        before = [segment.id for segment in segments]
        self.announcements.connected(owner, bool(limits.get("device_memory")), bool(limits.get("named_memory")))
        self._arena.renumber(owner)
        numbers = {old: segment.id for old, segment in zip(before, segments, strict=True)}
        if self._devices is not None:
            numbers |= self._devices.connected()
        return numbers if self._foreign is None else numbers | self._foreign.connected()

    def disconnected(self) -> None:
        """Drops mappings and pending returns, which belong to the old connection. Views stay valid."""
        self.mapped.close()
        self.mapped = Mapped()
        self.drops = Drops(self._on_full)

    def close(self) -> None:
        self._arena.close()
        if self._devices is not None:
            self._devices.close()
        self._foreign = None
        self.mapped.close()
        self._freed.clear()
        self.announcements.maps.clear()


class Drops:
    """Handles of one connection whose arrays were dropped. `dropped` may run inside the garbage collector."""

    __slots__ = ("_handles", "_on_full", "bytes")

    def __init__(self, on_full: Callable[[], object] | None) -> None:
        self._handles: deque[Handle] = deque()
        self.bytes = 0
        """Approximate bytes of the handles to return."""
        self._on_full = on_full

    def __bool__(self) -> bool:
        return bool(self._handles)

    @property
    def full(self) -> bool:
        return self.bytes >= FLUSH_BYTES

    def dropped(self, handle: Handle) -> None:
        self._handles.append(handle)
        # Threads may race and lose an update. This only affects when, not whether, handles are returned.
        self.bytes += handle.size
        if self.bytes >= FLUSH_BYTES and self._on_full is not None:
            self._on_full()

    def take(self, limit: int) -> tuple[Handle, ...]:
        handles = self._handles
        self.bytes = 0
        return tuple([handles.popleft() for _ in range(min(limit, len(handles)))])
