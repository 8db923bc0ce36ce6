"""Memory that moves to huge pages."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.system.huge_pages import supported

PROGRAM = """\
import mmap, os, re
from pathlib import Path
from shmserve.system.huge_pages import use_huge_pages

MIB = 1 << 20

def mapped(pages):
    memory = mmap.mmap(-1, 12 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for at in range(0, 12 * MIB, pages * 4096):
        memory[at] = 1
    return memory

def huge():
    return int(re.search("AnonHugePages: *([0-9]+)", Path("/proc/self/smaps_rollup").read_text())[1]) // 1024

before = use_huge_pages(1 << 40)
sparse = mapped(2)
print(use_huge_pages(1 << 40) - before)
kept = mapped(1)
excluded = mapped(1)
excluded.madvise(mmap.MADV_NOHUGEPAGE)
reader, writer = os.pipe()
child = os.fork()
if not child:
    os.close(writer)
    os.read(reader, 1)
    os._exit(0)
print(use_huge_pages(1 << 40) - before)
os.close(writer)
os.waitpid(child, 0)
print(use_huge_pages(before + 4 * MIB) - before, huge() * MIB - before)
print(use_huge_pages(1 << 40) - before >= 8 * MIB, all(kept[at] for at in range(0, 12 * MIB, 4096)))
"""

RESERVING = """\
import ctypes, os
from shmserve.system import huge_pages

MAP_PRIVATE, MAP_ANONYMOUS, MAP_NORESERVE = 0x2, 0x20, 0x4000
read, reads = os.pread, []

def counted(*arguments):
    reads.append(arguments)
    return read(*arguments)

huge_pages.os.pread = counted
library = ctypes.CDLL(None)
library.mmap.restype = ctypes.c_void_p
size = ctypes.c_size_t(1 << 40)
address = library.mmap(None, size, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, ctypes.c_long(0))
ctypes.memset(address, 1, 1 << 20)
kept = b"x" * (16 << 20)
huge_pages.use_huge_pages(1 << 40)
print(address != ctypes.c_void_p(-1).value, 0 < len(reads) < 1000)
"""


def test_only_memory_that_is_in_use_and_neither_shared_nor_excluded_moves() -> None:
    if not supported():
        pytest.skip("no transparent huge pages, or Linux before 6.1")
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "0", str(4 << 20), str(4 << 20), "True", "True"]


def test_memory_that_is_reserved_but_hardly_used_is_not_searched() -> None:
    """The shadow memory of a sanitizer is 14 TiB: searching it took half a minute."""
    if not supported():
        pytest.skip("no transparent huge pages, or Linux before 6.1")
    done = subprocess.run([sys.executable, "-c", RESERVING], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]
