"""Changes single fields of a config.pbtxt and leaves everything else as it is: comments, order, white space.

Invariant: only the text of the fields that are set or removed changes. The result is not validated here; parse it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import unified_diff

from msgspec import Struct

from shmserve.repo.config.outline import Field, OutlineBlock, outline

INDENT = "  "
_SEPARATOR = re.compile(r"[ \t]*[,;]")


class Edit(Struct, frozen=True):
    """Sets the field at `path` to `value`, in text format, or removes it if `value` is None. A path names fields from
    the root; of repeated blocks at the root it means the one with this index, of others the first. ("parameters", key)
    is the string value of a parameter, which can only be set.
    """

    path: tuple[str, ...]
    value: str | None
    index: int = 0


def edited(text: str, edits: Sequence[Edit]) -> str:
    """The text with these changes. Raises OutlineError if it is not text format."""
    for edit in edits:
        text = _parameter(text, edit.path[1], str(edit.value)) if edit.path[0] == "parameters" else _field(text, edit)
    return text


def unified(before: str, after: str, path: str) -> str:
    """The changes as a unified diff; empty if there are none."""
    names = (path, path) if path.startswith("/") else (f"a/{path}", f"b/{path}")
    lines = unified_diff(before.splitlines(), after.splitlines(), *names, lineterm="")
    return "\n".join(lines) + "\n" if before != after else ""


def _field(text: str, edit: Edit) -> str:
    block = outline(text)
    for depth, name in enumerate(edit.path):
        fields = [field for field in block.fields if field.name.text == name]
        if not fields:
            return text if edit.value is None else _inserted(text, block, edit.path[depth:], edit.value, not depth)
        if depth + 1 == len(edit.path):
            return _replaced(text, fields, edit.value)
        inner = [each for field in fields for each in _blocks(field)]
        if not inner:  # an empty list
            if edit.value is None:
                return text
            return _replaced(text, fields, f"[ {{ {_written(edit.path[depth + 1 :], edit.value)} }} ]")
        block = inner[0 if depth else edit.index]
    return text


def _blocks(field: Field) -> Iterator[OutlineBlock]:
    return (value for value in field.values if isinstance(value, OutlineBlock))


def _parameter(text: str, key: str, value: str) -> str:
    written = f'{{ key: "{key}" value: {{ string_value: {value} }} }}'
    for field in outline(text).fields:
        for block in _blocks(field) if field.name.text == "parameters" else ():
            inside = {inner.name.text: inner for inner in block.fields}
            if "key" not in inside or text[inside["key"].start : inside["key"].end].strip("\"'") != key:
                continue
            values = next(_blocks(inside["value"]), None) if "value" in inside else None
            if values is not None and values.fields:
                old = values.fields[0]
                return text[: old.name.start] + f"string_value: {value}" + text[old.end :]
            return text[: block.start.start] + written + text[block.end.end :]
    return _appended(text, f"parameters {written}")


def _replaced(text: str, fields: Sequence[Field], value: str | None) -> str:
    """Writes the value into the first of these fields and removes the others."""
    first, *others = fields
    for field in reversed(others):
        text = _without(text, field.name.start, field.end)
    if value is None:
        return _without(text, first.name.start, first.end)
    colon = "" if ":" in text[first.name.start : first.start] or value.startswith(("{", "[")) else ":"
    return text[: first.start].rstrip(" ") + f"{colon} {value}" + text[first.end :]


def _without(text: str, start: int, end: int) -> str:
    """Removes a field, its separator, and its line if nothing is left there."""
    separator = _SEPARATOR.match(text, end)
    end = separator.end() if separator else end
    line_start = text.rfind("\n", 0, start) + 1
    line_end = text.find("\n", end)
    line_end = len(text) if line_end < 0 else line_end
    if not text[line_start:start].strip() and not text[end:line_end].strip():
        return text[:line_start] + text[line_end + 1 :]
    while end < len(text) and text[end] == " ":
        end += 1
    return text[:start] + text[end:]


def _inserted(text: str, block: OutlineBlock, path: Sequence[str], value: str, whole: bool) -> str:
    """Adds a field at the end of a block, or of the file."""
    written = _written(path, value)
    if whole:
        return _appended(text, written)
    start, end = block.start.end, block.end.start
    line = text.rfind("\n", start, end) + 1
    if line and not text[line:end].strip():  # the closing brace has a line of its own
        indent = text[line:end] + INDENT
        if block.fields:
            first = block.fields[0].name.start
            before = text[text.rfind("\n", 0, first) + 1 : first]
            indent = indent if before.strip() else before
        return f"{text[:line]}{indent}{written}\n{text[line:]}"
    return f"{text[:start]}{text[start:end].rstrip()} {written} {text[end:]}"


def _appended(text: str, line: str) -> str:
    return text + ("\n" if text and not text.endswith("\n") else "") + line + "\n"


def _written(path: Sequence[str], value: str) -> str:
    """The text of a new field, and of the blocks around it, on one line."""
    text = f"{path[-1]} {value}" if value.startswith("{") else f"{path[-1]}: {value}"
    for name in reversed(path[:-1]):
        text = f"{name} [ {{ {text} }} ]" if name == "instance_group" else f"{name} {{ {text} }}"
    return text
