"""Cuts the long strings out of a large JSON request, so that the text around them, which is small, can be decoded at
once. The strings are decoded in slices, and put back afterwards.

`json_outline` does the same for lists of numbers. Invariant: keys are never cut.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from shmserve.errors import InvalidRequest
from shmserve.gateway.kserve.json_scan import COMMA, JsonScan
from shmserve.gateway.kserve.json_values import LongString, string_of
from shmserve.gateway.limits.turns import SLICE_BYTES, SlicedWork

AROUND_BYTES = 2 << 20
"""Maximum size of the JSON without its long strings."""
CUT_BYTES = 256
"""Minimum size of a string that is cut out."""
_STEP_VALUES = 16_384
"""Values that are searched for marks per slice."""
_encode = msgspec.json.Encoder().encode
_SPACE = b" \t\r\n"


class CutStrings:
    """The long strings of a request. `around`: the request with a mark in place of each. `mark` is random, so that a
    client cannot forge it."""

    def __init__(self, around: bytes, mark: str, strings: list[str]) -> None:
        self.around = around
        self._mark = mark
        self._strings = strings

    def encoded(self, document: Any, output: bytearray) -> SlicedWork[None]:
        """Appends the JSON of a document, which still has the marks, with the strings in their places."""
        text = _encode(document)
        at = size = 0
        for mark in re.finditer(b'"%b([0-9]+)"' % self._mark.encode(), text):
            output += text[at : mark.start() + 1]
            at = mark.end() - 1
            string = self._strings[int(mark[1])]
            for begin in range(0, len(string), SLICE_BYTES):
                output += _encode(string[begin : begin + SLICE_BYTES])[1:-1]
                size += min(SLICE_BYTES, len(string) - begin)
                if size >= SLICE_BYTES:
                    size = 0
                    yield
        output += text[at:]

    def whole(self, text: str) -> str:
        """The string that was cut out, if the text is its mark."""
        return self._strings[int(text[len(self._mark) :])] if text.startswith(self._mark) else text

    def restore(self, document: Any) -> SlicedWork[None]:
        """Replaces the marks in a dict, or in a Struct, by their strings."""
        if not self._strings:
            return
        seen = 0
        remaining: list[Any] = [document]
        while remaining:
            one = remaining.pop()
            for key, value in _items(one):
                kind = type(value)
                if kind is str:
                    if value.startswith(self._mark):
                        text = self.whole(value)
                        if isinstance(one, msgspec.Struct):
                            setattr(one, key, text)
                        else:
                            one[key] = text
                elif kind is list or kind is dict:
                    remaining.append(value)
                seen += 1
            if seen > _STEP_VALUES:
                seen = 0
                yield


def cut(text: bytes, limit: int, advice: str = "") -> SlicedWork[CutStrings]:
    """Raises InvalidRequest for more than `limit` values; `advice` is added to the error."""
    mark = f"cut {secrets.token_hex(8)} "
    parts: list[bytes] = []
    strings: list[str] = []
    at = commas = size = 0
    begun = -1
    for chunk in JsonScan(text, 0, len(text)).slices():
        commas += int(np.count_nonzero((chunk.data == COMMA) & ~chunk.inside))
        if commas >= limit:
            raise InvalidRequest(
                f"the request has {commas + 1} values or more; the limit of this endpoint is {limit}{advice}"
            )
        edges = np.flatnonzero(np.diff(chunk.inside, prepend=begun >= 0)) + chunk.at
        places = ([begun] if begun >= 0 else []) + edges.tolist()
        begun = places.pop() if len(places) % 2 else -1
        pairs = np.array(places, np.int64).reshape(-1, 2)
        for begin, end in pairs[pairs[:, 1] - pairs[:, 0] >= CUT_BYTES].tolist():
            if _is_key(text, end):
                continue
            parts.append(text[at:begin])
            parts.append(b'"%b%d"' % (mark.encode(), len(strings)))
            size += begin - at
            _check(size)
            strings.append((yield from _decoded(text, begin + 1, end)))
            at = end + 1
        yield
    _check(size + len(text) - at)
    return CutStrings(b"".join([*parts, text[at:]]), mark, strings)


def _check(size: int) -> None:
    if size > AROUND_BYTES:
        raise InvalidRequest(
            f"the request JSON has more than {AROUND_BYTES} bytes besides its strings of {CUT_BYTES} bytes and more, "
            "which is the limit"
        )


def _items(one: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(one, list):
        return enumerate(one)
    if isinstance(one, dict):
        return iter(one.items())
    return iter([(name, getattr(one, name)) for name in one.__struct_fields__])


def _is_key(text: bytes, end: int) -> bool:
    """`end`: the closing quote of a string."""
    following = text[end + 1 : end + 2]
    if following and following in _SPACE:
        following = text[end + 1 : end + 1 + SLICE_BYTES].lstrip(_SPACE)[:1]
    return following == b":"


def _decoded(text: bytes, begin: int, end: int) -> SlicedWork[str]:
    if end - begin <= SLICE_BYTES:
        return string_of(text[begin:end])
    string, pieces = LongString(b""), []
    for at in range(begin, end, SLICE_BYTES):
        until = min(at + SLICE_BYTES, end)
        pieces.append(string.part(text[at:until], until == end).text)
        yield
    return "".join(pieces)
