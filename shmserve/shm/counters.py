"""Counters that one process writes and another reads concurrently: a page of records in shared memory.

Invariants: a record is complete before the page's length includes it, and it never moves. A reader checks all values
before it uses them.

A page starts with the number of used bytes (8 bytes). A record consists of its length and the length of its text (4
bytes each), the text (JSON that describes the metric), and 8-byte floats, the first of which is 0 while the metric is
not in use.
"""

from __future__ import annotations

import re
import struct
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise

from msgspec import DecodeError, Struct, json

PAGE_BYTES = 256 * 1024
COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*\Z")
_LABEL = re.compile(r"(?!__)(?!le\Z)[a-zA-Z_][a-zA-Z0-9_]*\Z")
_HEAD = 8
_lengths = struct.Struct("<II")
_used = struct.Struct("<Q")


class Subject(Struct, frozen=True, forbid_unknown_fields=True):
    """The description of a metric. `edges` are the ascending upper bounds of a histogram's buckets, without the last
    bucket, which is unbounded.

    The numbers of a record after the first one are, by kind: the value of a counter; the value of a gauge and when it
    was set (CLOCK_MONOTONIC in seconds; 0 if it was only incremented); the sum of a histogram and the count of each
    bucket.
    """

    name: str
    help: str
    kind: str
    labels: tuple[tuple[str, str], ...] = ()
    edges: tuple[float, ...] = ()

    @property
    def count(self) -> int:
        """How many numbers the record has, including the first."""
        return {COUNTER: 2, GAUGE: 3}.get(self.kind, len(self.edges) + 3)

    def check(self) -> None:
        """Raises ValueError if the metric cannot be exposed."""
        if not _NAME.match(self.name):
            raise ValueError(f"'{self.name}' must consist of letters, digits, _ and :, and not begin with a digit")
        for label, _ in self.labels:
            if not _LABEL.match(label):
                raise ValueError(f"'{self.name}' cannot have a label '{label}'")
        if self.kind not in (COUNTER, GAUGE, HISTOGRAM):
            raise ValueError(f"'{self.name}' has the unknown kind '{self.kind}'")
        if any(not before < after for before, after in pairwise(self.edges)):
            raise ValueError(f"the buckets of '{self.name}' must increase")


_text_of = json.Encoder().encode
_subject_of = json.Decoder(Subject).decode


class Writer:
    """Writes records to a page, which must be all zeros."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._end = _HEAD
        _used.pack_into(memory, 0, _HEAD)

    def add(self, subject: Subject) -> memoryview[float] | None:
        """Adds a record. Returns its numbers, to be written in place; None if the page is full."""
        text = _text_of(subject)
        start = self._end + _HEAD + (len(text) + 7) // 8 * 8
        end = start + 8 * subject.count
        if end > len(self._memory):
            return None
        _lengths.pack_into(self._memory, self._end, end - self._end, len(text))
        self._memory[self._end + _HEAD : self._end + _HEAD + len(text)] = text
        self._end = end
        _used.pack_into(self._memory, 0, end)
        return self._memory[start:end].cast("d")


def set_gauge(numbers: memoryview[float], value: float) -> None:
    numbers[1] = value
    numbers[2] = time.monotonic()


def observe(numbers: memoryview[float], edges: Sequence[float], value: float, count: int = 1) -> None:
    """Adds a value, this many times, to a histogram with these `Subject.edges`."""
    numbers[1] += value * count
    numbers[2 + bisect_left(edges, value)] += count


def read(memory: memoryview, prefix: str = "") -> Iterator[tuple[Subject, list[float]]]:
    """Returns the metrics in use whose names have this prefix. Raises ValueError if the page is invalid."""
    begin = b'{"name":"' + prefix.encode()  # the first field of a Subject: other metrics need not be decoded
    (end,) = _used.unpack_from(memory, 0)
    if end > len(memory):
        raise ValueError(f"a page of {len(memory)} bytes uses {end}")
    at = _HEAD
    while at < end:
        size, length = _lengths.unpack_from(memory, at) if at + _HEAD <= end else (0, 0)
        start = at + _HEAD + (length + 7) // 8 * 8
        if size % 8 or size < _HEAD or at + size > end or start > at + size:
            raise ValueError(f"invalid record at {at} of {end}: {size} bytes, text of {length}")
        text = bytes(memory[at + _HEAD : at + _HEAD + length])
        at += size
        if prefix and not text.startswith(begin):
            continue
        try:
            subject = _subject_of(text)
        except DecodeError as error:
            raise ValueError(f"a record has an invalid text: {error}") from None
        subject.check()
        numbers = [float(number) for number in memory[start:at].cast("d")]
        if len(numbers) != subject.count:
            raise ValueError(f"'{subject.name}' has {len(numbers)} numbers, not {subject.count}")
        if numbers[0]:
            yield subject, numbers
