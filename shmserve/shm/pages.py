"""Mapped pages of segments. Invariant: pages stay mapped exactly as long as a reference to them exists.

Python's mmap object is not used, because it keeps a duplicate of the descriptor as long as a view exists.
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
    """`size` bytes mapped at `address` until the last reference is dropped. Each view keeps a reference. `release`
    then gets the address and the size."""

    __slots__ = ("_before_unmap", "_release", "address", "size", "writable")

    def __init__(
        self, address: int, size: int, writable: bool, release: Callable[[int, int], object] = _munmap
    ) -> None:
        self._release = release
        self.address = address
        self.size = size
        self.writable = writable
        self._before_unmap: Callable[[Pages], object] | None = None

    def __del__(self) -> None:
        try:
            if self._before_unmap is not None:
                self._before_unmap(self)
        finally:
            self._release(self.address, self.size)

    def on_unmap(self, call: Callable[[Pages], object]) -> None:
        """Calls `call` before the pages are unmapped, for code that registers them with a device."""
        self._before_unmap = call

    def warm(self, begin: int = 0, end: int | None = None) -> None:
        """Touches each page once for writing. Only the creator may call this, before other processes write to these
        pages."""
        size = (self.size if end is None else end) - begin
        if _madvise(self.address + begin, size, _MADV_POPULATE_WRITE) == 0:
            return
        number = ctypes.get_errno()
        if number != errno.EINVAL:
            raise Unavailable(f"no memory for {size} bytes: {os.strerror(number)}")
        # Kernels before 5.14 do not support this advice.
        for page in range(self.address + begin, self.address + begin + size, constants.PAGESIZE):
            byte = ctypes.c_ubyte.from_address(page)
            byte.value = byte.value

    def writable_alias(self) -> Pages | None:
        """Maps the same memory again for writing; None if the memory does not allow this.

        mremap with an old size of 0 creates a second mapping of the pages of a shared mapping, without a descriptor.
        """
        address = _mremap(self.address, 0, self.size, _MREMAP_MAYMOVE)
        if address == _FAILED:
            raise Unavailable(f"cannot map {self.size} bytes again: {os.strerror(ctypes.get_errno())}")
        pages = Pages(address, self.size, True)
        return pages if _mprotect(address, self.size, _READ_WRITE) == 0 else None


def map_shared(fd: int, size: int, writable: bool) -> Pages:
    """Maps the first `size` bytes of `fd`; the descriptor may be closed afterwards. Raises mmap's OSError."""
    address = _mmap(None, size, _READ_WRITE if writable else _READ, constants.MAP_SHARED, fd, 0)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot map {size} bytes: {os.strerror(number)}")
    return Pages(address, size, writable)
