"""Turns bytes into decisions, so that a fuzzer's input determines a complete series of events.

Invariant: the reader never ends; after the last byte, all decisions are 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def pick(self, choices: Sequence[T]) -> T:
        return choices[self.byte() % len(choices)]

    def rest(self, most: int) -> bytes:
        """The next bytes. Their number, at most `most`, is the next value."""
        size = self.byte() % (most + 1)
        found = self._data[self._at : self._at + size]
        self._at += size
        return found
