"""The log of a lease: a page in which a worker records the requests that a client sent to it directly. The broker reads
it during the lease and once after its end, even if the worker has died.

The page contains 64-bit integers: the numbers of the first and the last of the running requests (0: none), their
arrival time, the total counts of records written and read, and, from `_HEAD` on, a ring of records, each of the
requests of one packet. Invariant: each word is written by one side only.
"""

from __future__ import annotations

import fcntl
import mmap
import os

from shmserve.protocol.messages import BATCH_REQUESTS
from shmserve.protocol.worker_messages import LeasedBatch

_RUNNING, _SINCE, _WRITTEN, _READ, _LAST = range(5)
_HEAD = _FIELDS = 8
RECORDS = 255
PAGE_BYTES = (_HEAD + RECORDS * _FIELDS) * 8
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def create() -> int:
    """The descriptor of an empty log, which cannot be truncated."""
    fd = os.memfd_create("shmserve-lease", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, PAGE_BYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


class LeaseLog:
    """One side's mapping of a log. The caller keeps the descriptor."""

    def __init__(self, fd: int) -> None:
        self._pages = mmap.mmap(fd, PAGE_BYTES)
        self._words = memoryview(self._pages).cast("q")

    def close(self) -> None:
        self._words.release()
        self._pages.close()

    # ------------------------------------------------------------------------------------ the worker

    def begin(self, first: int, last: int, arrived: int) -> None:
        """Records that the worker starts to run the requests with these and no numbers between."""
        words = self._words
        words[_SINCE] = arrived
        words[_LAST] = last
        words[_RUNNING] = first

    def end(self, arrived: int, times: tuple[int, int, int, int], rows: int, failed: int, count: int = 1) -> int:
        """Adds a record of the running requests. Returns the number of unread records; at RECORDS, the log is full."""
        words = self._words
        written = words[_WRITTEN]
        at = _HEAD + written % RECORDS * _FIELDS
        words[at] = arrived
        words[at + 1], words[at + 2], words[at + 3], words[at + 4] = times
        words[at + 5] = rows
        words[at + 6] = failed
        words[at + 7] = count
        words[_WRITTEN] = written + 1
        return written + 1 - words[_READ]

    def answered(self) -> None:
        """Records that the client has the responses of the recorded requests."""
        self._words[_RUNNING] = 0

    # ------------------------------------------------------------------------------------ the broker

    def running(self) -> tuple[int, int, int]:
        """The first and last number and the arrival time of the running requests, which may already have a record.
        Number 0: none."""
        return self._words[_RUNNING], self._words[_LAST], self._words[_SINCE]

    def take(self) -> list[LeasedBatch]:
        """The records since the last call. Raises ValueError if the log is invalid."""
        words = self._words
        read, written = words[_READ], words[_WRITTEN]
        if not 0 <= written - read <= RECORDS:
            raise ValueError(f"{written} records written and {read} read, in a log of {RECORDS}")
        taken: list[LeasedBatch] = []
        for number in range(read, written):
            at = _HEAD + number % RECORDS * _FIELDS
            arrived, start, ready, computed, placed, rows, failed, count = words[at : at + 8].tolist()
            if not 0 < arrived <= start <= ready <= computed <= placed or not 0 <= rows <= 1 << 31:
                raise ValueError(f"record {number} has the times {arrived} to {placed} and {rows} rows")
            if not 0 <= failed <= count or not 0 < count <= BATCH_REQUESTS:
                raise ValueError(f"record {number} has {count} requests, of which {failed} failed")
            taken.append((arrived, start, ready, computed, placed, rows, failed, count))
        words[_READ] = written
        return taken
