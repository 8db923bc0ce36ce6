"""A configuration given with a load call instead of a file: JSON in Triton's form, validated as strictly as text.

Invariant: only ConfigError is raised, whatever the bytes, and every problem has its field path. Field names may be
snake_case or lowerCamelCase, enum names are case-insensitive, and numbers may be quoted.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NamedTuple

from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from shmserve.repo.config import protos
from shmserve.repo.config.lint import INTEGERS, expected
from shmserve.repo.config.outline import DEPTH, TOKENS, escaped
from shmserve.repo.config.problems import Report, decode_text, meant

OVERRIDE = "config override"
"""Takes the place of the file name in problems."""

_LARGEST_FP32 = float.fromhex("0x1.fffffep+127")
_FLOAT_WORDS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
_SIGNS = re.compile(r'"(?:[^"\\]|\\.)*"?|[][{},]', re.DOTALL)
_INTEGER = re.compile(r"-?[0-9]{1,20}", re.ASCII)


class Override(NamedTuple):
    """A configuration given with a load call; scan_model uses it instead of the file."""

    message: Message


class _Pairs(list[tuple[str, Any]]):
    """A JSON object as written, possibly with duplicate names."""


class _Refused(Exception):
    """The text may be valid JSON, but is not parsed."""


def parse_override(data: bytes | str) -> Override:
    """Parses the JSON. Raises ConfigError with all its problems."""
    report = Report(OVERRIDE)
    message = protos.new_config()
    text = decode_text(data, report)
    if text is not None:
        _parse(text, message, report)
    report.raise_problems()
    return Override(message)


def _parse(text: str, message: Message, report: Report) -> None:
    try:
        _look_over(text)
        value = json.loads(text, object_pairs_hook=_Pairs, parse_constant=_constant)
    except json.JSONDecodeError as error:
        report.problem("", f"not JSON: {error.msg}", (error.lineno, error.colno))
    except (_Refused, ValueError, RecursionError) as error:
        # ValueError: a number with too many digits.
        report.problem("", f"invalid JSON: {escaped(str(error), 200)}")
    else:
        if isinstance(value, _Pairs):
            _message(value, message, "", report)
        else:
            report.problem("", f"found {_named(value)}, expected {{ }} with the fields of a ModelConfig")


def _look_over(text: str) -> None:
    """Refuses deep nesting and too many values before anything is built."""
    depth = values = 0
    for match in _SIGNS.finditer(text):
        sign = match.group()
        if sign in "[{":
            depth += 1
            values += 1
        elif sign in "]}":
            depth -= 1
        elif sign == ",":
            values += 1
        if depth > DEPTH:
            raise _Refused(f"nested deeper than {DEPTH} levels")
        if values > TOKENS:
            raise _Refused(f"more than {TOKENS} values")


def _constant(word: str) -> Any:
    raise _Refused(f"{word} is not a JSON number; write it in quotes")


def _named(value: Any) -> str:
    """A value as shown in an error text."""
    if isinstance(value, _Pairs):
        return "{ }"
    if isinstance(value, list):
        return "[ ]"
    return escaped(json.dumps(value, ensure_ascii=False))


# ------------------------------------------------------------------------------------------- messages and fields


def _message(pairs: _Pairs, message: Message, path: str, report: Report) -> None:
    descriptor: Any = message.DESCRIPTOR
    fields = {field.camelcase_name: field for field in descriptor.fields} | dict(descriptor.fields_by_name)
    keys: dict[str, str] = {}
    for key, value in pairs:
        field = fields.get(key)
        if field is None:
            if not report.full:
                text = f"{protos.local_name(descriptor)} has no such field; {meant(key, descriptor.fields_by_name)}"
                report.problem(escaped(f"{path}.{key}" if path else key), text)
            continue
        inner = f"{path}.{field.name}" if path else field.name
        if value is None:
            continue
        group = field.containing_oneof.name if field.containing_oneof is not None else field.name
        earlier = keys.get(group)
        if earlier is None:
            keys[group] = key
            _field(value, message, field, inner, report)
        elif fields[earlier].name == field.name:
            report.problem(inner, "given twice")
        else:
            report.problem(inner, f'only one of "{earlier}" and "{key}" may be given')


def _field(value: Any, message: Message, field: protos.Field, path: str, report: Report) -> None:
    if protos.is_map(field):
        _map(value, message, field, path, report)
    elif protos.is_repeated(field):
        _list(value, message, field, path, report)
    elif field.message_type is not None:
        target = getattr(message, field.name)
        target.SetInParent()
        _block(value, target, path, report)
    else:
        scalar = _scalar(value, field, path, report)
        if scalar is not None:
            setattr(message, field.name, scalar)


def _list(value: Any, message: Message, field: protos.Field, path: str, report: Report) -> None:
    """As in Triton, a value that is not a list is a list of one."""
    items = value if isinstance(value, list) and not isinstance(value, _Pairs) else [value]
    target = getattr(message, field.name)
    for index, item in enumerate(items):
        inner = f"{path}[{index}]"
        if field.message_type is not None:
            _block(item, target.add(), inner, report)
        else:
            scalar = _scalar(item, field, inner, report)
            if scalar is not None:
                target.append(scalar)


def _map(value: Any, message: Message, field: protos.Field, path: str, report: Report) -> None:
    if not isinstance(value, _Pairs):
        report.problem(path, f'found {_named(value)}, expected {{ "key": value, .. }}')
        return
    target = getattr(message, field.name)
    entry = field.message_type.fields_by_name
    textual = entry["key"].cpp_type == FieldDescriptor.CPPTYPE_STRING
    seen: set[object] = set()
    for name, item in value:
        inner = f"{path}[{escaped(json.dumps(name, ensure_ascii=False)) if textual else escaped(name)}]"
        key = _scalar(name, entry["key"], inner, report)
        if key is None:
            continue
        if key in seen:
            report.problem(inner, "given twice")
        elif entry["value"].message_type is not None:
            _block(item, target[key], inner, report)
        else:
            scalar = _scalar(item, entry["value"], inner, report)
            if scalar is not None:
                target[key] = scalar
        seen.add(key)


def _block(value: Any, message: Message, path: str, report: Report) -> None:
    if isinstance(value, _Pairs):
        _message(value, message, path, report)
    else:
        report.problem(path, f"found {_named(value)}, expected {{ }} with {_inside(message.DESCRIPTOR)}")


def _inside(descriptor: Any) -> str:
    names = list(descriptor.fields_by_name)
    return f"the fields {', '.join(names[:4])}{', ..' if len(names) > 4 else ''}" if names else "nothing in it"


# ------------------------------------------------------------------------------------------------------- scalars


def _scalar(value: Any, field: protos.Field, path: str, report: Report) -> Any:
    """The value for protobuf; None, with a problem in the report, if invalid."""
    if field.enum_type is not None:
        return _enum(value, field.enum_type, path, report)
    kind = field.cpp_type
    scalar: Any = None
    if kind in INTEGERS:
        scalar = _integer(value)
        _, low, high = INTEGERS[kind]
        scalar = scalar if scalar is not None and low <= scalar <= high else None
    elif kind == FieldDescriptor.CPPTYPE_BOOL:
        scalar = value if isinstance(value, bool) else None
    elif kind == FieldDescriptor.CPPTYPE_STRING:
        scalar = value if isinstance(value, str) and _is_text(value) else None
    else:
        scalar = _float(value)
        if kind == FieldDescriptor.CPPTYPE_FLOAT and scalar is not None:
            scalar = scalar if not math.isfinite(scalar) or abs(scalar) <= _LARGEST_FP32 else None
    if scalar is None:
        report.problem(path, f"found {_named(value)}, expected {expected(field)}")
    return scalar


def _enum(value: Any, enum: EnumDescriptor, path: str, report: Report) -> int | None:
    if isinstance(value, str):
        for name, known in enum.values_by_name.items():
            if name.lower() == value.lower():
                return int(known.number)
        report.problem(path, f"found {_named(value)}, not a {enum.name}; {meant(value, enum.values_by_name)}")
        return None
    number = _integer(value)
    if number is None or number not in enum.values_by_number:
        report.problem(path, f"found {_named(value)}, expected one of {', '.join(enum.values_by_name)}")
        return None
    return number


def _integer(value: Any) -> int | None:
    """Accepts integers also as 8.0 and in quotes."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        return int(value) if _INTEGER.fullmatch(value) else None
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    return value if isinstance(value, int) else None


def _float(value: Any) -> float | None:
    if isinstance(value, str):
        if value in _FLOAT_WORDS:
            return _FLOAT_WORDS[value]
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    # JSON has no infinity: a literal such as 1e999 overflows.
    return number if math.isfinite(number) else None


def _is_text(value: str) -> bool:
    """False for an unpaired surrogate, which JSON can express and UTF-8 cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
