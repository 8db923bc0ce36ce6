"""The records of a recording, up to a limit."""

from __future__ import annotations

from typing import Any

import msgspec

from shmserve.protocol.recorded import RecordedBatch, RecordedEnd


class Collected:
    """Invariants: `batches` and `ends` contain records of at most `limit` requests. Other requests are only counted in
    `left_out`. A request counts once, however many records it has."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.batches: list[RecordedBatch] = []
        self.ends: dict[int, RecordedEnd] = {}
        """Number of the request -> its end."""
        self.clients: dict[int, str] = {}
        self._kept: set[int] = set()
        """Numbers of the requests in `batches` and `ends`."""
        self._dropped: set[int] = set()
        """Numbers of the requests that are left out."""
        self._left_out_by_server = 0

    @property
    def requests(self) -> int:
        return len(self._kept)

    @property
    def left_out(self) -> int:
        return len(self._dropped)

    @property
    def missing(self) -> int:
        """Number of requests that were recorded but are not kept."""
        return self.left_out + self._left_out_by_server

    def add(self, answer: dict[str, Any]) -> None:
        """Adds the records of one answer to `record`."""
        self._left_out_by_server = answer["left_out"]
        self.clients |= {int(number): name for number, name in answer["clients"].items()}
        for record in msgspec.convert(answer["records"], list[RecordedBatch | RecordedEnd]):
            if isinstance(record, RecordedBatch):
                if self._keeps({request.number for request in record.requests}):
                    self.batches.append(record)
            elif self._keeps({record.request.number}):
                self.ends[record.request.number] = record

    def _keeps(self, numbers: set[int]) -> bool:
        """Whether a record of these requests is kept, which requires that all of them are."""
        new = numbers - self._kept
        if new and (len(self._kept) + len(new) > self._limit or not new.isdisjoint(self._dropped)):
            self._dropped |= new
            return False
        self._kept |= new
        return True
