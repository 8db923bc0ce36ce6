"""Encodes and decodes string tensors: each element is a 4-byte little-endian length, followed by that many bytes.

Invariant: lengths from other processes are read from a private copy and checked before use.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from struct import error as StructError
from typing import Any

import numpy as np

from shmserve.dtypes import elements
from shmserve.errors import InvalidRequest

_length = Struct("<I")
_pack = _length.pack
_unpack_from = _length.unpack_from

Objects = np.ndarray[Any, np.dtype[np.object_]]


def encode_bytes(array: Any, other: Callable[[Any], str] | None = None) -> bytes:
    """Encodes the elements in C order: bytes, or str as UTF-8. Also accepts numpy arrays of kind S and U. `other`
    converts elements of any other type to str; without it, they raise InvalidRequest."""
    if not isinstance(array, np.ndarray):
        array = np.array(array, dtype=object)
    items = array.ravel().tolist()
    if set(map(type, items)) - {bytes}:
        for index, item in enumerate(items):
            if type(item) is not bytes:
                items[index] = _to_bytes(item, index, other)
    parts: list[bytes] = [b""] * (2 * len(items))
    try:
        parts[0::2] = map(_pack, map(len, items))
    except StructError:
        raise InvalidRequest(f"a string element of {max(map(len, items))} bytes exceeds the limit of 2^32-1") from None
    parts[1::2] = items
    return b"".join(parts)


def _to_bytes(item: Any, index: int, other: Callable[[Any], str] | None) -> bytes:
    if isinstance(item, str):
        try:
            return item.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"string element {index} cannot be sent as UTF-8: {error.reason}") from None
    if isinstance(item, (bytes, bytearray, memoryview)):
        return bytes(item)
    if other is not None:
        return _to_bytes(other(item), index, None)
    raise InvalidRequest(f"string element {index} is of type {type(item).__name__}; expected str or bytes")


def decode_bytes(buffer: Any, shape: tuple[int, ...], what: str = "") -> Objects:
    """Returns a read-only array of bytes objects. `what` names the tensor in errors, such as `inference input 'x' for
    model 'm'`."""
    if any(dim < 0 for dim in shape):
        raise InvalidRequest(f"shape {list(shape)} has a negative dim")
    expected = elements(shape)
    data = buffer if type(buffer) is bytes else bytes(buffer)
    items: list[bytes] = []
    append, unpack_from = items.append, _unpack_from
    at, end = 0, len(data)
    while at < end:
        start = at + 4
        if start > end:
            raise _truncated(what, len(items), expected, f"{end - at} of the 4 bytes of its length")
        (length,) = unpack_from(data, at)
        at = start + length
        if at > end:
            raise _truncated(what, len(items), expected, f"{end - start} of its {length} bytes")
        append(data[start:at])
    if len(items) != expected:
        raise _wrong_count(what, len(items), expected)
    array: Objects = np.empty(expected, dtype=object)
    array[:] = items
    try:
        array = array.reshape(shape)
    except (ValueError, OverflowError) as error:  # too many dims, or a dim of 0 and a huge one
        raise InvalidRequest(f"invalid shape {list(shape)}: {error}") from error
    array.flags.writeable = False
    return array


def _wrong_count(what: str, actual: int, expected: int) -> InvalidRequest:
    name = f" for {what}" if what else ""
    if actual < expected:
        return InvalidRequest(f"expected {expected} string elements{name}, got {actual}")
    return InvalidRequest(f"unexpected number of string elements {actual}{name}, expecting {expected}")


def _truncated(what: str, index: int, expected: int, there: str) -> InvalidRequest:
    name = f" for {what}" if what else ""
    if index >= expected:
        return InvalidRequest(f"unexpected bytes{name} after the last of {expected} string elements")
    return InvalidRequest(f"incomplete string element {index} of {expected}{name}: only {there} are present")
