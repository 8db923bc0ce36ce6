"""Extents of private memory, for tests of code that uses extents. Other processes cannot map them."""

from __future__ import annotations

from shmserve.errors import Internal
from shmserve.shm.extents.base import MappedExtent, check_room, failed
from shmserve.shm.pages import map_private


class HeapExtent(MappedExtent):
    kind = "heap"


def create(size: int) -> HeapExtent:
    if size <= 0:
        raise Internal(f"invalid extent size: {size} bytes")
    check_room(size)
    try:
        pages = map_private(size)
    except (OSError, OverflowError) as error:
        raise failed("make", size, error) from error
    pages.warm()
    return HeapExtent(pages)
