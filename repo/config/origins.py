"""The origin of each configuration value: the file, a load call's override, a default, or the model itself.

Values are those of as_triton_json; a leaf is a scalar, a list of scalars, or an empty message or map. Paths are written
as in problems: `input[0].dims`, `parameters["x"].string_value`.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from google.protobuf import text_encoding
from google.protobuf.descriptor import FieldDescriptor

from shmserve.repo.config import protos
from shmserve.repo.config.schema import ModelConfig, as_triton_json

DEFAULT, MODEL = "default", "model"

_escape: Any = text_encoding.CEscape
_NOTHING = object()
"""Marks a missing value."""


class _Leaf(NamedTuple):
    """A leaf value. `alone`: it is the only field of its message, so giving the message gives the field."""

    path: str
    field: protos.Field
    value: Any
    written: Any
    completed: Any
    alone: bool


def origins(written: ModelConfig, final: ModelConfig, completed: ModelConfig, source: str) -> dict[str, str]:
    """The path of each leaf of `final` -> `source`, "default" or "model".

    The origin is `source` ("file", "override") for values in `written`, "default" for others in `completed`, and
    "model" for the rest of `final`.
    """
    leaves = _leaves(protos.CONFIG, "", as_triton_json(final), as_triton_json(written), as_triton_json(completed))
    return {leaf.path: _origin(leaf, source) for leaf in leaves}


# -------------------------------------------------------------------------------------------------------- leaves


def _leaves(descriptor: Any, path: str, value: Any, written: Any, completed: Any) -> Iterator[_Leaf]:
    """The leaves of a message."""
    for name, item in value.items():
        field = descriptor.fields_by_name[name]
        inner = f"{path}.{name}" if path else name
        explicit, filled = _of(written, name), _of(completed, name)
        alone = len(descriptor.fields) == 1
        for place, at, parts in _parts(field, inner, item):
            yield from _below(field, place, parts, _of(explicit, at), _of(filled, at), alone)


def _below(field: protos.Field, path: str, value: Any, written: Any, completed: Any, alone: bool) -> Iterator[_Leaf]:
    message = _message(field)
    if message is not None and value and isinstance(value, dict):
        yield from _leaves(message, path, value, written, completed)
    else:
        yield _Leaf(path, field, value, written, completed, alone)


def _parts(field: protos.Field, path: str, value: Any) -> Iterator[tuple[str, Any, Any]]:
    """The path, key and value of each item of a map or a list of messages; otherwise the value itself, with key
    None.
    """
    if protos.is_map(field) and value:
        textual = field.message_type.fields_by_name["key"].cpp_type == FieldDescriptor.CPPTYPE_STRING
        for key, item in value.items():
            yield f"{path}[{json.dumps(key, ensure_ascii=False) if textual else key}]", key, item
    elif protos.is_repeated(field) and field.message_type is not None and value:
        for index, item in enumerate(value):
            yield f"{path}[{index}]", index, item
    else:
        yield path, None, value


def _of(value: Any, key: Any) -> Any:
    if key is None:
        return value
    if isinstance(value, dict):
        return value.get(key, _NOTHING)
    return value[key] if isinstance(value, list) and key < len(value) else _NOTHING


def _message(field: protos.Field) -> Any:
    """The message type of a field or its items; None for scalars."""
    if protos.is_map(field):
        return field.message_type.fields_by_name["value"].message_type
    return field.message_type


def _origin(leaf: _Leaf, source: str) -> str:
    # Compare by repr, as nan is not equal to itself.
    value = repr(leaf.value)
    if repr(leaf.written) == value and (leaf.alone or not _is_default(leaf.field, leaf.value)):
        return source
    return DEFAULT if repr(leaf.completed) == value else MODEL


def _is_default(field: protos.Field, value: Any) -> bool:
    """Whether the value is protobuf's default."""
    if field.has_presence or (protos.is_map(field) and value not in ({}, [])):
        return False
    if field.enum_type is not None and isinstance(value, str):
        return bool(value == field.enum_type.values_by_number[0].name)
    return bool(value == type(value)())


# ---------------------------------------------------------------------------------------------------------- text


def as_text(final: ModelConfig, origins: Mapping[str, str]) -> str:
    """The configuration as a config.pbtxt, each value with its origin in a comment.

    Values that equal protobuf's default and were not given are omitted. Parsing the text gives the same configuration.
    """
    lines: list[str] = []
    _write(lines, protos.CONFIG, "", "", as_triton_json(final), origins)
    return "".join(f"{line}\n" for line in lines)


def _write(
    lines: list[str], descriptor: Any, path: str, indent: str, value: dict[str, Any], origins: Mapping[str, str]
) -> None:
    """Writes the fields of a message, one value per line."""
    for name, item in value.items():
        field = descriptor.fields_by_name[name]
        for place, key, part in _parts(field, f"{path}.{name}" if path else name, item):
            if protos.is_map(field):
                if key is not None:
                    _write_entry(lines, field, place, indent, key, part, origins)
            elif field.message_type is not None:
                if not (protos.is_repeated(field) and key is None):
                    _write_block(lines, name, field.message_type, place, indent, part, origins)
            elif not (_is_default(field, part) and origins.get(place, DEFAULT) in (DEFAULT, MODEL)):
                if protos.is_repeated(field):
                    if part:
                        listed = ", ".join(_scalar(field, one) for one in part)
                        lines.append(f"{indent}{name}: [ {listed} ]{_origin_comment(origins, place)}")
                else:
                    lines.append(f"{indent}{name}: {_scalar(field, part)}{_origin_comment(origins, place)}")


def _write_block(
    lines: list[str], name: str, message: Any, path: str, indent: str, value: dict[str, Any], origins: Mapping[str, str]
) -> None:
    inner: list[str] = []
    _write(inner, message, path, indent + "  ", value, origins)
    if inner:
        lines += [f"{indent}{name} {{", *inner, f"{indent}}}"]
    else:
        # The origin of the block's default values.
        first = next((leaf.path for leaf in _leaves(message, path, value, None, None)), path)
        lines.append(f"{indent}{name} {{ }}{_origin_comment(origins, first)}")


def _write_entry(
    lines: list[str], field: protos.Field, path: str, indent: str, key: str, value: Any, origins: Mapping[str, str]
) -> None:
    parts = field.message_type.fields_by_name
    inner = indent + "  "
    written = int(key) if parts["key"].cpp_type != FieldDescriptor.CPPTYPE_STRING else key
    lines += [f"{indent}{field.name} {{", f"{inner}key: {_scalar(parts['key'], written)}"]
    if parts["value"].message_type is not None:
        _write_block(lines, "value", parts["value"].message_type, path, inner, value, origins)
    else:
        lines.append(f"{inner}value: {_scalar(parts['value'], value)}{_origin_comment(origins, path)}")
    lines.append(f"{indent}}}")


def _origin_comment(origins: Mapping[str, str], path: str) -> str:
    origin = origins.get(path)
    return f"  # {origin}" if origin else ""


def _scalar(field: protos.Field, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return value if field.enum_type is not None else f'"{_escape(value, as_utf8=value.isprintable())}"'
    if isinstance(value, float) and math.isfinite(value) and field.cpp_type == FieldDescriptor.CPPTYPE_FLOAT:
        return _shortest(value)
    return repr(value)


def _shortest(value: float) -> str:
    """The shortest decimal that gives the same 32-bit float."""
    for digits in range(1, 10):
        text = f"{value:.{digits}g}"
        try:
            if struct.unpack("f", struct.pack("f", float(text)))[0] == value:
                return text
        except OverflowError:
            continue
    return repr(value)
