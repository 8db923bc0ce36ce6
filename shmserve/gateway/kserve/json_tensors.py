"""Tensors from and to JSON. Invariant: a number that the data type cannot represent is refused, never rounded to fit;
only floats lose precision."""

from __future__ import annotations

import codecs
import json
import math
from array import array as typed_array
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import msgspec
import numpy as np

from shmserve.dtypes import ITEM_BYTES, to_numpy
from shmserve.errors import InvalidRequest
from shmserve.gateway.kserve import json_values
from shmserve.gateway.kserve.json_outline import CutList
from shmserve.gateway.kserve.json_scan import JSON_DEPTH, Text
from shmserve.gateway.limits.turns import COPY_BYTES, SLICE_BYTES, SlicedWork
from shmserve.shm import strings

Buffer = bytes | bytearray | memoryview
_STRINGS = 4096
"""Maximum number of strings per slice of an output: short ones cost more than their size suggests."""
_BINARY_ONLY = ("FP16", "BF16")
_KINDS: dict[str, set[type]] = {"BOOL": {bool}, "BYTES": {str}, "FP32": {int, float}, "FP64": {int, float}}
_CODES = {
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "FP32": "f",
    "FP64": "d",
}
_VIEWS: dict[str, Any] = _CODES | {"BOOL": "?"}
"""Data type -> its type code in the modules array and struct, which convert few elements faster than numpy."""
_encode = msgspec.json.Encoder().encode


def to_bytes(name: str, dtype: str, shape: tuple[int, ...], data: Any) -> bytes:
    """The values of `data` as the bytes of the tensor."""
    _check_dtype(name, dtype)
    values = _flat(name, data)
    check_count(name, shape, len(values))
    return _converted(name, dtype, values)


def check_count(name: str, shape: tuple[int, ...], count: int) -> None:
    if count != math.prod(shape):
        raise _other_count(name, shape, str(count))


def cut_to_bytes(
    name: str, dtype: str, shape: tuple[int, ...], text: Text, cut: CutList, max_bytes: int
) -> SlicedWork[bytearray]:
    """The same for a list that was cut out of `text`. More than `max_bytes` bytes are refused."""
    _check_dtype(name, dtype)
    count, size = math.prod(shape), ITEM_BYTES[dtype] or 0
    if count * size > max_bytes:
        why = json_size_text(count * size, max_bytes, "--http-max-input-size")
        raise InvalidRequest(f"{why} Input '{name}' has the shape {list(shape)} and the data-type {dtype}.")
    decoded, data = 0, bytearray()
    string_at = -1
    """Offset in `data` of a string that arrives in parts."""
    for values in json_values.flat(name, text, cut):
        if values and type(values[0]) is json_values.StringPart:
            part = values[0]
            if dtype != "BYTES":
                raise _other_kind(name, dtype, {str})
            if string_at < 0:
                string_at = len(data)
                data += bytes(4)
            data += part.text.encode()
            if part.last:
                data[string_at : string_at + 4] = (len(data) - string_at - 4).to_bytes(4, "little")
                string_at = -1
            decoded += part.last
        else:
            decoded += len(values)
            data += _converted(name, dtype, values)
        if decoded > count:
            raise _other_count(name, shape, f"{decoded} or more")
        yield
    if decoded != count:
        raise _other_count(name, shape, str(decoded))
    return data


def json_size_text(size: int, limit: int, flag: str) -> str:
    return (
        f"request JSON size of {size} bytes exceeds the maximum allowed input size of {limit} bytes. Use {flag} to "
        "increase the limit."
    )


def _check_dtype(name: str, dtype: str) -> None:
    if dtype in _BINARY_ONLY:
        raise InvalidRequest(f"input '{name}': {dtype} data cannot be given as JSON; use the binary data extension")
    if dtype not in ITEM_BYTES:
        raise InvalidRequest(f"input '{name}' has the unknown data-type '{dtype}'")


def _other_count(name: str, shape: tuple[int, ...], actual: str) -> InvalidRequest:
    return InvalidRequest(
        f"Unable to parse 'data': Shape does not match true shape of 'data' field: input '{name}' of shape "
        f"{list(shape)} has {math.prod(shape)} elements, and {actual} are given"
    )


def _other_kind(name: str, dtype: str, wrong: set[type]) -> InvalidRequest:
    kind = _json_kind(dtype)
    return InvalidRequest(
        f"attempt to access JSON non-{kind} as {kind}: input '{name}' is of {dtype}, and some of its data is "
        f"{_json_names(wrong)}"
    )


def _converted(name: str, dtype: str, values: list[Any]) -> bytes:
    wrong = set(map(type, values)) - _KINDS.get(dtype, {int})
    if wrong:
        raise _other_kind(name, dtype, wrong)
    code = _CODES.get(dtype)
    if code is not None:
        try:
            return typed_array(code, values).tobytes()
        except OverflowError:
            pass  # numpy's error names the value
    try:
        if dtype == "BYTES":
            return bytes(strings.encode_bytes(np.array(values, object)))
        with np.errstate(over="ignore"):
            return np.array(values, to_numpy(dtype)).tobytes()
    except (OverflowError, ValueError) as error:
        raise InvalidRequest(f"input '{name}': some of its data does not fit in {dtype} ({error})") from error


def _flat(name: str, data: Any) -> list[Any]:
    """The values in order. The nesting need not match the shape, but all values must have the same depth."""
    values: list[Any] = data if type(data) is list else [data]
    for _ in range(JSON_DEPTH):
        kinds = set(map(type, values))
        if list not in kinds:
            return values
        if len(kinds) > 1:
            raise InvalidRequest(f"input '{name}': its 'data' mixes lists and values")
        values = list(chain.from_iterable(values))
    raise InvalidRequest(f"input '{name}': its 'data' is nested more than {JSON_DEPTH} levels deep")


def _json_kind(dtype: str) -> str:
    """Triton's name for the JSON type of the data type."""
    kinds = {"BOOL": "boolean", "BYTES": "string", "FP32": "double", "FP64": "double"}
    return kinds.get(dtype, "unsigned-integer" if dtype.startswith("U") else "signed-integer")


def _json_names(kinds: set[type]) -> str:
    names = {bool: "true or false", str: "a string", int: "an integer", float: "a number with a fraction"}
    return " or ".join(sorted(names.get(kind, "null" if kind is type(None) else "an object") for kind in kinds))


def to_json(name: str, dtype: str, shape: tuple[int, ...], data: Buffer) -> msgspec.Raw:
    """The values as one flat JSON list. Non-finite floats are written as NaN, Infinity and -Infinity."""
    if dtype in _BINARY_ONLY:
        raise InvalidRequest(f"output '{name}': {dtype} data cannot be sent as JSON; request it as binary data")
    if dtype == "BYTES":
        return msgspec.Raw(_encode(_texts(name, shape, data)))
    values = memoryview(data).cast(_VIEWS[dtype]).tolist()
    text = _encode(values)
    if b"n" in text:  # null, for a float that is not finite
        text = json.dumps(values, separators=(",", ":")).encode()
    return msgspec.Raw(text)


def to_json_in_slices(
    name: str, dtype: str, shape: tuple[int, ...], parts: Sequence[Buffer], hold: Callable[[int], None]
) -> SlicedWork[list[Buffer]]:
    """The same for a large tensor, in slices. Returns pieces without the brackets of the list. They are never joined,
    because that would copy all of them in one step. `hold` is called with the size of each piece, and may raise to
    abort."""
    pieces: list[Buffer] = []
    if dtype == "BYTES":
        for piece in _strings_in_slices(name, (yield from joined_in_slices(parts))):
            hold(len(piece))
            pieces.append(piece)
            yield
        return pieces
    data = parts[0] if len(parts) == 1 else (yield from joined_in_slices(parts))
    view = memoryview(data)
    item = to_numpy(dtype).itemsize if dtype not in _BINARY_ONLY else 1
    step = max(1, SLICE_BYTES // 2 // item) * item
    for at in range(0, len(view), step):
        text = memoryview(bytes(to_json(name, dtype, shape, view[at : at + step])))[1:-1]
        hold(len(text))
        pieces += [b",", text] if at else [text]
        yield
    return pieces


def joined_in_slices(parts: Sequence[Buffer]) -> SlicedWork[bytearray]:
    data = bytearray()
    for part in parts:
        for at in range(0, len(part), COPY_BYTES):
            data += memoryview(part)[at : at + COPY_BYTES]
            yield
    return data


def _strings_in_slices(name: str, data: Buffer) -> Iterator[bytes]:
    """JSON of several strings, or of a part of one that is longer than a slice."""
    at = 0
    while at < len(data):
        texts: list[str] = []
        until = at + SLICE_BYTES
        end = at
        while at < min(until, len(data)) and len(texts) < _STRINGS:
            end = at + 4 + int.from_bytes(data[at : at + 4], "little")
            if end - at > SLICE_BYTES:
                break
            texts.append(_text(name, data[at + 4 : end]))
            at = end
        if texts:
            yield _encode(texts)[1:-1] + (b"," if at < len(data) else b"")
        if at < end:
            yield from _string_in_slices(name, data, at + 4, end)
            at = end


def _string_in_slices(name: str, data: Buffer, begin: int, end: int) -> Iterator[bytes]:
    decode = codecs.getincrementaldecoder("utf-8")().decode
    for at in range(begin, end, SLICE_BYTES):
        last = at + SLICE_BYTES >= end
        try:
            text = decode(data[at : min(at + SLICE_BYTES, end)], last)
        except UnicodeDecodeError:
            raise _no_text(name) from None
        mark = (b'"' if at == begin else b""), (b'"' if last else b""), (b"," if last and end < len(data) else b"")
        yield mark[0] + _encode(text)[1:-1] + mark[1] + mark[2]


def _text(name: str, raw: Buffer) -> str:
    try:
        return str(raw, "utf-8")
    except UnicodeDecodeError:
        raise _no_text(name) from None


def _no_text(name: str) -> InvalidRequest:
    return InvalidRequest(
        f"output '{name}' has strings that are not UTF-8, which JSON cannot represent; request it as binary data"
    )


def _texts(name: str, shape: tuple[int, ...], data: Buffer) -> list[str]:
    try:
        return [item.decode() for item in strings.decode_bytes(data, shape).ravel().tolist()]
    except UnicodeDecodeError:
        raise _no_text(name) from None
