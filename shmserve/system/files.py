"""Files: whether they are in memory, and writing them so that they appear complete or not at all."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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


@contextmanager
def new_file(path: Path, mode: int = 0o600) -> Iterator[Path]:
    """A temporary file next to `path`, which replaces it if the block succeeds."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(descriptor)
    part = Path(name)
    try:
        yield part
        part.chmod(mode)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
