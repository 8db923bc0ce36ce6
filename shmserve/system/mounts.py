"""Determines the file system of a file."""

from __future__ import annotations

import ctypes
import os

_TMPFS_MAGIC = 0x01021994
_fstatfs = ctypes.CDLL(None, use_errno=True).fstatfs
_fstatfs.argtypes = [ctypes.c_int, ctypes.c_void_p]


def is_tmpfs(fd: int) -> bool:
    """Whether the file is on tmpfs. True for a memfd, but false for a memfd with huge pages."""
    answer = (ctypes.c_long * 32)()
    if _fstatfs(fd, answer) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return answer[0] == _TMPFS_MAGIC
