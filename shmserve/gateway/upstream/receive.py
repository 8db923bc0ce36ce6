"""Receive buffers for bodies of an announced length. Invariant: memory is reserved in proportion to what has arrived.
An announced length alone reserves almost nothing.

Large tensors are received straight into shared memory that the worker maps, so the client's bytes are not copied. A
block there can neither grow nor be reserved in part, so it is allocated once a sixteenth has arrived. That part is
copied, and the pages of the block are warmed, gradually as the rest arrives, so the cost of a loop iteration is
proportional to the bytes that it receives. A connection that has sent bodies of this size before gets the block at
once: it reserves no more than it has sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from shmserve.gateway.kserve.answers import Buffer

PART = 16
"""One part in PART must have arrived before memory is reserved for the whole body."""
FIRST_BYTES = 64 * 1024
"""Number of bytes reserved at once."""
WINDOW_BYTES = 1024 * 1024
"""Maximum size of one read."""
SCRATCH = memoryview(bytearray(256 * 1024))
"""Receive buffer shared by all connections: each copies its bytes out before the next one reads."""
SMALL_SCRATCH = SCRATCH[: 4 * 1024]
"""The same when a large body is expected: only its start is read here, the rest directly into its final buffer."""
TRUSTED_BYTES = 16 << 20
"""Maximum size that a connection may reserve for bodies of which nothing has arrived. It must have sent as many bytes
before."""


class Room(NamedTuple):
    """`warm(begin, end)` must be called before these bytes are used. It raises Unavailable if the machine has no memory
    for them."""

    memory: memoryview
    warm: Callable[[int, int], None]


Allocate = Callable[[Buffer], Room | None]
"""Called with the bytes that have arrived. Returns None to use private memory."""


class ReceiveBuffer:
    """`allocate` allocates memory for the whole body. `trusted`: allocate at once. `begin` and `add` raise Unavailable
    if the machine has no more memory."""

    __slots__ = ("_allocate", "_arrived", "_copied", "_end", "_trusted", "_warm", "filled", "memory", "placed", "size")

    def __init__(self, size: int, allocate: Allocate | None = None, trusted: bool = False) -> None:
        self.size = size
        self.filled = 0
        self.memory = memoryview(b"")
        """The reserved memory, of which `filled` bytes have arrived."""
        self.placed = False
        """The memory was allocated by `allocate`."""
        self._allocate = allocate
        self._trusted = trusted
        self._warm: Callable[[int, int], None] | None = None
        self._end = 0
        """End of the part that can be written."""
        self._arrived: Buffer = b""
        """Bytes that arrived before the whole body was reserved; `_copied` of them have been copied."""
        self._copied = 0

    @property
    def full(self) -> bool:
        return self.filled == self.size

    def begin(self, first: Buffer) -> int:
        """Takes bytes that have already arrived, and returns how many."""
        enough = 0 if self._trusted else max(FIRST_BYTES, self.size // PART)
        taken = min(len(first), self.size)
        if max(taken, enough) >= self.size or taken >= enough:
            self._reserve_all(first[:taken])
            self._arrived = b""
            self._end = min(max(taken, WINDOW_BYTES), self.size)
            if self._warm is not None:
                self._warm(0, self._end)
            self.memory[:taken] = first[:taken]
        else:
            self.memory = np.empty(enough, np.uint8).data
            self.memory[:taken] = first[:taken]
        self.filled = taken
        self._open()
        return taken

    def space(self) -> memoryview:
        """Memory for the next bytes."""
        return self.memory[self.filled : self._end]

    def add(self, count: int) -> None:
        """Called when `count` bytes have arrived in `space`."""
        self.filled += count
        if self.filled == len(self.memory) < self.size:
            self._reserve_all(self.memory)
        if self._arrived:
            self._copy(len(self._arrived) if self.full else self._copied + count)
        self._open()

    def _open(self) -> None:
        if self.filled >= self._end and not self.full:
            self._end = min(self.filled + WINDOW_BYTES, len(self.memory))
            if self._warm is not None:
                self._warm(self.filled, self._end)

    def _reserve_all(self, arrived: Buffer) -> None:
        room = self._allocate(arrived) if self._allocate is not None else None
        self.placed = room is not None
        # The kernel commits pages of private memory as they are written.
        self.memory, self._warm = (np.empty(self.size, np.uint8).data, None) if room is None else room
        self._arrived, self._end = arrived, 0

    def _copy(self, end: int) -> None:
        """Copies the bytes that arrived first, up to `end`."""
        begin, end = self._copied, min(end, len(self._arrived))
        if self._warm is not None:
            self._warm(begin, end)
        self.memory[begin:end] = self._arrived[begin:end]
        self._copied = end
        if end == len(self._arrived):
            self._arrived = b""
