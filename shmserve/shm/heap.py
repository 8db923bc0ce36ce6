"""Extents of private memory, for tests of what stands on extents. The rule of the file: nobody else can map them."""

from __future__ import annotations

from shmserve.errors import Unavailable
from shmserve.shm.extents import MappedExtent
from shmserve.shm.pages import map_private


class HeapExtent(MappedExtent):
    kind = "heap"


def create(size: int) -> HeapExtent:
    try:
        pages = map_private(size)
    except OSError as error:
        raise Unavailable(f"cannot reserve {size} bytes: {error.strerror}") from error
    return HeapExtent(pages)
