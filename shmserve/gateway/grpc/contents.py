"""Typed contents (InferTensorContents) -> tensors. Invariant: protobuf never decodes large ones: it would create an
object per element, all in one step. They are cut out of the request and converted in slices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from shmserve.dtypes import to_numpy
from shmserve.errors import InvalidRequest
from shmserve.gateway.grpc.wire import LENGTH_DELIMITED, encoded_field, field_at, number_at
from shmserve.gateway.kserve.answers import Buffer
from shmserve.gateway.limits.turns import COPY_BYTES, SLICE_BYTES, SlicedWork
from shmserve.protocol.grpc.messages import unreadable
from shmserve.shm import strings

FIELDS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""Data type -> the field of InferTensorContents for its elements."""
AROUND_BYTES = 1 << 20
"""Maximum size of a request without its tensors."""
_MAX_FIELDS = 4096
"""Maximum number of fields in a request, and in one of its inputs. The contents of an input count as one."""
_INPUTS = _CONTENTS = 5
"""Numbers of the fields `inputs` of a request, and `contents` of an input."""
_TAG = _INPUTS << 3 | LENGTH_DELIMITED
_NUMBERS = {
    1: "bool_contents",
    2: "int_contents",
    3: "int64_contents",
    4: "uint_contents",
    5: "uint64_contents",
    6: "fp32_contents",
    7: "fp64_contents",
    8: "bytes_contents",
}
_WIDE = {"int_contents": np.dtype("int32"), "uint_contents": np.dtype("uint32")}
"""Element types of fields that also carry narrower types."""
_REQUEST = "ModelInferRequest"


# ---------------------------------------------------------------------------------------- small contents


def small_to_bytes(name: str, dtype: str, contents: Any) -> bytes:
    """The elements of a decoded InferTensorContents as the bytes of the tensor."""
    field = _field_of(name, dtype)
    for other in _NUMBERS.values():
        if other != field and len(getattr(contents, other)):
            raise _wrong_field(name, dtype, other)
    values = getattr(contents, field)
    if dtype == "BYTES":
        return bytes(strings.encode_bytes(np.array(list(values), object)))
    kind = to_numpy(dtype)
    array = np.fromiter(values, _WIDE.get(field, kind), len(values))
    return array.tobytes() if array.dtype == kind else _narrowed(name, dtype, array)


def _field_of(name: str, dtype: str) -> str:
    field = FIELDS.get(dtype)
    if field is None:
        raise InvalidRequest(f"input '{name}': {dtype} data cannot be given as contents; use raw_input_contents")
    return field


def _wrong_field(name: str, dtype: str, other: str) -> InvalidRequest:
    return InvalidRequest(f"input '{name}' is of {dtype}, whose elements are in {FIELDS[dtype]}, and {other} has some")


def _narrowed(name: str, dtype: str, array: npt.NDArray[Any]) -> bytes:
    narrow = array.astype(to_numpy(dtype))
    if not np.array_equal(narrow, array):
        raise InvalidRequest(f"input '{name}': some of its data does not fit in {dtype}")
    return narrow.tobytes()


# ---------------------------------------------------------------------------------------- large contents


class CutRequest(Struct):
    """`around`: the request with empty contents. `contents`: those of each input."""

    around: bytes
    contents: list[memoryview | None]


def cut(head: bytes) -> CutRequest:
    """Separates the contents of the inputs from the request."""
    parts: list[bytes] = []
    contents: list[memoryview | None] = []
    try:
        for tag, begin, start, end in _fields(head, 0, len(head)):
            if tag == _TAG:
                field, cut_out = _without_contents(head, start, end)
                parts.append(field)
                contents.append(cut_out)
            else:
                parts.append(head[begin:end])
    except IndexError:
        raise unreadable(_REQUEST) from None
    around = b"".join(parts)
    if len(around) > AROUND_BYTES:
        raise InvalidRequest(f"a request may have at most {AROUND_BYTES} bytes in addition to its tensors")
    return CutRequest(around, contents)


def _without_contents(head: bytes, start: int, end: int) -> tuple[bytes, memoryview | None]:
    parts: list[bytes] = []
    contents: memoryview | None = None
    for tag, begin, first, last in _fields(head, start, end):
        if tag != _TAG:
            parts.append(head[begin:last])
        elif contents is not None:
            raise unreadable(_REQUEST)
        else:
            contents = memoryview(head)[first:last]
            parts.append(encoded_field(_CONTENTS, b""))
    return encoded_field(_INPUTS, b"".join(parts)), contents


def _fields(data: Buffer, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields the tag and the start of each field, and the start and end of its value."""
    for _ in range(_MAX_FIELDS):
        if at == end:
            return
        tag, value, after = field_at(data, at)
        if after > end:
            raise unreadable(_REQUEST)
        yield tag, at, value, after
        at = after
    raise InvalidRequest(f"a request has more than {_MAX_FIELDS} fields")


def to_bytes(name: str, dtype: str, contents: memoryview, limit: int) -> SlicedWork[bytearray]:
    """Converts the elements to the bytes of the tensor: up to `limit` bytes of numbers. Strings take at most twice
    their size in the message."""
    field = _field_of(name, dtype)
    converted = bytearray()
    at = due = 0
    try:
        while at < len(contents):
            tag, size, value = contents[at], contents[at + 1], at + 2
            if tag > 127 or size > 127:
                tag, value = number_at(contents, at)
                size, value = number_at(contents, value)
            at = value + size
            other = _NUMBERS.get(tag >> 3)
            if tag & 7 != LENGTH_DELIMITED or at > len(contents) or other is None:
                raise unreadable(_REQUEST)
            if other != field:
                raise _wrong_field(name, dtype, other)
            if field == "bytes_contents":
                converted += size.to_bytes(4, "little") + contents[value:at]
                if len(converted) > due:
                    due = len(converted) + SLICE_BYTES // 4  # short strings take thousands of steps per slice
                    yield
            else:
                for _ in _packed(name, dtype, field, contents[value:at], converted):
                    if len(converted) > limit:
                        raise InvalidRequest(
                            f"input '{name}' exceeds {limit} bytes of {dtype}; raise --grpc-max-input-size"
                        )
                    yield
    except IndexError:
        raise unreadable(_REQUEST) from None
    return converted


def _packed(name: str, dtype: str, field: str, data: memoryview, converted: bytearray) -> SlicedWork[None]:
    kind = to_numpy(dtype)
    if field in ("fp32_contents", "fp64_contents"):
        if len(data) % kind.itemsize:
            raise unreadable(_REQUEST)
        for at in range(0, len(data), COPY_BYTES):
            converted += data[at : at + COPY_BYTES]
            yield
        return
    wide = _WIDE.get(field, kind)
    at = 0
    while at < len(data):
        part = np.frombuffer(data, np.uint8, min(SLICE_BYTES, len(data) - at), at)
        ends = np.flatnonzero(part < 128)
        if not len(ends):
            raise unreadable(_REQUEST)
        values = _varints(part, ends)
        converted += _narrowed(name, dtype, values != 0 if dtype == "BOOL" else values.astype(wide))
        at += int(ends[-1]) + 1
        yield


def _varints(part: npt.NDArray[np.uint8], ends: npt.NDArray[np.intp]) -> npt.NDArray[np.uint64]:
    starts = np.concatenate(([0], ends[:-1] + 1))
    lengths = ends - starts + 1
    longest = int(lengths.max())
    if longest > 10:
        raise unreadable(_REQUEST)
    values = (part[starts] & 127).astype(np.uint64)
    for place in range(1, longest):
        more = np.flatnonzero(lengths > place)
        values[more] |= (part[starts[more] + place] & 127).astype(np.uint64) << np.uint64(7 * place)
    return values
