"""Where bytes of an announced length are received. The rule of the file: memory is reserved for what has arrived; an
announcement alone reserves next to nothing.

Large tensors are received straight into shared memory that the worker maps, so the client's bytes are not copied. A
block there can neither grow nor be reserved in part, so it is allocated once a sixteenth has arrived: the copy of that
part costs next to nothing, and reserving memory costs the client at least as much.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shmserve.clients.gateway.kserve.answers import Buffer

PART = 16
"""One part in so many has to arrive before memory is reserved for all of them."""
FIRST_BYTES = 64 * 1024
"""Reserved at once."""
Place = Callable[[Buffer], memoryview | None]
"""Is given the bytes that have arrived; None: there is no better place than private memory."""


class ReceiveBuffer:
    """`place` finds the memory for all of it."""

    __slots__ = ("_place", "filled", "memory", "placed", "size")

    def __init__(self, size: int, place: Place | None = None) -> None:
        self.size = size
        self.filled = 0
        self.memory = memoryview(b"")
        """What is reserved, of which `filled` bytes have arrived."""
        self.placed = False
        """It is where `place` has said."""
        self._place = place

    @property
    def full(self) -> bool:
        return self.filled == self.size

    def begin(self, first: Buffer) -> int:
        """Takes what has arrived already, and gives how much of it."""
        enough = max(FIRST_BYTES, self.size // PART)
        taken = min(len(first), self.size)
        if max(taken, enough) >= self.size or taken >= enough:
            self._reserve_all(first[:taken])
        else:
            self.memory = np.empty(enough, np.uint8).data
        self.memory[:taken] = first[:taken]
        self.filled = taken
        return taken

    def space(self) -> memoryview:
        """Where the next bytes go."""
        return self.memory[self.filled :]

    def add(self, count: int) -> None:
        """So many bytes have arrived there."""
        self.filled += count
        if self.filled == len(self.memory) < self.size:
            arrived = self.memory
            self._reserve_all(arrived)
            self.memory[: len(arrived)] = arrived

    def _reserve_all(self, arrived: Buffer) -> None:
        found = self._place(arrived) if self._place is not None else None
        self.placed = found is not None
        # Pages of private memory are the kernel's to give, one by one as they are written.
        self.memory = np.empty(self.size, np.uint8).data if found is None else found
