"""Memory of a fake GPU, and the work that waits in its streams."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

_GUARD = 4096


class ByteRange(NamedTuple):
    start: int
    end: int

    def meets(self, other: ByteRange) -> bool:
        return self.start < other.end and other.start < self.end


class FakeMemory:
    """Bytes of the device, mapped at one address. Another process maps the same bytes at another address."""

    def __init__(self, size: int, descriptor: int = -1) -> None:
        if descriptor < 0:
            descriptor = os.memfd_create("fake-gpu")
            os.ftruncate(descriptor, size + _GUARD)
        self.size = size
        self.descriptor = descriptor
        self._pages = mmap.mmap(descriptor, size + _GUARD)
        self._view = (ctypes.c_char * (size + _GUARD)).from_buffer(self._pages)
        self.address = ctypes.addressof(self._view)
        self.users = 0
        """Other processes that have it open."""

    @property
    def range(self) -> ByteRange:
        return ByteRange(self.address, self.address + self.size)

    def fill(self, value: int) -> None:
        ctypes.memset(self.address, value, self.size)

    def again(self) -> FakeMemory:
        return FakeMemory(self.size, os.dup(self.descriptor))

    def close(self) -> None:
        del self._view
        self._pages.close()
        os.close(self.descriptor)


class FakeWork:
    """`number`: its position in its stream. `after`: for each stream, the position up to which work runs before it."""

    def __init__(self, run: Callable[[], object], reads: Sequence[ByteRange], writes: Sequence[ByteRange]) -> None:
        self.run = run
        self.reads = reads
        self.writes = writes
        self.number = 0
        self.after: dict[int, int] = {}

    def conflicts(self, other: FakeWork) -> bool:
        mine, others = (*self.reads, *self.writes), (*other.reads, *other.writes)
        return any(one.meets(two) for one in self.writes for two in others) or any(
            one.meets(two) for one in mine for two in other.writes
        )

    def touches(self, memory: ByteRange) -> bool:
        return any(memory.meets(used) for used in (*self.reads, *self.writes))


class FakeStream:
    def __init__(self, number: int) -> None:
        self.number = number
        self.waiting: deque[FakeWork] = deque()
        self.queued = 0
        self.after: dict[int, int] = {}
        self.captured: list[FakeWork] | None = None
