"""Finds strings and brackets in large JSON, in slices, so that the event loop is never blocked for long.

Invariant: the cost is linear in the size of the text, and brackets create no Python objects.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from shmserve.errors import InvalidRequest
from shmserve.gateway.limits.turns import SLICE_BYTES

JSON_DEPTH = 100
QUOTE, COMMA, BACKSLASH, LIST, LIST_END, OPEN, CLOSE, COLON = b'",\\[]{}:'
_TO_CURLY = np.uint8(0x20)
"""The bit that makes { of [ and } of ]."""
Text = bytes | memoryview
Bytes = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]


def too_deep() -> InvalidRequest:
    return InvalidRequest(f"JSON nesting depth exceeds maximum allowed limit ({JSON_DEPTH})")


def unreadable(text: object) -> InvalidRequest:
    return InvalidRequest(f"failed to parse the request JSON buffer: {text}")


def check_depth(text: bytes) -> None:
    """Raises InvalidRequest for JSON that is nested too deeply for a recursive decoder."""
    if text.count(b"[") + text.count(b"{") > JSON_DEPTH:
        for _ in JsonScan(text, 0, len(text)).slices():
            pass


def is_list_bracket(brackets: Bytes) -> Mask:
    """Which of the brackets are [ or ]."""
    of_lists: Mask = (brackets | 6) == 0x5F
    return of_lists


class JsonChunk(Struct):
    """`at`: the offset of the slice. `inside`: which of its bytes are in strings, including opening but not closing
    quotes. For each bracket outside of strings, `brackets` has its offset in the slice, `steps` 1 or -1, and `depths`
    the depth after it."""

    at: int
    data: Bytes
    inside: Mask
    brackets: npt.NDArray[np.intp]
    steps: npt.NDArray[np.int32]
    depths: npt.NDArray[np.int32]


class JsonScan:
    """Finds strings and brackets in a part of JSON. The part begins outside of strings, at nesting depth `depth`."""

    def __init__(self, text: Text, begin: int, end: int, depth: int = 0) -> None:
        self.depth = depth
        self._bytes: Bytes = np.frombuffer(text, np.uint8)
        self._begin = begin
        self._end = end
        self._inside = False
        self._escapes = False
        """The last slice ends with a backslash that escapes the next byte."""

    def slices(self) -> Iterator[JsonChunk]:
        for at in range(self._begin, self._end, SLICE_BYTES):
            data = self._bytes[at : min(at + SLICE_BYTES, self._end)]
            inside = self._strings(data)
            curly = data | _TO_CURLY
            opens = (curly == OPEN) & ~inside
            brackets = np.flatnonzero(opens | ((curly == CLOSE) & ~inside))
            steps = np.where(opens[brackets], np.int32(1), np.int32(-1))
            depths = np.cumsum(steps, dtype=np.int32) + np.int32(self.depth)
            if len(depths):
                self.depth = int(depths[-1])
                if depths.max() > JSON_DEPTH:
                    raise too_deep()
                if depths.min() < 0:
                    raise unreadable("unmatched closing bracket")
            yield JsonChunk(at, data, inside, brackets, steps, depths)

    def _strings(self, data: Bytes) -> Mask:
        """`JsonChunk.inside` of the next slice."""
        quotes = data == QUOTE
        backslashes = data == BACKSLASH
        if self._escapes or backslashes.any():
            # A byte is escaped by an odd number of backslashes before it. `others`: for each byte, the last position up
            # to it that is not a backslash. If there is none, it is -1, or -2 if the previous slice ended with a
            # backslash that escapes.
            places = np.arange(len(data))
            others = np.maximum.accumulate(np.where(backslashes, -1 - self._escapes, places))
            escaped = (places - others) % 2 == 1
            quotes[1:] &= ~escaped[:-1]
            if self._escapes:
                quotes[0] = False
            self._escapes = bool(escaped[-1])
        # The 8-bit count wraps around, which preserves its parity.
        inside: Mask = (np.cumsum(quotes, dtype=np.uint8) & 1).astype(bool) ^ self._inside
        self._inside = bool(inside[-1])
        return inside
