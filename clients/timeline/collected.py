"""The records of a recording, as far as they are kept."""

from __future__ import annotations

from typing import Any

import msgspec

from shmserve.protocol.recorded import RecordedBatch, RecordedEnd


class Collected:
    """Invariant: `batches` and `ends` have at most `limit` requests; others are only counted in `left_out`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.batches: list[RecordedBatch] = []
        self.ends: dict[int, RecordedEnd] = {}
        """Number of the request -> its end."""
        self.clients: dict[int, str] = {}
        self.requests = 0
        self.left_out = 0
        self._left_out_by_server = 0

    @property
    def missing(self) -> int:
        """Requests that were recorded, but are not here."""
        return self.left_out + self._left_out_by_server

    def add(self, answer: dict[str, Any]) -> None:
        """The records of one answer to `record`."""
        self._left_out_by_server = answer["left_out"]
        self.clients |= {int(number): name for number, name in answer["clients"].items()}
        for record in msgspec.convert(answer["records"], list[RecordedBatch | RecordedEnd]):
            count = len(record.requests) if isinstance(record, RecordedBatch) else 1
            if self.requests + count > self._limit:
                self.left_out += count
                continue
            self.requests += count
            if isinstance(record, RecordedBatch):
                self.batches.append(record)
            else:
                self.ends[record.request.number] = record
                self.requests -= record.kind == "batch"  # it is in its batch as well
