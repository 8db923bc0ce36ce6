"""The rows sent to viewers: the reply to the query `activity` for each version, without zero and empty fields.

Every version has the number of the event in which it last changed, so a viewer gets exactly the rows that have changed
since its last event, however long ago that was. Invariant: a value that changes while nothing happens, such as the CPU
time of an idle process, does not count as a change.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import msgspec
from msgspec import Struct

_encode = msgspec.json.Encoder().encode
SLICE = 50
"""Number of versions compared in one slice of work."""
MEMORY_STEP = 1 << 20
"""Resident memory is rounded to this, because it changes constantly."""
KEPT_GONE = 1000
"""Number of removed versions remembered. A viewer that has missed earlier removals gets everything."""

Key = tuple[str, str]
Document = dict[str, Any]


class Row(Struct):
    """`entry`: as received, to compare with. `changed`: number of the event."""

    entry: Document
    text: bytes
    changed: int


class Rows:
    """`number`: number of the last event before the first one of these rows."""

    def __init__(self, number: int = 0) -> None:
        self.number = number
        """Number of the last event."""
        self.complete_since = number + 1
        """A viewer that has not received this event needs everything: some removals before it are no longer known."""
        self._rows: dict[Key, Row] = {}
        self._gone: dict[Key, int] = {}
        """Removed version -> the event of its removal."""

    def update(self, models: list[Document]) -> Generator[None, None, None]:
        """Makes the new state the next event. A generator, so that other work can run in between."""
        number = self.number + 1
        missing = set(self._rows)
        for index, entry in enumerate(models):
            if index % SLICE == SLICE - 1:
                yield
            key = entry["name"], entry["version"]
            missing.discard(key)
            cpu_seconds = [one.pop("cpu_seconds", 0.0) for one in entry.get("instances", ())]
            for one in entry.get("instances", ()):
                one["memory_bytes"] -= one["memory_bytes"] % MEMORY_STEP
            row = self._rows.get(key)
            if row is not None and row.entry == entry:
                continue
            self._rows[key] = Row(entry, _text(entry, cpu_seconds), number)
            self._gone.pop(key, None)
        for key in missing:
            del self._rows[key]
            self._gone[key] = number
        while len(self._gone) > KEPT_GONE:
            oldest = next(iter(self._gone))
            self.complete_since = self._gone.pop(oldest)
        self.number = number

    def since(self, number: int) -> tuple[bytes, bytes]:
        """The rows that changed after an event, and the removed versions, both as JSON."""
        rows = [row.text for row in self._rows.values() if row.changed > number]
        gone = [key for key, removed in self._gone.items() if removed > number]
        return b"[" + b",".join(rows) + b"]", _encode(gone)


def _text(entry: Document, cpu_seconds: list[float]) -> bytes:
    entry = dict(entry)
    if "instances" in entry:
        pairs = zip(entry["instances"], cpu_seconds, strict=True)
        entry["instances"] = [_filled(one) | {"cpu_seconds": cpu} for one, cpu in pairs]
    if "counters" in entry:
        entry["counters"] = _filled(entry["counters"])
    return _encode(_filled(entry))


def _filled(document: Document) -> Document:
    return {name: value for name, value in document.items() if value}
