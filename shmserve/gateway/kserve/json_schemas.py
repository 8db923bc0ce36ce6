"""Tensors of type BYTES whose elements are JSON, or files. The model's parameter json_schemas has their JSON schemas.

In JSON, such an element is the value itself, or the file in base64. Everything else treats it as text.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec
from msgspec import Struct

from shmserve.errors import InvalidRequest

PARAMETER = "json_schemas"
Schema = dict[str, Any]
_CACHED = 256
_encode = msgspec.json.Encoder().encode


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


def to_element(name: str, schema: Schema, value: Any) -> bytes:
    """The bytes of a JSON value. A file may be a data URL."""
    if not is_file(schema):
        return _encode(value)
    if type(value) is not str:
        raise InvalidRequest(f"input '{name}' is a file: its value must be a string in base64")
    text = value.partition(",")[2] if value.startswith("data:") else value
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"input '{name}' is a file, and its value is not base64: {error}") from None


def from_element(schema: Schema, element: bytes) -> msgspec.Raw:
    """The JSON value of the bytes."""
    return msgspec.Raw(b'"%b"' % base64.b64encode(element) if is_file(schema) else element)
