"""Decodes the lists that `json_outline` has cut out. Tensors need the values without the nesting, so inner brackets are
replaced by spaces, and the values are decoded in slices that end at a comma."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from shmserve.errors import InvalidRequest
from shmserve.gateway.kserve.json_outline import CutList
from shmserve.gateway.kserve.json_scan import BACKSLASH, COMMA, JsonChunk, JsonScan, Text, is_list_bracket, unreadable
from shmserve.gateway.limits.turns import SLICE_BYTES

VALUE_BYTES = 1 << 20
"""Maximum size of a value, with the white space and brackets around it. Strings may be longer, see StringPart."""
_PLAIN = np.ones(256, bool)
_PLAIN[list(b" \t\r\n[],")] = False
"""Bytes that belong to values: everything but white space, commas and the brackets of lists."""
_BLANK = ord(" ")
_TAIL_BYTES = 12
"""A truncated escape sequence is shorter than this: at most 11 of the 12 bytes of a surrogate pair."""
_ESCAPED = re.compile(
    rb"(?:[^\\]+|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4})*"
)
"""Matches the content of a string up to the first incomplete or invalid escape sequence. A surrogate pair counts as one
sequence."""


class StringPart(Struct):
    """A part of a string that is longer than a slice. `last`: this part ends the string."""

    text: str
    last: bool


class _NestingCheck:
    """Checks the nesting of one `data`: all values must have the same depth, and if there are values, no list may be
    empty."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._leaf = 0
        """Depth of the values; 0: none so far."""
        self._hollow = False
        """An empty list has been seen."""
        self._bare = False
        """The slice ended after an opening bracket: nothing of that list has been seen yet."""

    def check(self, chunk: JsonChunk, depth: int) -> None:
        """`depth`: the depth at the start of the slice."""
        values = _PLAIN[chunk.data] | chunk.inside
        brackets, opens = chunk.brackets, chunk.steps > 0
        seen = np.cumsum(values, dtype=np.int32)
        if len(seen) and seen[-1]:
            first = int(values.argmax())
            deep = np.full(1, depth) if not len(brackets) else self._depths(chunk, depth)[values]
            self._leaf = self._leaf or int(deep[0])
            if (deep != self._leaf).any():
                raise self._mixed()
            self._bare = self._bare and bool(len(brackets)) and int(brackets[0]) < first
        if len(brackets):
            hollow = opens[:-1] & ~opens[1:] & (seen[brackets[1:]] == seen[brackets[:-1]])
            self._hollow = self._hollow or bool(hollow.any()) or (self._bare and not opens[0])
            self._bare = bool(opens[-1]) and seen[-1] == seen[brackets[-1]]
        if self._hollow and self._leaf:
            raise self._mixed()

    @staticmethod
    def _depths(chunk: JsonChunk, depth: int) -> npt.NDArray[np.int32]:
        """The depth of each byte."""
        steps = np.zeros(len(chunk.data), np.int32)
        steps[chunk.brackets] = chunk.steps
        return np.cumsum(steps, dtype=np.int32) + np.int32(depth)

    def _mixed(self) -> InvalidRequest:
        return InvalidRequest(f"input '{self._name}': its 'data' mixes lists and values")


class LongString:
    """Decodes a string that spans slices. An incomplete character or escape sequence is kept for the next slice."""

    def __init__(self, begin: bytes) -> None:
        self._rest = begin

    def part(self, more: bytes, last: bool) -> StringPart:
        data = self._rest + more
        at = len(data) if last else _whole(data)
        self._rest = data[at:]
        return StringPart(string_of(data[:at]), last)


def _whole(data: bytes) -> int:
    """The length of the longest prefix that splits no UTF-8 character and no escape sequence."""
    end = len(data)
    for back in range(1, min(4, end) + 1):
        byte = data[-back]
        if byte >= 0xC0:
            if back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4):
                end -= back
            break
        if byte < 0x80:
            break
    if BACKSLASH in data:
        valid = _ESCAPED.match(data, 0, end)
        assert valid is not None
        if end - valid.end() < _TAIL_BYTES:  # otherwise the escape is invalid, which the decoder reports
            return valid.end()
    return end


def string_of(data: bytes) -> str:
    """Decodes the content of a JSON string."""
    try:
        text: str = msgspec.json.decode(b'"%b"' % data, type=str)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise unreadable(error) from None
    return text


def _without_list_brackets(chunk: JsonChunk) -> bytes:
    """The slice with spaces instead of [ and ]."""
    if not len(chunk.brackets):
        return chunk.data.tobytes()
    copy = chunk.data.copy()
    copy[chunk.brackets[is_list_bracket(chunk.data[chunk.brackets])]] = _BLANK
    return copy.tobytes()


def flat(name: str, text: Text, cut: CutList) -> Iterator[list[Any]]:
    """Yields the values of a cut without their nesting: for each slice one list, which may be empty. A string that is
    longer than a slice is yielded as StringParts, each alone in its list."""
    scan, nesting = JsonScan(text, cut.begin + 1, cut.end, 1), _NestingCheck(name)
    rest: list[bytes] = []
    """The bytes after the last comma, with spaces instead of brackets. They are decoded with the next slice."""
    has_values = value_missing = False
    placeholder = False
    """The next decoded value stands for a string that was yielded in parts."""
    string: LongString | None = None
    """The string that is being yielded in parts."""
    depth = 1
    for chunk in scan.slices():
        nesting.check(chunk, depth)
        depth = scan.depth
        spaced = _without_list_brackets(chunk)
        begin = 0
        if string is not None:
            outer = np.flatnonzero(~chunk.inside)
            begin = int(outer[0]) + 1 if len(outer) else len(spaced)
            yield [string.part(spaced[: begin - 1] if len(outer) else spaced, bool(len(outer)))]
            if not len(outer):
                continue
            string = None
        commas = np.flatnonzero((chunk.data == COMMA) & ~chunk.inside)
        last = chunk.at + len(spaced) == cut.end
        end = len(spaced) if last else int(commas[-1]) if len(commas) else -1
        values: list[Any] = []
        if end < begin and not last:
            rest.append(spaced[begin:])
        else:
            piece = b"".join([*rest, spaced[begin:end]])
            rest = [spaced[end + 1 :]]
            if piece.strip(b" \t\r\n,"):
                has_values = True
                values = _decoded(piece)
                if placeholder:
                    del values[0]
                placeholder = False
            else:
                value_missing = True
        yield values
        size = sum(map(len, rest))
        if size >= SLICE_BYTES and len(chunk.inside) and chunk.inside[-1]:
            before, _, content = b"".join(rest).partition(b'"')
            string = LongString(content)
            rest, placeholder = [before, b'""'], True
        elif size > VALUE_BYTES:
            raise InvalidRequest(f"input '{name}': a value of its 'data' exceeds {VALUE_BYTES} bytes")
    if not has_values:
        if cut.end - cut.begin > VALUE_BYTES:
            raise InvalidRequest(f"input '{name}': its 'data' has more than {VALUE_BYTES} bytes without a value")
        _checked(bytes(text[cut.begin : cut.end + 1]))
    elif value_missing:
        raise unreadable("missing value in a list")


def _decoded(piece: bytes) -> list[Any]:
    """Decodes values that are separated by commas."""
    whole = b"[%b]" % piece
    try:
        values: list[Any] = msgspec.json.decode(whole)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        if b"N" not in piece and b"I" not in piece:
            raise unreadable(error) from None
        try:
            values = json.loads(whole.decode())  # accepts NaN and Infinity
        except (ValueError, RecursionError):
            raise unreadable(error) from None
    return values


def _checked(text: bytes) -> None:
    """Raises InvalidRequest unless the text is valid JSON."""
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except msgspec.MsgspecError as error:
        raise unreadable(error) from None
