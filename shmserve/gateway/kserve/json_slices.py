"""Decodes large JSON requests in slices, so that the event loop is never blocked for long.

Only the `data` of inputs can be large. `outline` finds these lists by their brackets, cuts them out, and returns the
text around them, which is small and is decoded at once. `flat` then decodes each cut: tensors need the values without
the nesting, so inner brackets are replaced by spaces, and the values are decoded in slices that end at a comma.

Invariant: for any input the cost is linear in its size, and brackets in `data` create no Python objects.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from shmserve.errors import InvalidRequest
from shmserve.gateway.limits.turns import SLICE_BYTES, Work

JSON_DEPTH = 100
AROUND_BYTES = 1 << 20
"""Limit of the request JSON without large `data`, and with each run of white space counted as one byte."""
VALUE_BYTES = 1 << 20
"""Limit of a value, with the white space and brackets around it. Strings may be longer, see Part."""
AROUND_FIELDS, AROUND_BRACKETS = 16_384, 65_536
"""Limits of fields and of lists and objects in the JSON around `data`: each becomes a Python object."""
_CUT_BYTES = 1024
"""Minimum size of a list that is cut out; smaller ones are decoded with the text around them."""
_DATA_DEPTH = 4
"""Nesting depth inside of `data`: `{"inputs": [{"data": [` opens four brackets."""
_MARK = f"cut {secrets.token_hex(8)}"
"""Key of the object that replaces a list that was cut out. It is random, so that a client cannot forge one."""
_QUOTE, _COMMA, _BACKSLASH, _LIST, _LIST_END, _OPEN, _CLOSE, _COLON = b'",\\[]{}:'
_SPACE = np.zeros(256, bool)
_SPACE[list(b" \t\r\n")] = True
_PLAIN = np.ones(256, bool)
_PLAIN[list(b" \t\r\n[],")] = False
"""Bytes that belong to values: everything but white space, commas and the brackets of lists."""
_TAIL_BYTES = 12
"""A truncated escape sequence is shorter than this: at most 11 of the 12 bytes of a surrogate pair."""
_ESCAPED = re.compile(
    rb"(?:[^\\]+|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4})*"
)
"""Matches the content of a string up to the first incomplete or invalid escape sequence. A surrogate pair counts as one
sequence."""
Text = bytes | memoryview
_Bytes = npt.NDArray[np.uint8]
_Mask = npt.NDArray[np.bool_]


class CutList(Struct):
    """A list that was cut out: the offsets of its brackets in the text."""

    begin: int
    end: int


class StringPart(Struct):
    """A part of a string that is longer than a slice. `last`: the end of the string."""

    text: str
    last: bool


class Outline(Struct):
    """A request without its large `data`. `around`: the text with an object `{_MARK: index}` in place of each cut."""

    around: bytes
    cuts: list[CutList]


def too_deep() -> InvalidRequest:
    return InvalidRequest(f"JSON nesting depth exceeds maximum allowed limit ({JSON_DEPTH})")


def unreadable(text: object) -> InvalidRequest:
    return InvalidRequest(f"failed to parse the request JSON buffer: {text}")


def check_depth(text: bytes) -> None:
    """Raises InvalidRequest for JSON that is nested too deeply for a recursive decoder."""
    if text.count(b"[") + text.count(b"{") > JSON_DEPTH:
        for _ in _JsonScan(text, 0, len(text)).slices():
            pass


class _Slice(Struct):
    """`at`: the offset of the slice. `inside`: which of its bytes are in strings, including opening but not closing
    quotes. For the brackets outside of strings: `brackets`, their offsets in the slice; `steps`, 1 or -1; `depths`, the
    depth after each."""

    at: int
    data: _Bytes
    inside: _Mask
    brackets: npt.NDArray[np.intp]
    steps: npt.NDArray[np.int32]
    depths: npt.NDArray[np.int32]


class _JsonScan:
    """Finds strings and brackets in a part of JSON. The part begins outside of strings, at nesting depth `depth`."""

    def __init__(self, text: Text, begin: int, end: int, depth: int = 0) -> None:
        self.depth = depth
        self._bytes: _Bytes = np.frombuffer(text, np.uint8)
        self._begin = begin
        self._end = end
        self._inside = False
        self._escapes = False
        """The last slice ends with a backslash that escapes the next byte."""

    def slices(self) -> Iterator[_Slice]:
        for at in range(self._begin, self._end, SLICE_BYTES):
            data = self._bytes[at : min(at + SLICE_BYTES, self._end)]
            inside = self._strings(data)
            folded = data | 32  # maps [ to { and ] to }
            opens = (folded == _OPEN) & ~inside
            brackets = np.flatnonzero(opens | ((folded == _CLOSE) & ~inside))
            steps = np.where(opens[brackets], np.int32(1), np.int32(-1))
            depths = np.cumsum(steps, dtype=np.int32) + np.int32(self.depth)
            if len(depths):
                self.depth = int(depths[-1])
                if depths.max() > JSON_DEPTH:
                    raise too_deep()
                if depths.min() < 0:
                    raise unreadable("unmatched closing bracket")
            yield _Slice(at, data, inside, brackets, steps, depths)

    def _strings(self, data: _Bytes) -> _Mask:
        """`_Slice.inside` of the next slice."""
        quotes = data == _QUOTE
        backslashes = data == _BACKSLASH
        if self._escapes or backslashes.any():
            # A byte is escaped by an odd number of backslashes before it.
            # `others`: for each byte, the last place up to it that is not a backslash. Without one it is -1, or -2 if
            # the previous slice ended with a backslash that escapes.
            places = np.arange(len(data))
            others = np.maximum.accumulate(np.where(backslashes, -1 - self._escapes, places))
            odd = (places - others) % 2 == 1
            quotes[1:] &= ~odd[:-1]
            if self._escapes:
                quotes[0] = False
            self._escapes = bool(odd[-1])
        # The 8-bit count wraps around, which preserves its parity.
        inside: _Mask = (np.cumsum(quotes, dtype=np.uint8) & 1).astype(bool) ^ self._inside
        self._inside = bool(inside[-1])
        return inside


def outline(text: Text) -> Work[Outline]:
    """Cuts out the large lists at the depth of `data`, whatever the name of their field.

    Brackets between depths 3 and 4 alternate between opening and closing, so they are taken in pairs.
    """
    cuts: list[CutList] = []
    begun: list[int] = []
    """The offset of an opening bracket whose closing bracket is in a later slice; at most one."""
    scan = _JsonScan(text, 0, len(text))
    for part in scan.slices():
        edges = part.brackets[np.maximum(part.depths, part.depths - part.steps) == _DATA_DEPTH] + part.at
        places = begun + edges.tolist()
        begun = [places.pop()] if len(places) % 2 else []
        pairs = np.array(places, np.int64).reshape(-1, 2)
        for begin, end in pairs[pairs[:, 1] - pairs[:, 0] >= _CUT_BYTES].tolist():
            if text[begin] == _LIST and text[end] == _LIST_END:
                cuts.append(CutList(begin, end))
        yield
    if scan.depth:
        raise unreadable("unexpected end inside a list or an object")
    return Outline((yield from _around(text, cuts)), cuts)


def commas_of(text: bytes) -> Work[int]:
    """Number of commas outside of strings."""
    found = 0
    for part in _JsonScan(text, 0, len(text)).slices():
        found += int(np.count_nonzero((part.data == _COMMA) & ~part.inside))
        yield
    return found


def _around(text: Text, cuts: list[CutList]) -> Work[bytes]:
    """The text with marks in place of the cuts. Raises InvalidRequest if it exceeds a limit."""
    size = len(text) - sum([cut.end - cut.begin for cut in cuts])
    parts: list[Text] = []
    at, left = 0, AROUND_BYTES
    for number, end in enumerate([*(cut.begin for cut in cuts), len(text)]):
        piece = text[at:end] if size <= AROUND_BYTES else (yield from _trimmed(text, at, end, left))
        left -= len(piece)
        if left < 0:
            raise InvalidRequest(
                f"the request JSON has {size} bytes besides the 'data' of its inputs; the limit is {AROUND_BYTES}"
            )
        parts.append(piece)
        if number < len(cuts):
            parts.append(b'{"%b":%d}' % (_MARK.encode(), number))
            at = cuts[number].end + 1
    around = b"".join(parts)
    fields = brackets = 0
    for part in _JsonScan(around, 0, len(around)).slices():
        fields += int(np.count_nonzero((part.data == _COLON) & ~part.inside))
        brackets += int(np.count_nonzero(part.steps > 0))
        yield
    if fields > AROUND_FIELDS or brackets > AROUND_BRACKETS:
        raise InvalidRequest(
            f"the request JSON has {fields} fields and {brackets} lists and objects, besides large 'data' of its "
            f"inputs; the limits are {AROUND_FIELDS} and {AROUND_BRACKETS}"
        )
    return around


def _trimmed(text: Text, begin: int, end: int, limit: int) -> Work[bytes]:
    """The text between two cuts, with runs of white space outside of strings reduced to one byte. Stops early, within
    one slice, when the result exceeds `limit`."""
    kept = bytearray()
    follows = False
    """The previous slice ends with white space."""
    for part in _JsonScan(text, begin, end, _DATA_DEPTH - 1 if begin else 0).slices():
        space = _SPACE[part.data] & ~part.inside
        dropped = space & np.concatenate(([follows], space[:-1]))
        follows = bool(space[-1])
        kept += part.data[~dropped].tobytes()
        yield
        if len(kept) > limit:
            break
    return bytes(kept)


def cut_of(data: Any, found: Outline) -> CutList | None:
    """The cut in whose place the mark `data` was decoded; None: `data` was not cut out."""
    if type(data) is dict and _MARK in data:
        return found.cuts[data[_MARK]]
    return None


# ---------------------------------------------------------------------------------------- values


class _Shape:
    """Checks the nesting of one `data`: all values must have the same depth, and with values no list may be empty."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._leaf = 0
        """Depth of the values; 0: none so far."""
        self._hollow = False
        """There is an empty list."""
        self._bare = False
        """The slice ended after an opening bracket: nothing of that list has been seen yet."""

    def check(self, part: _Slice, depth: int) -> None:
        """`depth`: the depth at the start of the slice."""
        values = _PLAIN[part.data] | part.inside
        brackets, opens = part.brackets, part.steps > 0
        seen = np.cumsum(values, dtype=np.int32)
        if len(seen) and seen[-1]:
            first = int(values.argmax())
            deep = np.full(1, depth) if not len(brackets) else self._depths(part, depth)[values]
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
    def _depths(part: _Slice, depth: int) -> npt.NDArray[np.int32]:
        """The depth of each byte."""
        steps = np.zeros(len(part.data), np.int32)
        steps[part.brackets] = part.steps
        return np.cumsum(steps, dtype=np.int32) + np.int32(depth)

    def _mixed(self) -> InvalidRequest:
        return InvalidRequest(f"input '{self._name}': its 'data' mixes lists and values")


class _LongString:
    """Decodes a string that spans slices. An incomplete character or escape sequence is kept for the next slice."""

    def __init__(self, begin: bytes) -> None:
        self._rest = begin

    def part(self, more: bytes, last: bool) -> StringPart:
        data = self._rest + more
        at = len(data) if last else _whole(data)
        self._rest = data[at:]
        return StringPart(_string(data[:at]), last)


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
    if _BACKSLASH in data:
        found = _ESCAPED.match(data, 0, end)
        assert found is not None
        if end - found.end() < _TAIL_BYTES:  # otherwise the escape is invalid, which the decoder reports
            return found.end()
    return end


def _string(data: bytes) -> str:
    """Decodes the content of a JSON string."""
    try:
        found: str = msgspec.json.decode(b'"%b"' % data, type=str)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise unreadable(error) from None
    return found


def flat(name: str, text: Text, cut: CutList) -> Iterator[list[Any]]:
    """Yields the values of a cut without their nesting: for each slice one list, which may be empty. A string that is
    longer than a slice is yielded as Parts, each alone in its list."""
    scan, shape = _JsonScan(text, cut.begin + 1, cut.end, 1), _Shape(name)
    rest: list[bytes] = []
    """The bytes after the last comma, with spaces instead of brackets. They are decoded with the next slice."""
    found = missing = skip = False
    """`found`: there was a value. `missing`: there was none where one must be. `skip`: the next value decoded is the
    placeholder of a string that was yielded in parts."""
    string: _LongString | None = None
    """The string that is being yielded in parts."""
    depth = 1
    for part in scan.slices():
        shape.check(part, depth)
        depth = scan.depth
        blanked = part.data.tobytes()
        begin = 0
        if string is not None:
            outer = np.flatnonzero(~part.inside)
            begin = int(outer[0]) + 1 if len(outer) else len(blanked)
            yield [string.part(blanked[: begin - 1] if len(outer) else blanked, bool(len(outer)))]
            if not len(outer):
                continue
            string = None
        if len(part.brackets):
            lists = part.brackets[(part.data[part.brackets] | 6) == 0x5F]  # [ and ], not { and }
            copy = part.data.copy()
            copy[lists] = 32
            blanked = copy.tobytes()
        commas = np.flatnonzero((part.data == _COMMA) & ~part.inside)
        last = part.at + len(blanked) == cut.end
        end = len(blanked) if last else int(commas[-1]) if len(commas) else -1
        values: list[Any] = []
        if end < begin and not last:
            rest.append(blanked[begin:])
        else:
            piece = b"".join([*rest, blanked[begin:end]])
            rest = [blanked[end + 1 :]]
            if piece.strip(b" \t\r\n,"):
                found = True
                values = _decoded(piece)
                if skip:
                    del values[0]
                skip = False
            else:
                missing = True
        yield values
        size = sum(map(len, rest))
        if size >= SLICE_BYTES and len(part.inside) and part.inside[-1]:
            before, _, content = b"".join(rest).partition(b'"')
            string = _LongString(content)
            rest, skip = [before, b'""'], True
        elif size > VALUE_BYTES:
            raise InvalidRequest(f"input '{name}': a value of its 'data' exceeds {VALUE_BYTES} bytes")
    if not found:
        if cut.end - cut.begin > VALUE_BYTES:
            raise InvalidRequest(f"input '{name}': its 'data' has more than {VALUE_BYTES} bytes without a value")
        _checked(bytes(text[cut.begin : cut.end + 1]))
    elif missing:
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
