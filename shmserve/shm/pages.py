"""Mapped pages: the one place that calls mmap. The rule of the file: pages stay mapped as long as anything refers to
them, and no longer.

Python's own mmap object is not used, as it keeps a duplicate of the descriptor for as long as a view lives.
"""

from __future__ import annotations

import ctypes
import errno
import mmap as constants
import os
from collections.abc import Callable

from shmserve.errors import Unavailable

_MADV_POPULATE_WRITE = 23
_MREMAP_MAYMOVE = 1
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_munmap = _libc.munmap
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_mremap = _libc.mremap
_mremap.restype = ctypes.c_void_p
_mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
_mprotect = _libc.mprotect
_mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_madvise = _libc.madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_READ = constants.PROT_READ
_READ_WRITE = constants.PROT_READ | constants.PROT_WRITE


class Pages:
    """`size` bytes mapped at `address` until the last reference goes. Whoever makes a view of them refers to this."""

    __slots__ = ("address", "before_unmap", "size", "writable")

    def __init__(self, address: int, size: int, writable: bool) -> None:
        self.address = address
        self.size = size
        self.writable = writable
        self.before_unmap: Callable[[Pages], object] | None = None
        """For whoever has told a device of them."""

    def __del__(self, munmap: Callable[[int, int], int] = _munmap) -> None:
        try:
            if self.before_unmap is not None:
                self.before_unmap(self)
        finally:
            munmap(self.address, self.size)

    def warm(self, begin: int = 0, end: int | None = None) -> None:
        """Touches every page once for writing. Only for the maker, before anyone else writes to these pages."""
        size = (self.size if end is None else end) - begin
        if _madvise(self.address + begin, size, _MADV_POPULATE_WRITE) == 0:
            return
        number = ctypes.get_errno()
        if number != errno.EINVAL:
            raise Unavailable(f"no memory for {size} bytes: {os.strerror(number)}")
        # A kernel before 5.14 does not know the advice.
        for page in range(self.address + begin, self.address + begin + size, constants.PAGESIZE):
            byte = ctypes.c_ubyte.from_address(page)
            byte.value = byte.value

    def writable_twin(self) -> Pages | None:
        """The same memory mapped once more, for writing; None where the memory does not allow it.

        Moving zero bytes of a shared mapping makes a second mapping of the same pages: no descriptor is needed.
        """
        address = _mremap(self.address, 0, self.size, _MREMAP_MAYMOVE)
        if address == _FAILED:
            raise Unavailable(f"cannot map {self.size} bytes once more: {os.strerror(ctypes.get_errno())}")
        twin = Pages(address, self.size, True)
        return twin if _mprotect(address, self.size, _READ_WRITE) == 0 else None


def map_shared(fd: int, size: int, writable: bool) -> Pages:
    """Maps the first `size` bytes of `fd`; the descriptor may be closed afterwards. OSError as mmap gives it."""
    return _map(fd, size, writable, constants.MAP_SHARED)


def map_private(size: int) -> Pages:
    """Zeroed memory of this process and nobody else."""
    return _map(-1, size, True, constants.MAP_SHARED | constants.MAP_ANONYMOUS)


def _map(fd: int, size: int, writable: bool, flags: int) -> Pages:
    address = _mmap(None, size, _READ_WRITE if writable else _READ, flags, fd, 0)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot map {size} bytes: {os.strerror(number)}")
    return Pages(address, size, writable)
