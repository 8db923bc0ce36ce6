"""Cuts the large lists out of a JSON request, so that the text around them, which is small, can be decoded at once.

Only the `data` of inputs can be large. `outline` finds these lists by their brackets; `json_values` decodes them.
"""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np
from msgspec import Struct

from shmserve.errors import InvalidRequest
from shmserve.gateway.kserve.json_scan import COLON, LIST, LIST_END, JsonScan, Text, unreadable
from shmserve.gateway.limits.turns import SlicedWork

AROUND_BYTES = 1 << 20
"""Maximum size of the request JSON without large `data`; each run of white space counts as one byte."""
AROUND_FIELDS, AROUND_BRACKETS = 16_384, 65_536
"""Maximum number of fields, and of lists and objects, in the JSON around `data`: each becomes a Python object."""
_CUT_BYTES = 1024
"""Minimum size of a list that is cut out; smaller ones are decoded with the text around them."""
_DATA_DEPTH = 4
"""Nesting depth inside of `data`: `{"inputs": [{"data": [` opens four brackets."""
_MARK = f"cut {secrets.token_hex(8)}"
"""Key of the object that replaces a list that was cut out. The key is random, so that a client cannot forge it."""
_SPACE = np.zeros(256, bool)
_SPACE[list(b" \t\r\n")] = True


class CutList(Struct):
    """A list that was cut out: the offsets of its brackets in the text."""

    begin: int
    end: int


class Outline(Struct):
    """A request without its large `data`. `around`: the text with an object `{_MARK: index}` in place of each cut."""

    around: bytes
    cuts: list[CutList]


def outline(text: Text) -> SlicedWork[Outline]:
    """Cuts out the large lists at the depth of `data`, regardless of their field name.

    Brackets between depths 3 and 4 alternate between opening and closing, so they are taken in pairs.
    """
    cuts: list[CutList] = []
    begun: list[int] = []
    """The offset of an opening bracket whose closing bracket is in a later slice; at most one."""
    scan = JsonScan(text, 0, len(text))
    for chunk in scan.slices():
        edges = chunk.brackets[np.maximum(chunk.depths, chunk.depths - chunk.steps) == _DATA_DEPTH] + chunk.at
        places = begun + edges.tolist()
        begun = [places.pop()] if len(places) % 2 else []
        pairs = np.array(places, np.int64).reshape(-1, 2)
        for begin, end in pairs[pairs[:, 1] - pairs[:, 0] >= _CUT_BYTES].tolist():
            if text[begin] == LIST and text[end] == LIST_END:
                cuts.append(CutList(begin, end))
        yield
    if scan.depth:
        raise unreadable("unexpected end inside a list or an object")
    return Outline((yield from _around(text, cuts)), cuts)


def _around(text: Text, cuts: list[CutList]) -> SlicedWork[bytes]:
    """The text with marks in place of the cuts. Raises InvalidRequest if it exceeds a limit."""
    size = len(text) - sum([cut.end - cut.begin for cut in cuts])
    parts: list[Text] = []
    at, remaining = 0, AROUND_BYTES
    for number, end in enumerate([*(cut.begin for cut in cuts), len(text)]):
        piece = text[at:end] if size <= AROUND_BYTES else (yield from _trimmed(text, at, end, remaining))
        remaining -= len(piece)
        if remaining < 0:
            raise InvalidRequest(
                f"the request JSON has {size} bytes besides the 'data' of its inputs; the limit is {AROUND_BYTES}"
            )
        parts.append(piece)
        if number < len(cuts):
            parts.append(b'{"%b":%d}' % (_MARK.encode(), number))
            at = cuts[number].end + 1
    around = b"".join(parts)
    fields = brackets = 0
    for chunk in JsonScan(around, 0, len(around)).slices():
        fields += int(np.count_nonzero((chunk.data == COLON) & ~chunk.inside))
        brackets += int(np.count_nonzero(chunk.steps > 0))
        yield
    if fields > AROUND_FIELDS or brackets > AROUND_BRACKETS:
        raise InvalidRequest(
            f"the request JSON has {fields} fields and {brackets} lists and objects, besides large 'data' of its "
            f"inputs; the limits are {AROUND_FIELDS} and {AROUND_BRACKETS}"
        )
    return around


def _trimmed(text: Text, begin: int, end: int, limit: int) -> SlicedWork[bytes]:
    """The text between two cuts, with runs of white space outside of strings reduced to one byte. Stops early, within
    one slice, when the result exceeds `limit`."""
    kept = bytearray()
    follows = False
    """The previous slice ends with white space."""
    for chunk in JsonScan(text, begin, end, _DATA_DEPTH - 1 if begin else 0).slices():
        space = _SPACE[chunk.data] & ~chunk.inside
        dropped = space & np.concatenate(([follows], space[:-1]))
        follows = bool(space[-1])
        kept += chunk.data[~dropped].tobytes()
        yield
        if len(kept) > limit:
            break
    return bytes(kept)


def cut_of(data: Any, outlined: Outline) -> CutList | None:
    """The cut that the mark `data` replaces, or None if `data` was not cut out."""
    if type(data) is dict and _MARK in data:
        return outlined.cuts[data[_MARK]]
    return None
