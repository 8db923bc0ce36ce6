"""The sizes of images, from their headers. A small file can have billions of pixels, which an engine would decode.

Invariant: what an engine's decoder takes for the size is what is read here. So unusual headers are refused.
"""

from __future__ import annotations

import struct

KNOWN = "PNG, JPEG, GIF or BMP"
_PNG, _JPEG, _GIFS, _BMP = b"\x89PNG\r\n\x1a\n", b"\xff\xd8", (b"GIF87a", b"GIF89a"), b"BM"
_SIZES = (0xC0, 0xC1, 0xC2)
"""Markers of JPEG before the size: baseline, extended and progressive."""
_SKIPPED = (*range(0xE0, 0xF0), 0xC4, 0xDB, 0xDD, 0xFE)
"""Markers that may come earlier: application data, tables, restart intervals and comments."""


def pixels_in(data: bytes) -> int:
    """The number of pixels of an image. Raises ValueError if it has none of the known formats."""
    try:
        width, height = _size(data)
    except (struct.error, IndexError):
        raise ValueError("it is cut off") from None
    return abs(width * height)


def _size(data: bytes) -> tuple[int, int]:
    if data.startswith(_PNG):
        kind, width, height = struct.unpack_from(">4x4sII", data, len(_PNG))
        if kind != b"IHDR":
            raise ValueError("it does not begin with its size")
        return width, height
    if data.startswith(_GIFS):
        return _two("<HH", data, 6)
    if data.startswith(_BMP):
        (header,) = struct.unpack_from("<I", data, 14)
        return _two("<HH" if header == 12 else "<ii", data, 18)
    if data.startswith(_JPEG):
        return _jpeg_size(data)
    raise ValueError("its format is unknown")


def _jpeg_size(data: bytes) -> tuple[int, int]:
    at = len(_JPEG)
    while True:
        if data[at] != 0xFF:
            raise ValueError("it has data between its segments")
        while data[at] == 0xFF:
            at += 1
        marker, length = data[at], int.from_bytes(data[at + 1 : at + 3], "big")
        if marker in _SIZES:
            height, width = _two(">HH", data, at + 4)
            return width, height
        if marker not in _SKIPPED or length < 2:
            raise ValueError("it has an unknown segment before its size")
        at += 1 + length


def _two(layout: str, data: bytes, at: int) -> tuple[int, int]:
    first, second = struct.unpack_from(layout, data, at)
    return first, second
