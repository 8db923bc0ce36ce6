"""Extents that are shared by descriptor. They have no name, so a crash leaves nothing behind. Invariant: a sealed
extent cannot be truncated while it is read, and an unsealed one is not mapped."""

from __future__ import annotations

import errno
import fcntl
import os
import stat

from shmserve.errors import Internal, InvalidRequest, Unavailable
from shmserve.shm.extents.base import MappedExtent, failed, reserve, resize
from shmserve.shm.pages import map_shared
from shmserve.system.files import is_tmpfs

SEAL_FUTURE_WRITE = 0x10
"""Existing mappings may write, new ones may not (since Linux 5.1). Python's standard library has no constant for it."""
_FIXED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_NOEXEC_SEAL = 0x8


class MemfdExtent(MappedExtent):
    kind = "memfd"


def create(size: int, seal_future_write: bool = False, promised: int | None = None) -> MemfdExtent:
    """Creates a sealed extent. With `seal_future_write`, no further mapping can be writable. With `promised`, the cold
    bytes of other extents, its pages must be warmed before use."""
    if size <= 0:
        raise Internal(f"invalid extent size: {size} bytes")
    fd = _open()
    try:
        if promised is None:
            reserve(fd, size)
        else:
            resize(fd, size, promised)
        pages = map_shared(fd, size, writable=True)
        if promised is None:
            pages.warm()
        seals = _FIXED | fcntl.F_SEAL_SEAL | (SEAL_FUTURE_WRITE if seal_future_write else 0)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except BaseException as error:
        os.close(fd)
        if isinstance(error, OSError):
            raise failed("make", size, error) from error
        raise
    return MemfdExtent(pages, fd=fd, cold=promised is not None)


def attach(fd: int, size: int, writable: bool) -> MemfdExtent:
    """Maps an extent of another process. Takes ownership of the descriptor, and closes it on errors."""
    try:
        verify(fd, size)
        pages = map_shared(fd, size, writable)
    except BaseException as error:
        if not isinstance(error, OSError):
            os.close(fd)
            raise
        if error.errno != errno.EBADF:
            os.close(fd)
        if error.errno == errno.EPERM and writable:
            raise InvalidRequest("the segment is sealed against writing: only its owner can write it") from error
        raise failed("map", size, error) from error
    return MemfdExtent(pages, fd=fd)


def verify(fd: int, size: int) -> None:
    """Raises InvalidRequest unless `fd` is a memfd of exactly `size` bytes that can no longer be truncated."""
    status = os.fstat(fd)
    # Refuse huge pages, as accesses can fail even though the size is sealed.
    if not stat.S_ISREG(status.st_mode) or not is_tmpfs(fd):
        raise InvalidRequest("the descriptor of a segment must be a memfd")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise InvalidRequest("the descriptor of a segment must be a memfd; this one cannot be sealed") from error
    if seals & _FIXED != _FIXED:
        missing = [
            name
            for name, seal in (("F_SEAL_SHRINK", fcntl.F_SEAL_SHRINK), ("F_SEAL_GROW", fcntl.F_SEAL_GROW))
            if not seals & seal
        ]
        raise InvalidRequest(f"the memfd of a segment must be sealed against resizing; it lacks {', '.join(missing)}")
    if status.st_size != size or size <= 0:
        raise InvalidRequest(f"the segment was announced with {size} bytes, but its memfd has {status.st_size}")


def _open() -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create("shmserve", flags | _NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:  # kernels before 6.3 do not support the flag
            raise Unavailable(f"cannot create shared memory: {error.strerror}") from error
    try:
        return os.memfd_create("shmserve", flags)
    except OSError as error:
        raise Unavailable(f"cannot create shared memory: {error.strerror}") from error
