"""Tensors of type BYTES whose elements are JSON, or files. The model's parameter json_schemas has their JSON schemas.

In JSON, such an element is the value itself, or the file in base64. Everything else treats it as text.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import msgspec
from msgspec import Struct

from shmserve.errors import InvalidRequest
from shmserve.gateway.kserve.answers import Buffer
from shmserve.gateway.limits.turns import SLICE_BYTES, SlicedWork

PARAMETER = "json_schemas"
Schema = dict[str, Any]
_CACHED = 256
_STEP = 3 * (SLICE_BYTES // 4)
"""Three bytes are four characters of base64."""
_TEXT_WORK = 16
"""A text takes as long as this many bytes of it."""


class JsonSchemas(Struct, frozen=True):
    """Schemas by the names of tensors. `components`: schemas that these refer to as #/components/schemas/NAME."""

    inputs: dict[str, Schema] = {}
    outputs: dict[str, Schema] = {}
    components: dict[str, Schema] = {}


_NONE = JsonSchemas()


def schemas_of(config: Mapping[str, Any]) -> JsonSchemas:
    """Raises InvalidRequest for a parameter that is not valid."""
    parameter = config.get("parameters", {}).get(PARAMETER)
    return _NONE if parameter is None else _decoded(parameter.get("string_value", ""))


@lru_cache(_CACHED)
def _decoded(text: str) -> JsonSchemas:
    try:
        return msgspec.json.decode(text, type=JsonSchemas)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the parameter {PARAMETER} of the model is not valid: {error}") from None


def is_file(schema: Schema) -> bool:
    return "contentEncoding" in schema


def append_file(name: str, value: Any, data: bytearray) -> SlicedWork[None]:
    """Appends the element of a file, whose value is base64 or a data URL, to the data of the tensor."""
    if type(value) is not str:
        raise InvalidRequest(f"input '{name}' is a file: its value must be a string in base64")
    begin = value.find(",") + 1 if value.startswith("data:") else 0
    size_at = len(data)
    data += bytes(4)
    try:
        if "=" in value[begin:-2]:
            raise ValueError("it ends before its last character")
        for at in range(begin, len(value), SLICE_BYTES):
            data += base64.b64decode(value[at : at + SLICE_BYTES], validate=True)
            yield
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"input '{name}' is a file, and its value is not base64: {error}") from None
    data[size_at : size_at + 4] = (len(data) - size_at - 4).to_bytes(4, "little")


def from_element(schema: Schema, element: bytes) -> msgspec.Raw:
    """The JSON value of the bytes."""
    return msgspec.Raw(b'"%b"' % base64.b64encode(element) if is_file(schema) else element)


def elements_in_slices(schema: Schema, data: Buffer, hold: Callable[[int], None]) -> SlicedWork[list[Buffer]]:
    """The JSON values of all elements, with commas between them, in pieces. `hold` is called with the size of each
    piece, and may raise to abort."""
    pieces: list[Buffer] = []
    texts: list[bytes] = []
    size = 0
    for text in _texts(schema, memoryview(data)):
        texts.append(text)
        size += len(text) + _TEXT_WORK
        if size >= SLICE_BYTES:
            pieces.append(b"".join(texts))
            hold(len(pieces[-1]))
            texts, size = [], 0
            yield
    return [*pieces, b"".join(texts)]


def _texts(schema: Schema, data: memoryview) -> Iterator[bytes]:
    encode, quote = (base64.b64encode, b'"') if is_file(schema) else (bytes, b"")
    at = 0
    while at < len(data):
        yield b"," + quote if at else quote
        begin = at + 4
        at = begin + int.from_bytes(data[at:begin], "little")
        for start in range(begin, at, _STEP):
            yield encode(data[start : min(start + _STEP, at)])
        yield quote
