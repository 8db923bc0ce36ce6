"""Moves memory that a process keeps to huge pages.

A model whose weights lie on small pages reads thousands of them in each run, which evicts the translations of all other
memory from the processor. By itself, the kernel uses huge pages only for memory for which a library asks for them.
"""

from __future__ import annotations

import ctypes
import errno
import os
from array import array
from collections.abc import Iterator
from pathlib import Path

from shmserve.system.procfs import PAGE, written_bytes

SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
COLLAPSE = 25
"""MADV_COLLAPSE, since Linux 6.1."""
LEAST_BYTES = 8 << 20
"""A process that keeps less gains less than reading the list of its memory costs: 170 KiB that it keeps."""
_KEPT = 1 << 63 | 1 << 56
"""Flags of /proc/self/pagemap: the page is in memory, and belongs to this process alone."""
_library = ctypes.CDLL(None, use_errno=True)


def use_huge_pages(limit: int) -> int:
    """Moves private memory of this process, up to `limit` bytes. Takes no memory: leaves out what is not in use, or is
    shared with a process that was forked. Returns the bytes that are on huge pages; 0 if the kernel cannot do this, or
    the administrator has disabled it."""
    moved = 0
    try:
        size = int((SETTINGS / "hpage_pmd_size").read_text())
        if "[never]" in (SETTINGS / "enabled").read_text() or written_bytes(os.getpid()) < LEAST_BYTES:
            return 0
        for address in _kept(size):
            if moved + size > limit:
                break
            if not _library.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), COLLAPSE):
                moved += size
            elif ctypes.get_errno() != errno.EINVAL:  # EINVAL: this memory was excluded; otherwise there is no room
                break
    except OSError:  # no huge pages, or /proc is not readable
        return 0
    return moved


def _kept(size: int) -> Iterator[int]:
    """The addresses of ranges of this size of which the process keeps all pages, and shares none."""
    with open("/proc/self/pagemap", "rb", buffering=0) as pages:
        for begin, end in _used():
            for address in range(-(-begin // size) * size, end - size + 1, size):
                entries = array("Q", os.pread(pages.fileno(), size // PAGE * 8, address // PAGE * 8))
                if all(entry & _KEPT == _KEPT for entry in entries):
                    yield address


def _used() -> list[tuple[int, int]]:
    """The private memory of which at least half is in use: some libraries reserve terabytes that they hardly use."""
    used = []
    begin, end, private = 0, 0, False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            name, *values = line.split()
            if not name.endswith(":"):
                access, _, _, inode, *_ = values
                private = inode == "0" and access == "rw-p"
                begin, end = (int(text, 16) for text in name.split("-"))
            elif name == "Rss:" and private and int(values[0]) << 10 >= (end - begin) // 2:
                used.append((begin, end))
    return used
