"""An offset allocator. It computes with numbers only and does not access memory.

A freed block is first kept unmerged, in a stack per size: the next request of that size gets the block that was freed
last, whose pages are warm. If no block fits, or many have accumulated, these blocks are settled, that is, merged with
their free neighbours into extents. Allocation from extents is best fit, at the lowest offset of the extent.

Pieces of a split block may start and end anywhere. They are settled when they are freed, so that the whole block is
free again when its last piece is freed. A free extent shorter than one aligned unit stays unused until it is merged
with a neighbour.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from shmserve.errors import Internal, InvalidRequest

RECENT_BLOCKS = 256
"""Maximum number of freed blocks that are kept unmerged; beyond it, all of them are settled."""


class Blocks:
    """Blocks within [0, size). Offsets of new blocks and their sizes are multiples of `align`, a power of two."""

    __slots__ = ("_ends", "_fits", "_free", "_live", "_mask", "_pieces", "_recent", "_recent_count", "size", "used")

    def __init__(self, size: int, align: int = 64) -> None:
        if size <= 0 or align <= 0 or align & (align - 1):
            raise Internal(f"blocks need a size above 0 and a power of two as alignment, not {size} and {align}")
        self.size = size
        self.used = 0
        self._mask = align - 1
        self._live: dict[int, int] = {}  # offset -> size of allocated blocks
        self._pieces: set[int] = set()  # offsets in _live that came from a split
        self._recent: dict[int, list[int]] = {}  # size -> offsets freed and not settled, latest last
        self._recent_count = 0
        self._free: dict[int, int] = {}  # start -> end of each free extent
        self._ends: dict[int, int] = {}  # end -> start of each free extent
        self._fits: list[tuple[int, int]] = []  # (aligned bytes, start) of free extents that can hold a block, sorted
        self._add_free(0, size)

    @property
    def free_bytes(self) -> int:
        return self.size - self.used

    def allocate(self, size: int) -> int | None:
        """Returns the offset of a new block of at least `size` bytes, or None if none fits. 0 bytes take one unit."""
        if size < 0:
            raise InvalidRequest(f"invalid block size: {size} bytes")
        mask = self._mask
        size = (size + mask) & ~mask or mask + 1
        stack = self._recent.get(size)
        if stack:
            offset = stack.pop()
            self._recent_count -= 1
        else:
            place = self._carve(size)
            if place is None:
                return None
            offset = place
        self._live[offset] = size
        self.used += size
        return offset

    def free(self, offset: int) -> int:
        """Frees a block or piece and returns its size."""
        size = self._live.pop(offset, 0)
        if not size:
            raise InvalidRequest(f"no block is held at offset {offset}: it was returned twice, or never allocated")
        self.used -= size
        if offset in self._pieces:
            self._pieces.remove(offset)
            self._release(offset, offset + size)
            return size
        stack = self._recent.get(size)
        if stack is None:
            if len(self._recent) >= RECENT_BLOCKS:
                self._settle()
            self._recent[size] = [offset]
        else:
            stack.append(offset)
        self._recent_count += 1
        if self._recent_count > RECENT_BLOCKS:
            self._settle()
        return size

    def split(self, offset: int, sizes: Sequence[int]) -> list[int]:
        """Splits a block into adjacent pieces that are freed separately. Remaining bytes belong to the last piece.

        Each size must be above 0, because the offset identifies a piece.
        """
        whole = self._live.get(offset)
        if whole is None:
            raise InvalidRequest(f"no block is held at offset {offset}, so it cannot be split")
        if not sizes or min(sizes) <= 0 or sum(sizes) > whole:
            raise InvalidRequest(
                f"a block of {whole} bytes cannot be split into {len(sizes)} pieces of {sum(sizes)} bytes in all"
                f"{', the smallest ' + str(min(sizes)) if sizes else ''}; each needs at least 1"
            )
        live, start = self._live, offset
        offsets = []
        for size in sizes:
            live[start] = size
            offsets.append(start)
            start += size
        live[offsets[-1]] += offset + whole - start
        self._pieces.update(offsets)
        return offsets

    def size_of(self, offset: int) -> int:
        size = self._live.get(offset)
        if size is None:
            raise InvalidRequest(f"no block is held at offset {offset}")
        return size

    # ------------------------------------------------------------------------------------ free extents

    def _carve(self, size: int) -> int | None:
        fits = self._fits
        at = bisect_left(fits, (size, -1))
        if at == len(fits):
            if not self._recent_count:
                return None
            self._settle()
            at = bisect_left(fits, (size, -1))
            if at == len(fits):
                return None
        start = fits.pop(at)[1]
        end = self._free.pop(start)
        del self._ends[end]
        offset = (start + self._mask) & ~self._mask
        if offset > start:
            self._add_free(start, offset)
        if offset + size < end:
            self._add_free(offset + size, end)
        return offset

    def _settle(self) -> None:
        if not self._recent_count:
            self._recent.clear()
            return
        for size, stack in self._recent.items():
            for offset in stack:
                self._release(offset, offset + size)
        self._recent.clear()
        self._recent_count = 0

    def _release(self, start: int, end: int) -> None:
        """Adds the free extent [start, end), merged with its free neighbours."""
        after = self._free.get(end)
        if after is not None:
            self._drop_free(end, after)
            end = after
        before = self._ends.get(start)
        if before is not None:
            self._drop_free(before, start)
            start = before
        self._add_free(start, end)

    def _add_free(self, start: int, end: int) -> None:
        self._free[start] = end
        self._ends[end] = start
        room = end - ((start + self._mask) & ~self._mask)
        if room > self._mask:
            insort(self._fits, (room, start))

    def _drop_free(self, start: int, end: int) -> None:
        del self._free[start]
        del self._ends[end]
        room = end - ((start + self._mask) & ~self._mask)
        if room > self._mask:
            del self._fits[bisect_left(self._fits, (room, start))]
