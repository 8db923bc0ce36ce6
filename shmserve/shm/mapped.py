"""Segments of other processes that this process maps. Invariant: values that a peer reports about its memory are not
trusted; sizes, seals and bounds are checked here before any address is computed from them.

A segment is mapped read-only at once, and its descriptor is closed. Its pages stay mapped until the last view is
dropped, even after `remove`. Only one thread at a time may add and remove segments; views may be created and dropped in
any thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from shmserve.errors import HandleLost, InvalidRequest
from shmserve.protocol.messages import DEVICE, Handle
from shmserve.shm import views
from shmserve.shm.extents import memfd, posix
from shmserve.shm.extents.base import Extent
from shmserve.shm.pages import Pages

_BYTE = np.dtype("uint8")


class DeviceSegments(Protocol):
    """The interface for segments on the GPU of this process."""

    def forget(self, segment: int) -> None: ...

    def close(self) -> None: ...


class OnDevice(HandleLost):
    """The bytes are on a GPU. Callers that can read GPU memory handle this error."""


class _Mapping:
    __slots__ = ("address", "memory", "pages", "size", "writable")

    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        self.address = pages.address
        self.size = pages.size
        self.memory = views.make(pages, pages.address, _BYTE, (pages.size,), False).data
        self.writable: Pages | None = None

    def for_writing(self) -> Pages:
        """Returns a second mapping for writing, so that accidental writes to input arrays still fault."""
        if self.writable is None:
            self.writable = self.pages.writable_alias()
        if self.writable is None:
            raise InvalidRequest("the segment is sealed against writing: only its owner can write it")
        return self.writable


class Mapped:
    def __init__(self, open_device: Callable[[Mapped], DeviceSegments] | None = None) -> None:
        """`open_device` opens the reader of segments on the GPU, at the first use, because a context takes hundreds of
        MiB of GPU memory. None: this process may not use a GPU."""
        self._segments: dict[int, _Mapping] = {}
        self.on_device: dict[int, tuple[str, int]] = {}
        """Segments on a GPU, with their names and sizes. They are not mapped on the host."""
        self._open_device = open_device
        self._device: DeviceSegments | None = None
        self.committed = 0
        """Bytes of all segments that are mapped and have not been removed."""

    def __contains__(self, segment: int) -> bool:
        return segment in self._segments or segment in self.on_device

    def __len__(self) -> int:
        return len(self._segments)

    def add(
        self,
        segment: int,
        size: int,
        *,
        fd: int | None = None,
        name: str | None = None,
        writable: bool = False,
        uid: int | None = None,
    ) -> None:
        """Maps a segment by its descriptor, which is always closed, or by its name. With `uid`, a named segment must
        belong to that user. `writable`: if the segment cannot be written, fail now and not at the first write."""
        if segment in self:
            if fd is not None:
                os.close(fd)
            raise InvalidRequest(f"segment {segment} is already mapped: segment ids are never reused")
        if fd is None and name is not None and name.startswith(DEVICE):
            self.on_device[segment] = name, size
            return
        extent: Extent
        if fd is not None:
            extent = memfd.attach(fd, size, False)
        elif name is not None:
            extent = posix.attach(name, size, False, uid=uid)
        else:
            raise InvalidRequest(f"segment {segment} was announced without a descriptor or a name")
        mapping = _Mapping(extent.pages)
        extent.close()
        if writable:
            mapping.for_writing()
        self._segments[segment] = mapping
        self.committed += size

    def remove(self, segment: int) -> None:
        mapping = self._segments.pop(segment, None)
        if mapping is None:
            if self.on_device.pop(segment, None) is None:
                raise InvalidRequest(f"segment {segment} is not mapped")
            if self._device is not None:
                self._device.forget(segment)
            return
        self.committed -= mapping.size

    def close(self) -> None:
        self._segments.clear()
        self.on_device.clear()
        self.committed = 0
        device, self._device = self._device, None
        if device is not None:
            device.close()

    def device(self) -> DeviceSegments:
        """The reader of segments on the GPU."""
        if self._device is None:
            if self._open_device is None:
                raise HandleLost("the tensor is on a GPU, and the model's instance is not")
            self._device = self._open_device(self)
        return self._device

    # ------------------------------------------------------------------------------------ handles

    def _find(self, handle: Handle) -> _Mapping:
        mapping = self._segments.get(handle.segment)
        if mapping is None:
            if handle.segment in self.on_device:
                raise OnDevice("the tensor is on a GPU, which this process cannot read")
            raise HandleLost(
                f"segment {handle.segment} is not mapped: its owner has disconnected, or never announced it"
            )
        if handle.offset < 0 or handle.size < 0 or handle.offset + handle.size > mapping.size:
            raise InvalidRequest(
                f"handle with offset {handle.offset} and size {handle.size} is outside its segment of "
                f"{mapping.size} bytes"
            )
        return mapping

    def has(self, handle: Handle) -> bool:
        """Whether the handle's bytes can be read on the host."""
        mapping = self._segments.get(handle.segment)
        return mapping is not None and handle.offset >= 0 and 0 <= handle.size <= mapping.size - handle.offset

    def view(
        self,
        handle: Handle,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        *,
        on_drop: Callable[[Handle], object] | None = None,
    ) -> views.Array:
        """Returns a read-only array over the handle's bytes. `on_drop(handle)` is called once, in any thread, when the
        array and all its views have been dropped; never in a forked child."""
        mapping = self._find(handle)
        if views.byte_count(dtype, shape) != handle.size:
            raise _wrong_size(handle, dtype, shape)
        return views.make(mapping.pages, mapping.address + handle.offset, dtype, shape, False, handle, on_drop)

    def writable(self, handle: Handle, dtype: np.dtype[Any], shape: tuple[int, ...]) -> views.Array:
        """Returns a writable array over the handle's bytes, for an output that the owner wants placed there."""
        mapping = self._find(handle)
        if views.byte_count(dtype, shape) != handle.size:
            raise _wrong_size(handle, dtype, shape)
        pages = mapping.for_writing()
        return views.make(pages, pages.address + handle.offset, dtype, shape, True, handle)

    def memory(self, handle: Handle) -> memoryview:
        """Returns the handle's bytes, read-only."""
        return self._find(handle).memory[handle.offset : handle.offset + handle.size]

    def address(self, handle: Handle) -> int:
        """Returns the address of the handle's bytes, for engines that read by pointer. The memory is read-only."""
        return self._find(handle).address + handle.offset

    def locate_base(self, array: views.Array) -> Handle | None:
        """Returns the handle of the view that the array is, or is a part of; None if it is not from this mapping."""
        hold = views.hold_of(array)
        if hold is None or not isinstance(hold.what, Handle):
            return None
        mapping = self._segments.get(hold.what.segment)
        return hold.what if mapping is not None and mapping.pages is hold.pages else None


def _wrong_size(handle: Handle, dtype: np.dtype[Any], shape: tuple[int, ...]) -> InvalidRequest:
    size = views.byte_count(dtype, shape)
    return InvalidRequest(f"a {dtype} tensor of shape {list(shape)} has {size} bytes, its handle {handle.size}")
