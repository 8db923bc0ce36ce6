"""Large typed contents (InferTensorContents) -> tensors, in slices. Invariant: protobuf never decodes them: it would
create an object per element, all in one step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from shmserve.dtypes import to_numpy
from shmserve.errors import InvalidRequest
from shmserve.gateway.grpc.wire import LENGTH_DELIMITED, field_at, number_at, varint
from shmserve.gateway.kserve.answers import Buffer
from shmserve.gateway.kserve.json_tensors import contents_field, wrong_contents
from shmserve.gateway.limits.turns import COPY_BYTES, SLICE_BYTES, SlicedWork
from shmserve.protocol.grpc.messages import unreadable

AROUND_BYTES = 1 << 20
"""Maximum size of a request without its tensors."""
_FIELDS = 4096
"""Maximum number of fields in a request, and in one of its inputs. The contents of an input count as one."""
_INPUT, _CONTENTS = 0x2A, 0x2A
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


class CutRequest(Struct):
    """`around`: the request with empty contents. `contents`: those of each input."""

    around: bytes
    contents: list[memoryview | None]


def cut(head: bytes) -> CutRequest:
    """Separates the contents of the inputs from the request."""
    request = CutRequest(b"", [])
    parts: list[bytes] = []
    try:
        for tag, begin, start, end in _fields(head, 0, len(head), _FIELDS):
            if tag == _INPUT:
                field, contents = _without_contents(head, start, end)
                parts.append(field)
                request.contents.append(contents)
            else:
                parts.append(head[begin:end])
    except IndexError:
        raise unreadable(_REQUEST) from None
    request.around = b"".join(parts)
    if len(request.around) > AROUND_BYTES:
        raise InvalidRequest(f"a request may have at most {AROUND_BYTES} bytes in addition to its tensors")
    return request


def _without_contents(head: bytes, start: int, end: int) -> tuple[bytes, memoryview | None]:
    parts: list[bytes] = []
    contents: memoryview | None = None
    for tag, begin, first, last in _fields(head, start, end, _FIELDS):
        if tag != _CONTENTS:
            parts.append(head[begin:last])
        elif contents is not None:
            raise unreadable(_REQUEST)
        else:
            contents = memoryview(head)[first:last]
            parts.append(b"\x2a\0")
    body = b"".join(parts)
    return b"\x2a" + varint(len(body)) + body, contents


def _fields(data: Buffer, at: int, end: int, limit: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields the tag and the start of each field, and the start and end of its value."""
    for _ in range(limit):
        if at == end:
            return
        tag, value, after = field_at(data, at)
        if after > end:
            raise unreadable(_REQUEST)
        yield tag, at, value, after
        at = after
    raise InvalidRequest(f"a request has more than {limit} fields")


# ---------------------------------------------------------------------------------------- elements


def to_bytes(name: str, dtype: str, contents: memoryview, limit: int) -> SlicedWork[bytearray]:
    """Converts the elements to the bytes of the tensor: up to `limit` bytes of numbers. Strings take at most twice
    their size in the message."""
    field = contents_field(name, dtype)
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
                raise wrong_contents(name, dtype, other)
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
        array = values != 0 if dtype == "BOOL" else values.astype(wide)
        narrow = array.astype(kind)
        if not np.array_equal(narrow, array):
            raise InvalidRequest(f"input '{name}': some of its data does not fit in {dtype}")
        converted += narrow.tobytes()
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
