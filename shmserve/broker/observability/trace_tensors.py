"""Tensors in the trace file, in Triton's format: comma-separated numbers as text."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from shmserve.protocol.messages import Handle, Tensor

ELEMENTS = 1000
"""Maximum number of elements written per tensor, so that large tensors do not block the broker."""
STRING_BYTES = 65536
"""Maximum number of bytes written per string tensor."""
_CODES = {
    "BOOL": "?",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "FP16": "e",
    "FP32": "f",
    "FP64": "d",
    "BF16": "H",
}

Read = Callable[[tuple[Handle, ...]], bytes | None]
"""Returns the bytes of a tensor's parts; None for named segments and GPU memory, which the broker cannot read."""


def activities(number: int, activity: str, tensors: Iterable[Tensor], read: Read) -> Iterator[dict[str, Any]]:
    for tensor in tensors:
        shape = ",".join(map(str, tensor.shape))
        about = {"name": tensor.name, "data": _data(tensor, read), "shape": shape, "dtype": tensor.dtype}
        yield {"id": number, "activity": activity, "tensor": about}


def _data(tensor: Tensor, read: Read) -> str:
    """The first elements as text; "" if they cannot be read."""
    code = _CODES.get(tensor.dtype)
    maximum = struct.calcsize(f"<{ELEMENTS}{code}") if code else STRING_BYTES
    if isinstance(tensor.data, bytes):
        data: bytes | None = tensor.data[:maximum]
    else:
        assert not isinstance(tensor.data, int)
        data = read(_first(tensor.data, maximum))
    if not data:
        return ""
    if code is None:
        return ",".join(_strings(data))
    values: Iterable[Any] = struct.unpack(f"<{len(data) // struct.calcsize(f'<{code}')}{code}", data)
    if tensor.dtype == "BF16":
        values = [struct.unpack("<f", struct.pack("<I", value << 16))[0] for value in values]
    if tensor.dtype.startswith(("FP", "BF")):
        return ",".join(f"{value:g}" for value in values)
    return ",".join(str(int(value)) for value in values)


def _first(parts: tuple[Handle, ...], limit: int) -> tuple[Handle, ...]:
    handles = []
    for part in parts:
        if limit <= 0:
            break
        handles.append(part if part.size <= limit else Handle(part.segment, part.offset, limit))
        limit -= part.size
    return tuple(handles)


def _strings(data: bytes) -> Iterator[str]:
    at = 0
    while at + 4 <= len(data):
        (size,) = struct.unpack_from("<I", data, at)
        if at + 4 + size > len(data):
            return
        yield data[at + 4 : at + 4 + size].decode(errors="replace")
        at += 4 + size
