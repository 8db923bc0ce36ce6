"""An arena: the segments of one owner, in which only this owner allocates. Invariant: all bookkeeping is private to the
owner. Other holders return a block by message, and the owner frees it here.

An arena starts empty. Its first segment is small, and each further segment doubles the size of the arena, up to the
full segment size. Only one thread at a time may call it.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np

from shmserve.errors import Internal, InvalidRequest, Unavailable
from shmserve.protocol.messages import OWNER_SHIFT, Handle, Map
from shmserve.shm import views
from shmserve.shm.blocks import Blocks
from shmserve.shm.extents.base import Cold, Extent

FIRST_BYTES = 1024 * 1024
SEGMENT_BYTES = 32 * 1024 * 1024


class Segment:
    """One extent of an arena. An `id` is never reused."""

    __slots__ = ("address", "blocks", "cold", "extent", "id", "memory", "pages", "size")

    def __init__(self, id: int, extent: Extent) -> None:
        self.id = id
        self.extent = extent
        self.size = extent.size
        self.pages = extent.pages
        self.address = extent.address
        self.memory = extent.memory
        self.blocks = Blocks(extent.size, extent.align)
        self.cold = Cold(extent) if extent.cold else None
        """Pages that must be warmed before use."""

    @property
    def name(self) -> str | None:
        return self.extent.name

    @property
    def fd(self) -> int:
        return self.extent.fd

    def map(self, audience: str = "") -> Map:
        """Returns the message that announces this segment to other processes. If it has no name, send `fd` with it."""
        return Map(self.id, self.size, self.extent.name, audience)


class Block:
    """A range of bytes in a segment, allocated until it is freed in the arena."""

    __slots__ = ("address", "home", "offset", "size")

    def __init__(self, home: Segment, offset: int, size: int) -> None:
        self.home = home
        self.offset = offset
        self.size = size
        self.address = home.address + offset

    def __repr__(self) -> str:
        return f"Block(segment={self.home.id}, offset={self.offset}, size={self.size})"

    @property
    def segment(self) -> int:
        return self.home.id

    def handle(self) -> Handle:
        return Handle(self.home.id, self.offset, self.size)

    def memory(self) -> memoryview:
        return self.home.memory[self.offset : self.offset + self.size]

    def array(
        self, dtype: np.dtype[Any], shape: tuple[int, ...], *, on_drop: Callable[[Block], object] | None = None
    ) -> views.Array:
        """Returns a writable array over the block. `on_drop(block)` is called when its last view is dropped (see
        views)."""
        size = views.byte_count(dtype, shape)
        if size > self.size:
            raise InvalidRequest(
                f"a {dtype} array of shape {list(shape)} needs {size} bytes, the block has {self.size}"
            )
        return views.make(self.home.pages, self.address, dtype, shape, True, self, on_drop)


class Arena:
    """`make(size)` creates an extent. `announce(segment)` is called before the first handle in a segment is returned,
    `withdraw(id)` after the arena gave up a segment to make room. `setting` names the setting of the limit in errors.
    `numbers` is the segment counter that several arenas of an owner share. `what` names the memory in errors.
    """

    def __init__(
        self,
        owner: int,
        make: Callable[[int], Extent],
        *,
        limit_bytes: int,
        segment_bytes: int = SEGMENT_BYTES,
        announce: Callable[[Segment], object] | None = None,
        withdraw: Callable[[int], object] | None = None,
        setting: str = "limit_bytes",
        numbers: Iterator[int] | None = None,
        what: str = "shared memory",
    ) -> None:
        self._owner = owner
        self._make = make
        self._limit = limit_bytes
        self._segment_bytes = segment_bytes
        self._announce = announce
        self._withdraw = withdraw
        self._setting = setting
        self._what = what
        self._numbers = numbers if numbers is not None else count(1)
        self._segments: dict[int, Segment] = {}
        self._recent: Segment | None = None
        """The segment of the last free or allocation."""
        self._idle: set[int] = set()
        """Segments that were empty at the last `trim_idle`."""
        self._closed = False
        self.committed = 0
        """Bytes of all segments."""

    @property
    def used(self) -> int:
        """Bytes of allocated blocks, including alignment."""
        return sum(segment.blocks.used for segment in self._segments.values())

    @property
    def segments(self) -> list[Segment]:
        return list(self._segments.values())

    def owns(self, segment: int) -> bool:
        return segment in self._segments

    @property
    def cold_bytes(self) -> int:
        """Bytes in segments for which no memory is reserved yet."""
        return sum([segment.cold.bytes for segment in self._segments.values() if segment.cold is not None])

    def allocate(self, size: int, *, cold: bool = False) -> Block:
        """Allocates an aligned block of `size` bytes. With `cold`, its bytes must be warmed before use. Raises
        Unavailable if the limit is reached or the machine has no memory left."""
        recent = self._recent
        offset = None if recent is None else recent.blocks.allocate(size)
        block = self._allocate_elsewhere(size) if recent is None or offset is None else Block(recent, offset, size)
        if not cold and block.home.cold is not None:
            try:
                self.warm(block.home.id, block.offset, block.offset + size)
            except BaseException:
                self.free(block.home.id, block.offset)
                raise
        return block

    def warm(self, segment: int, begin: int, end: int) -> None:
        """Reserves and touches bytes of a block, so that they can be used. Raises Unavailable if the machine has no
        memory for them."""
        home = self._segments[segment]
        if home.cold is not None:
            home.cold.warm(begin, end)
            if not home.cold.bytes:
                home.cold = None

    def _allocate_elsewhere(self, size: int) -> Block:
        if self._closed:
            raise Unavailable("the arena is closed")
        if size < 0:
            raise InvalidRequest(f"invalid block size: {size} bytes")
        for segment in self._segments.values():
            if segment is self._recent or segment.blocks.free_bytes < size:
                continue
            offset = segment.blocks.allocate(size)
            if offset is not None:
                self._recent = segment
                return Block(segment, offset, size)
        segment = self._recent = self._grow(size)
        offset = segment.blocks.allocate(size)
        if offset is None:
            raise Internal(f"a new segment of {segment.size} bytes has no room for {size}")
        return Block(segment, offset, size)

    def split(self, block: Block, sizes: Sequence[int]) -> list[Block]:
        """Splits a block into adjacent blocks that are freed separately; `block` becomes invalid. Remaining bytes
        belong to the last block. A size of 0 gets a block elsewhere, because each block needs a distinct offset."""
        home = block.home
        if home.blocks.size_of(block.offset) < sum(sizes) or (sizes and min(sizes) < 0):
            raise InvalidRequest(f"a block of {block.size} bytes cannot be split into {list(sizes)}")
        if all(sizes):
            offsets = home.blocks.split(block.offset, sizes)
            return [Block(home, offset, size) for offset, size in zip(offsets, sizes, strict=True)]
        empty: list[Block] = []
        filled: list[Block] = []
        try:
            for size in sizes:
                if not size:
                    empty.append(self.allocate(0))
            solid = [size for size in sizes if size]
            if solid:
                filled = self.split(block, solid)
            else:
                self.free(block.home.id, block.offset)
        except BaseException:
            for unused in empty:
                self.free(unused.home.id, unused.offset)
            raise
        pieces, blanks = iter(filled), iter(empty)
        return [next(pieces) if size else next(blanks) for size in sizes]

    def memory(self, handle: Handle) -> memoryview:
        """Returns the bytes of an allocated block, or of a part of one."""
        return self._segments[handle.segment].memory[handle.offset : handle.offset + handle.size]

    def free(self, segment: int, offset: int, size: int | None = None) -> None:
        """Frees a block. `size`, from a returned handle, must not exceed the size of the block."""
        home = self._segments.get(segment)
        if home is None:
            raise InvalidRequest(f"segment {segment} does not belong to this arena")
        if size is not None:
            whole = home.blocks.size_of(offset)
            if not 0 <= size <= whole:
                raise InvalidRequest(f"the block at offset {offset} has {whole} bytes, but {size} were returned")
        home.blocks.free(offset)
        self._recent = home

    def locate(self, address: int, nbytes: int) -> tuple[int, int] | None:
        """Returns (segment, offset) if these bytes lie within one segment."""
        for segment in self._segments.values():
            offset = address - segment.address
            if offset >= 0 and nbytes >= 0 and offset + nbytes <= segment.size:
                return segment.id, offset
        return None

    # ------------------------------------------------------------------------------------ segments

    def _grow(self, size: int) -> Segment:
        page = mmap.PAGESIZE
        needed = max(page, -(-size // page) * page)
        if self.committed + needed > self._limit and self._withdraw is not None:
            for number in self.trim():
                self._withdraw(number)
        available = self._limit - self.committed
        if needed > available:
            raise Unavailable(
                f"no room for {size} bytes of {self._what}: {self.used} bytes are in use and {self.committed} of "
                f"{self._limit} committed; raise {self._setting}, or drop results that are no longer needed"
            )
        step = min(self._segment_bytes, max(FIRST_BYTES, self.committed))
        size = min(max(step, needed), available // page * page)
        try:
            extent = self._make(size)
        except Unavailable:
            if size == needed:
                raise
            extent = self._make(needed)  # memory is nearly exhausted: take only what is needed
        segment = Segment((self._owner << OWNER_SHIFT) | next(self._numbers), extent)
        if self._announce is not None:
            try:
                self._announce(segment)
            except BaseException:
                extent.close()
                raise
        self._segments[segment.id] = segment
        self.committed += segment.size
        return segment

    def _release_segment(self, segment: Segment) -> None:
        del self._segments[segment.id]
        self.committed -= segment.size
        if segment is self._recent:
            self._recent = None
        segment.extent.close()

    def trim(self) -> list[int]:
        """Frees the segments without allocated blocks. Returns their ids, for Unmap."""
        return self._release_all([segment for segment in self._segments.values() if not segment.blocks.used])

    def trim_idle(self) -> list[int]:
        """Like `trim`, for segments that were also empty at the previous call, except for the one that was used last
        since then. Called every few seconds, it frees idle memory without a time stamp for each allocation."""
        empty = [segment for segment in self._segments.values() if not segment.blocks.used]
        gone = [segment for segment in empty if segment.id in self._idle and segment is not self._recent]
        self._idle = {segment.id for segment in empty}
        if self._recent in empty:
            self._recent = None  # until it is used again
        return self._release_all(gone)

    def _release_all(self, segments: list[Segment]) -> list[int]:
        for segment in segments:
            self._release_segment(segment)
        return [segment.id for segment in segments]

    def renumber(self, owner: int) -> None:
        """Changes the owner's number after a reconnect: each segment gets a new id and is announced again. Blocks stay
        valid and use the new id."""
        self._owner = owner
        segments = self.segments
        self._segments = {}
        for segment in segments:
            segment.id = (owner << OWNER_SHIFT) | next(self._numbers)
            self._segments[segment.id] = segment
        if self._announce is not None:
            for segment in segments:
                self._announce(segment)

    def close(self) -> None:
        """Gives up all segments. Arrays stay valid, because their pages stay mapped. Idempotent."""
        self._closed = True
        for segment in self.segments:
            self._release_segment(segment)
