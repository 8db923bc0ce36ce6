"""Compares a file's outline with the schema. Reports each unknown field name and each invalid value with its position.

Invariant: text that protobuf accepts is never rejected here. Text that protobuf rejects may pass.
"""

from __future__ import annotations

import re

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor

from shmserve.repo.config import protos
from shmserve.repo.config.outline import Field, OutlineBlock, Token, escaped
from shmserve.repo.config.problems import Place, Report, meant, nearest

_BOOLS = ("true", "True", "t", "1", "false", "False", "f", "0")
_ELSEWHERE = {
    "half": "TYPE_FP16",
    "float16": "TYPE_FP16",
    "float": "TYPE_FP32",
    "float32": "TYPE_FP32",
    "double": "TYPE_FP64",
    "float64": "TYPE_FP64",
    "bfloat16": "TYPE_BF16",
    "bytes": "TYPE_STRING",
    "str": "TYPE_STRING",
    "int": "TYPE_INT32",
    "long": "TYPE_INT64",
    "byte": "TYPE_UINT8",
}
"""Data type names of other frameworks -> the name to suggest."""
_FLOAT_WORDS = ("inf", "infinity", "nan")
_OCTAL = re.compile(r"[+-]?0[0-7]+")
INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: ("int32", -(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: ("int64", -(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: ("uint32", 0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: ("uint64", 0, 2**64 - 1),
}
"""Field kind -> its name, minimum and maximum."""


def lint(root: OutlineBlock, report: Report) -> None:
    """Adds the positions of fields, the problems, and the duplicate map keys to the report."""
    _block(root, protos.CONFIG, "", report)


def _place(token: Token) -> Place:
    return (token.line, token.column)


def _block(block: OutlineBlock, message: Descriptor, path: str, report: Report) -> None:
    first: dict[str, Token] = {}
    counts: dict[str, int] = {}
    keys: dict[str, Token] = {}
    for field in block.fields:
        name = field.name.text
        inner = f"{path}.{name}" if path else name
        descriptor = message.fields_by_name.get(name)
        if descriptor is None:
            if not report.full:
                text = f"{protos.local_name(message)} has no such field; {meant(name, message.fields_by_name)}"
                report.problem(escaped(inner), text, _place(field.name))
            continue
        report.places.setdefault(inner, _place(field.name))
        if protos.is_map(descriptor):
            for value in field.values:
                _map_entry(value, descriptor, inner, keys, report)
        elif protos.is_repeated(descriptor):
            for value in field.values:
                index = counts.get(name, 0)
                counts[name] = index + 1
                _value(value, descriptor, f"{inner}[{index}]", report)
        else:
            _singular(field, descriptor, inner, first, report)


def _singular(field: Field, descriptor: FieldDescriptor, path: str, first: dict[str, Token], report: Report) -> None:
    token = field.name
    if field.listed:
        report.problem(path, "found a list, but the field takes one value, without [ ]", _place(token))
        return
    oneof = descriptor.containing_oneof
    group = oneof.name if oneof is not None else descriptor.name
    earlier = first.setdefault(group, token)
    if earlier is not token:
        if earlier.text == token.text:
            text = f"given twice, first on line {earlier.line}"
        else:
            text = f'only one of "{earlier.text}" (line {earlier.line}) and "{token.text}" may be given'
        report.problem(path, text, _place(token))
        return
    _value(field.values[0], descriptor, path, report)


def _value(value: Token | OutlineBlock, descriptor: FieldDescriptor, path: str, report: Report) -> None:
    token = value.start if isinstance(value, OutlineBlock) else value
    if path.endswith("]"):
        report.places.setdefault(path, _place(token))
    message = descriptor.message_type
    if isinstance(value, OutlineBlock):
        if message is None:
            report.problem(path, f"found a block, expected {expected(descriptor)}", _place(token))
        else:
            _block(value, message, path, report)
    elif message is not None:
        report.problem(
            path, f"found {escaped(token.text)}, expected a block in {{ }}{_as(token, message)}", _place(token)
        )
    else:
        wrong = _wrong(token, descriptor)
        if wrong:
            report.problem(path, wrong, _place(token))


def _as(token: Token, message: protos.Field) -> str:
    """A hint to write the value as a block, if the message has a single scalar field that can hold it."""
    if len(message.fields) != 1 or message.fields[0].message_type is not None:
        return ""
    field = message.fields[0]
    return "" if _wrong(token, field) else f", as in {{ {field.name}: {escaped(token.text)} }}"


def _map_entry(
    entry: Token | OutlineBlock, descriptor: protos.Field, path: str, keys: dict[str, Token], report: Report
) -> None:
    """Checks a map entry, a block with `key` and `value`. The path of the entry and of its value is `field["key"]`."""
    if isinstance(entry, Token):
        report.problem(path, f"found {escaped(entry.text)}, expected {{ key: .. value: .. }}", _place(entry))
        return
    fields = descriptor.message_type.fields_by_name
    key = next((field.values[0] for field in entry.fields if field.name.text == "key" and field.values), None)
    default = '""' if fields["key"].cpp_type == FieldDescriptor.CPPTYPE_STRING else "0"
    name = key.text if isinstance(key, Token) else default
    if name.startswith("'"):
        name = f'"{name[1:-1]}"'
    inner = f"{path}[{escaped(name)}]"
    report.places.setdefault(inner, _place(entry.start))
    if isinstance(key, Token):
        earlier = keys.setdefault(inner, key)
        if earlier is not key:
            report.repeated[inner] = earlier.line
            report.places[inner] = _place(key)
    first: dict[str, Token] = {}
    for field in entry.fields:
        known = fields.get(field.name.text)
        if known is None:
            if not report.full:
                text = f"a map entry has no such field; {meant(field.name.text, fields)}"
                report.problem(f"{inner}.{escaped(field.name.text)}", text, _place(field.name))
            continue
        _singular(field, known, inner, first, report)


def expected(descriptor: FieldDescriptor) -> str:
    """A description of the field's valid values."""
    if descriptor.enum_type is not None:
        return f"a value of {descriptor.enum_type.name}"
    kind = descriptor.cpp_type
    if kind in INTEGERS:
        name, minimum, maximum = INTEGERS[kind]
        return f"{name}, an integer from {minimum} to {maximum}"
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return "true or false"
    if kind == FieldDescriptor.CPPTYPE_STRING:
        return "a string in quotes"
    return "a number"


def _wrong(token: Token, descriptor: FieldDescriptor) -> str | None:
    """The text of the problem with a scalar value; None if the value is valid."""
    text = token.text
    if descriptor.enum_type is not None:
        return _wrong_enum(token, descriptor.enum_type)
    kind = descriptor.cpp_type
    if kind in INTEGERS:
        number = _integer(text)
        _, minimum, maximum = INTEGERS[kind]
        fine = number is not None and minimum <= number <= maximum
    elif kind == FieldDescriptor.CPPTYPE_BOOL:
        fine = text in _BOOLS or _integer(text) in (0, 1)
    elif kind == FieldDescriptor.CPPTYPE_STRING:
        fine = token.kind == "string"
    else:
        fine = token.kind != "string" and _is_number(text)
    return None if fine else f"found {escaped(text)}, expected {expected(descriptor)}{_rather(token, descriptor)}"


def _rather(token: Token, descriptor: FieldDescriptor) -> str:
    """A suggestion, if the intended value can be guessed."""
    bare = token.text.strip("\"'")
    if descriptor.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return f'; write "{escaped(bare)}"' if token.kind in ("word", "number") else ""
    if token.kind == "string" and bare and _wrong(token._replace(kind="word", text=bare), descriptor) is None:
        return f"; write {escaped(bare)} without quotes"
    if descriptor.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        near = nearest(bare, ("true", "false"))
        return f'; did you mean "{near}"?' if near else ""
    return ""


def _wrong_enum(token: Token, enum: EnumDescriptor) -> str | None:
    if token.text in enum.values_by_name:
        return None
    if token.kind == "number":
        number = _integer(token.text)
        if number is not None and number in enum.values_by_number:
            return None
    bare = token.text.strip("\"'")
    if token.kind == "string" and bare in enum.values_by_name:
        return f"found {escaped(token.text)}, expected {bare} without quotes"
    elsewhere = _ELSEWHERE.get(bare.lower().removeprefix("type_")) if enum.name == "DataType" else None
    hint = f'did you mean "{elsewhere}"?' if elsewhere else meant(bare, enum.values_by_name)
    return f"found {escaped(token.text)}, not a {enum.name}; {hint}"


def _integer(text: str) -> int | None:
    try:
        return int(text, 8 if _OCTAL.fullmatch(text) else 0)
    except ValueError:
        return None


def _is_number(text: str) -> bool:
    bare = text.lower().lstrip("+-")
    if bare in _FLOAT_WORDS:
        return True
    try:
        float(bare.removesuffix("f"))
    except ValueError:
        return _integer(text) is not None
    return True
