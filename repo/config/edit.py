"""Changes single fields of a config.pbtxt and leaves everything else as it is: comments, order, white space.

Invariant: only the text of the fields that are set or removed changes. The result is not validated here; parse it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec import Struct

from shmserve.repo.config.outline import Field, OutlineBlock, Token, outline, tokens

INDENT = "  "
_SEPARATOR = re.compile(r"[ \t]*[,;]")


class Edit(Struct, frozen=True):
    """Sets the field at `path` to `value`, in text format, or removes it if `value` is None. A path names fields from
    the root; of repeated blocks it means the first. ("parameters", key) is the string value of a parameter."""

    path: tuple[str, ...]
    value: str | None


class _Block(Struct):
    """What is between two braces, or the whole file."""

    start: int
    end: int
    fields: list[_Span]


class _Span(Struct):
    """A field in the text, from its name to the end of its value. `blocks`: several if the value is a list of them."""

    name: str
    start: int
    end: int
    value: int
    """Where the value begins."""
    blocks: list[_Block]


def edited(text: str, edits: Sequence[Edit]) -> str:
    """The text with these changes. Raises OutlineError if it is not text format."""
    for edit in edits:
        text = _parameter(text, edit) if edit.path[0] == "parameters" else _field(text, edit)
    return text


def _spans(text: str) -> _Block:
    """The file, with offsets instead of lines."""
    starts = [0, *(match.end() for match in re.finditer("\n", text))]
    found = [(starts[token.line - 1] + token.column - 1, token) for token in tokens(text)]
    ends: dict[int, int] = {}
    opened: list[int] = []
    for offset, token in found:
        if token.kind == "symbol" and token.text in "{<[":
            opened.append(offset)
        elif token.kind == "symbol" and token.text in "}>]" and opened:
            ends[opened.pop()] = offset

    def offset_of(token: Token) -> int:
        return starts[token.line - 1] + token.column - 1

    places = {offset: index for index, (offset, _) in enumerate(found)}

    def spans(block: OutlineBlock) -> list[_Span]:
        return [span(field) for field in block.fields]

    def span(field: Field) -> _Span:
        start = offset_of(field.name)
        place = places[start] + 1
        if found[place][1].text == ":":
            place += 1
        value, token = found[place]
        if token.kind == "symbol" and token.text in "{<[":
            end = ends[value] + 1
        else:
            while found[place + 1][1].kind == "string" and found[place][1].kind == "string":
                place += 1  # adjacent strings are one value
            end = found[place][0] + len(found[place][1].text)
        blocks = []
        for item in field.values:
            if isinstance(item, OutlineBlock):
                begin = offset_of(item.start)
                blocks.append(_Block(begin + 1, ends[begin], spans(item)))
        return _Span(field.name.text, start, end, value, blocks)

    return _Block(0, len(text), spans(outline(text)))


def _field(text: str, edit: Edit) -> str:
    block = _spans(text)
    for depth, name in enumerate(edit.path):
        found = [field for field in block.fields if field.name == name]
        if not found:
            return text if edit.value is None else _inserted(text, block, edit.path[depth:], edit.value, not depth)
        if depth + 1 == len(edit.path):
            return _replaced(text, found, edit.value)
        if not found[0].blocks:  # an empty list
            if edit.value is None:
                return text
            return _replaced(text, found, f"[ {{ {_written(edit.path[depth + 1 :], edit.value)} }} ]")
        block = found[0].blocks[0]
    return text


def _parameter(text: str, edit: Edit) -> str:
    key = edit.path[1]
    written = f'{{ key: "{key}" value: {{ string_value: {edit.value} }} }}'
    for field in _spans(text).fields:
        for block in field.blocks if field.name == "parameters" else ():
            inside = {inner.name: inner for inner in block.fields}
            if "key" not in inside or text[inside["key"].value : inside["key"].end].strip("\"'") != key:
                continue
            if edit.value is None and len(field.blocks) == 1:
                return _without(text, field)
            if edit.value is None:  # an element of a list
                return _without(text, _Span("", block.start - 1, block.end + 1, 0, []))
            values = inside["value"].blocks if "value" in inside else []
            if values and values[0].fields:
                old = values[0].fields[0]
                return text[: old.start] + f"string_value: {edit.value}" + text[old.end :]
            return text[: block.start - 1] + written + text[block.end + 1 :]
    return text if edit.value is None else _appended(text, f"parameters {written}")


def _replaced(text: str, found: Sequence[_Span], value: str | None) -> str:
    """Writes the value into the first of these fields and removes the others."""
    for field in reversed(found[1:]):
        text = _without(text, field)
    first = found[0]
    if value is None:
        return _without(text, first)
    colon = "" if ":" in text[first.start : first.value] or value.startswith(("{", "[")) else ":"
    return text[: first.value].rstrip(" ") + f"{colon} {value}" + text[first.end :]


def _without(text: str, field: _Span) -> str:
    """Removes a field, its separator, and its line if nothing is left there."""
    separator = _SEPARATOR.match(text, field.end)
    start, end = field.start, separator.end() if separator else field.end
    line_start = text.rfind("\n", 0, start) + 1
    line_end = text.find("\n", end)
    line_end = len(text) if line_end < 0 else line_end
    if not text[line_start:start].strip() and not text[end:line_end].strip():
        return text[:line_start] + text[line_end + 1 :]
    while end < len(text) and text[end] == " ":
        end += 1
    return text[:start] + text[end:]


def _inserted(text: str, block: _Block, path: Sequence[str], value: str, whole: bool) -> str:
    """Adds a field at the end of a block, or of the file."""
    written = _written(path, value)
    if whole:
        return _appended(text, written)
    line = text.rfind("\n", block.start, block.end) + 1
    if line and not text[line : block.end].strip():  # the closing brace has a line of its own
        indent = text[line : block.end] + INDENT
        if block.fields:
            first = block.fields[0].start
            before = text[text.rfind("\n", 0, first) + 1 : first]
            indent = indent if before.strip() else before
        return f"{text[:line]}{indent}{written}\n{text[line:]}"
    return f"{text[: block.start]}{text[block.start : block.end].rstrip()} {written} {text[block.end :]}"


def _appended(text: str, line: str) -> str:
    return text + ("\n" if text and not text.endswith("\n") else "") + line + "\n"


def _written(path: Sequence[str], value: str) -> str:
    """The text of a new field, and of the blocks around it, on one line."""
    text = f"{path[-1]} {value}" if value.startswith("{") else f"{path[-1]}: {value}"
    for name in reversed(path[:-1]):
        text = f"{name} [ {{ {text} }} ]" if name == "instance_group" else f"{name} {{ {text} }}"
    return text
