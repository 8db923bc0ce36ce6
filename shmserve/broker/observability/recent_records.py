"""The latest log records, kept in memory for `shmserve logs`, regardless of where the server writes its log.

Records are numbered. The first number is the start time in microseconds, so that the numbers of a restarted server
follow those of its predecessor, and a reader can continue after its last record. Invariant: the records take at most
`limit` bytes, estimated as the length of their texts plus RECORD_BYTES each.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping
from itertools import islice
from typing import Any

from msgspec import Struct

PAGE = 1000
"""Maximum number of records in one answer."""
RECORD_BYTES = 400
"""Estimated size of a record without its texts."""
LIMIT_BYTES = 1 << 20
TEXT = 16384
"""Maximum number of characters kept of a text."""


class RecentRecord(Struct, frozen=True, gc=False):
    number: int
    time: float
    level: str
    text: str
    traceback: str
    fields: Mapping[str, Any]
    size: int

    def document(self) -> dict[str, Any]:
        document = {"number": self.number, "time": self.time, "level": self.level, "text": self.text}
        if self.traceback:
            document["traceback"] = self.traceback
        return {**self.fields, **document}


class RecentRecords:
    """`limit`: maximum size in bytes."""

    def __init__(self, limit: int = LIMIT_BYTES, start_us: int | None = None) -> None:
        self._limit = limit
        self._records: deque[RecentRecord] = deque()
        self._size = 0
        self._first = self._next = start_us or time.time_ns() // 1000

    def put(self, record: logging.LogRecord, text: str, traceback: str, fields: Mapping[str, Any]) -> None:
        """`text` and `traceback` must not contain control characters."""
        number = self._next
        self._next += 1
        text, traceback = _cut(text), _cut(traceback)
        size = RECORD_BYTES + len(text) + len(traceback) + sum(len(str(value)) for value in fields.values())
        self._size += size
        level = record.levelname.lower()
        self._records.append(RecentRecord(number, record.created, level, text, traceback, dict(fields), size))
        while self._size > self._limit:
            self._size -= self._records.popleft().size

    def document(self, model: str, after: int) -> dict[str, Any]:
        """The records with numbers above `after`; with `model`, only those of the model.

        `next`: the number of the last record considered; `more`: whether later records exist; `lost`: how many records
        after `after` are no longer kept; `started`: the first number of this server.
        """
        oldest = self._records[0].number if self._records else self._next
        begin = max(after + 1, oldest)
        lost = max(0, oldest - max(after + 1, self._first))
        page = list(islice(self._records, begin - oldest, begin - oldest + PAGE))
        last = page[-1].number if page else max(after, self._next - 1)
        return {
            "records": [record.document() for record in page if model in ("", record.fields.get("model"))],
            "next": last,
            "more": last < self._next - 1,
            "lost": lost,
            "started": self._first,
        }


def _cut(text: str) -> str:
    return text if len(text) <= TEXT else f"{text[:TEXT]}... ({len(text):,} characters in all)"
