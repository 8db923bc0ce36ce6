"""The pages of counters that a worker shares with the broker. Invariant: a page is announced before it is written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shmserve.errors import Unavailable
from shmserve.protocol.messages import Counted
from shmserve.shm.counters import PAGE_BYTES, Subject, Writer
from shmserve.shm.extents import memfd

if TYPE_CHECKING:
    from shmserve.workers.outbox import Outbox

PAGES = 16


class ModelTallies:
    """Creates pages on demand and keeps them as long as the process lives."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._extents: list[memfd.MemfdExtent] = []
        self._writer: Writer | None = None

    def add(self, subject: Subject) -> memoryview[float]:
        numbers = self._writer.add(subject) if self._writer is not None else None
        if numbers is not None:
            return numbers
        if len(self._extents) == PAGES:
            raise Unavailable(f"the metrics of this model take more than {PAGES * PAGE_BYTES} bytes")
        extent = memfd.create(PAGE_BYTES, seal_future_write=True)
        self._extents.append(extent)
        self._outbox.add(Counted(PAGE_BYTES), extent.fd)
        self._outbox.flush()
        self._writer = Writer(extent.memory)
        numbers = self._writer.add(subject)
        if numbers is None:
            raise Unavailable(f"metric '{subject.name}' with its labels takes more than {PAGE_BYTES} bytes")
        return numbers
