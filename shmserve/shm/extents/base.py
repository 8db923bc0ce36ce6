"""The interface and common code of extents: ranges of memory that processes can share. Invariant: an extent never
moves, grows or shrinks, and closing it never unmaps pages that a view uses.

Each kind has a module: memfd (shared by descriptor), posix (shared by name), cuda (GPU memory).
"""

from __future__ import annotations

import errno
import os
import re
import sys
from contextlib import suppress
from typing import Protocol

import numpy as np

from shmserve.errors import Internal, Unavailable
from shmserve.shm import views
from shmserve.shm.pages import Pages

ALIGN = 64
_BYTE = np.dtype("uint8")
_AVAILABLE = re.compile(rb"^MemAvailable: +(\d+) kB$", re.MULTILINE)
_GROUP = re.compile(rb"^0::(/.*)$", re.MULTILINE)
_SIZES = re.compile(rb"^(file|shmem) (\d+)$", re.MULTILINE)
"""The page cache of a control group, including shared memory, and the shared memory."""


class Extent(Protocol):
    """`fd` is -1 without a descriptor, and `name` is None without a name. `cold`: its pages must be warmed before use.
    `align`: alignment of the blocks in it."""

    kind: str
    name: str | None
    fd: int
    size: int
    cold: bool
    align: int

    @property
    def memory(self) -> memoryview: ...

    @property
    def address(self) -> int: ...

    @property
    def pages(self) -> Pages: ...

    def close(self) -> None:
        """Closes the descriptor; in the creator, also removes the name. Pages stay mapped for views. Idempotent."""


STEP_BYTES = 256 * 1024
"""Step in which cold pages are reserved and touched, which takes 0.2 to 0.4 ms."""


class Cold:
    """Tracks which steps of an extent are neither reserved nor touched."""

    __slots__ = ("_done", "_extent", "bytes")

    def __init__(self, extent: Extent) -> None:
        self._extent = extent
        self._done = bytearray(-(-extent.size // STEP_BYTES))
        self.bytes = extent.size

    def warm(self, begin: int, end: int) -> None:
        """Reserves and touches these bytes. Raises Unavailable if the machine has no memory for them."""
        done, extent = self._done, self._extent
        last = -(-end // STEP_BYTES)
        at = done.find(0, begin // STEP_BYTES, last)
        while at >= 0:
            until = done.find(1, at, last)
            if until < 0:
                until = last
            first, behind = at * STEP_BYTES, min(until * STEP_BYTES, extent.size)
            fill(extent.fd, first, behind - first)
            extent.pages.warm(first, behind)
            done[at:until] = bytes([1]) * (until - at)
            self.bytes -= behind - first
            at = done.find(0, until, last)


class MappedExtent:
    """Common code of extents that are mapped on the host."""

    kind = "?"
    align = ALIGN

    def __init__(self, pages: Pages, *, fd: int = -1, name: str | None = None, cold: bool = False) -> None:
        self._pages: Pages | None = pages
        self.fd = fd
        self.name = name
        self.size = pages.size
        self.cold = cold

    @property
    def pages(self) -> Pages:
        if self._pages is None:
            raise Internal(f"a closed {self.kind} extent was used")
        return self._pages

    @property
    def address(self) -> int:
        return self.pages.address

    @property
    def memory(self) -> memoryview:
        pages = self.pages
        return views.make(pages, pages.address, _BYTE, (pages.size,), pages.writable).data

    def close(self) -> None:
        self._pages = None
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


_REASONS = {
    errno.ENOSPC: "the file system of shared memory is full",
    errno.EDQUOT: "the quota of shared memory is exhausted",
    errno.EFBIG: "the size exceeds the process's file size limit (ulimit -f)",
    errno.ENOMEM: "the machine or its control group has no memory left",
}


def reserve(fd: int, size: int) -> None:
    """Sizes the object behind `fd` and allocates its pages, so that no later access can fail. Raises Unavailable."""
    resize(fd, size)
    fill(fd, 0, size)


def resize(fd: int, size: int, promised: int = 0) -> None:
    """Sizes the object behind `fd`. `promised`: bytes of other extents that are not reserved yet."""
    _check_room(size + promised)
    try:
        os.ftruncate(fd, size)
    except (OSError, OverflowError) as error:
        raise failed("reserve", size, error, fd) from error


def fill(fd: int, begin: int, size: int) -> None:
    try:
        os.posix_fallocate(fd, begin, size)
    except (OSError, OverflowError) as error:
        raise failed("reserve", size, error, fd) from error


def _check_room(size: int) -> None:
    """Raises Unavailable if less memory is available. The kernel would not report this: it commits pages of a memfd one
    by one, then kills processes, possibly other ones."""
    room = _available()
    if size > room:
        raise Unavailable(
            f"cannot reserve {size} bytes of shared memory: the machine, or the control group, has {room} bytes left"
        )


def _available() -> int:
    with open("/proc/meminfo", "rb") as file:
        match = _AVAILABLE.search(file.read())
    if match is None:
        raise Internal("/proc/meminfo does not contain MemAvailable")
    room = int(match[1]) * 1024
    with open("/proc/self/cgroup", "rb") as file:
        group = _GROUP.search(file.read())
    return room if group is None else min(room, group_room("/sys/fs/cgroup", os.fsdecode(group[1])))


def group_room(root: str, group: str) -> int:
    """The bytes that a control group, and all groups above it, leave of their limits. Page cache does not count as
    used, because the kernel frees it before it kills a process."""
    room, folder = sys.maxsize, root + group.rstrip("/")
    while True:
        # The root group has no limit, and groups above the namespace are not visible.
        with suppress(OSError):
            limit = _read(folder, "memory.max").strip()
            if limit.isdigit():
                sizes = dict(_SIZES.findall(_read(folder, "memory.stat")))
                cache = int(sizes[b"file"]) - int(sizes[b"shmem"])
                room = min(room, max(int(limit) - int(_read(folder, "memory.current")) + cache, 0))
        if folder == root:
            return room
        folder = os.path.dirname(folder)


def _read(folder: str, name: str) -> bytes:
    with open(f"{folder}/{name}", "rb") as file:
        return file.read()


def failed(doing: str, size: int, error: OSError | OverflowError, fd: int = -1) -> Unavailable:
    """Returns the error for a failed operation on shared memory, with sizes and advice."""
    number = error.errno if isinstance(error, OSError) else errno.EFBIG
    reason = _REASONS.get(number or 0) or str(error.strerror if isinstance(error, OSError) else error)
    if number == errno.ENOSPC and fd >= 0:
        status = os.fstatvfs(fd)
        free, total = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
        reason += f": {free} of {total} bytes free (its mount option `size`, or --shm-size of a container)"
    return Unavailable(f"cannot {doing} {size} bytes of shared memory: {reason}")
