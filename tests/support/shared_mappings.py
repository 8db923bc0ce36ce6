"""This process's mappings of shared memory: of memfds, and of files in /dev/shm."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MAPS = Path("/proc/self/maps")
SHARED = re.compile(rb"/(?:memfd:|dev/shm/)")
LINE = re.compile(rb"^([0-9a-f]+)-\S+ \S+ \S+ \S+ ([0-9]+) +(/(?:memfd:|dev/shm/).*)$", re.MULTILINE)
NAME_BYTES = 4096


class Mapping(NamedTuple):
    start: int
    inode: int
    path: str


class _Query(ctypes.Structure):
    """struct procmap_query of <linux/fs.h>."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("size", "query_flags", "query_addr", "vma_start", "vma_end")),
        *((name, ctypes.c_uint64) for name in ("vma_flags", "vma_page_size", "vma_offset", "inode")),
        *((name, ctypes.c_uint32) for name in ("dev_major", "dev_minor", "vma_name_size", "build_id_size")),
        *((name, ctypes.c_uint64) for name in ("vma_name_addr", "build_id_addr")),
    )


_PROCMAP_QUERY = 0xC0686611
"""_IOWR('f', 17, struct procmap_query)"""
_NEXT_SHARED_FILE = 0x10 | 0x20 | 0x08
"""PROCMAP_QUERY_COVERING_OR_NEXT_VMA, PROCMAP_QUERY_FILE_BACKED_VMA, PROCMAP_QUERY_VMA_SHARED"""


def listed() -> Iterator[Mapping]:
    """Reads the text of /proc/self/maps, which has a thousand lines with the libraries that tests import."""
    text = MAPS.read_bytes()
    for start, inode, path in LINE.findall(text) if SHARED.search(text) else ():
        yield Mapping(int(start, 16), int(inode), path.decode(errors="replace"))


def queried() -> Iterator[Mapping]:
    """The same with a kernel query for shared mappings only, in a hundredth of the time.

    Raises OSError if the kernel is older than 6.11. A private mapping of a memfd is not found."""
    name = ctypes.create_string_buffer(NAME_BYTES)
    query = _Query(size=ctypes.sizeof(_Query), query_flags=_NEXT_SHARED_FILE, vma_name_addr=ctypes.addressof(name))
    with MAPS.open("rb", 0) as file:
        while True:
            query.vma_name_size = NAME_BYTES
            try:
                fcntl.ioctl(file, _PROCMAP_QUERY, query)
            except OSError as error:
                if error.errno == errno.ENOENT:  # no more mappings
                    return
                raise
            if SHARED.match(name.value):
                yield Mapping(query.vma_start, query.inode, name.value.decode(errors="replace"))
            query.query_addr = query.vma_end


def _is_supported() -> bool:
    try:
        list(queried())
    except OSError:
        return False
    return True


shared_mappings = queried if _is_supported() else listed
