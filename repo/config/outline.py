"""The structure of a text-format file: blocks, fields and values with line and column.

protobuf's text_format defines what a file means, but it stops at the first error and does not keep positions. The
outline allows `load` to report all errors at once, and later rules to name a line.

Invariant: the parser does not recurse, and it limits nesting before other code parses the text.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import NamedTuple

DEPTH = 32
"""Maximum nesting of blocks. The schema itself needs eight."""
TOKENS = 100_000
"""Maximum number of tokens in a file."""

_TOKEN = re.compile(
    r"""
    (?P<space>[ \t\r\f\v\n]+ | \#[^\n]*)
  | (?P<word>[A-Za-z_][A-Za-z0-9_+-]*)
  | (?P<number>(?:[0-9+-]|\.[0-9])[A-Za-z0-9_.+-]*)
  | (?P<string>"(?:[^"\\\n]|\\.)*" | '(?:[^'\\\n]|\\.)*')
  | (?P<symbol>.)
    """,
    re.VERBOSE | re.DOTALL,
)

_CLOSER = {"{": "}", "<": ">"}


class Token(NamedTuple):
    """`kind` is word, number, string, symbol or end."""

    kind: str
    text: str
    line: int
    column: int


class Field(NamedTuple):
    """A field as written. `listed`: `values` holds the items of a `[..]` list; otherwise it holds one item."""

    name: Token
    values: list[Token | OutlineBlock]
    listed: bool


class OutlineBlock(NamedTuple):
    """The fields between braces, or those of the whole file."""

    start: Token
    fields: list[Field]


class OutlineError(Exception):
    """The text is not text format. `final`: the text must not be passed to another parser.

    `trail` is the path to the field that was being parsed: names from the root, each with its index among fields of
    that name.
    """

    def __init__(self, token: Token, text: str, final: bool = False) -> None:
        super().__init__(text)
        self.token = token
        self.text = text
        self.final = final
        self.trail: tuple[tuple[str, int], ...] = ()


def escaped(text: str, limit: int = 60) -> str:
    """Text for use in an error message: truncated, with control characters and line breaks escaped."""
    cut = text if len(text) <= limit else text[:limit] + "..."
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in cut)


def escaped_name(name: str, limit: int = 128) -> str:
    """As `escaped`, for a file name, which may not be valid UTF-8."""
    return escaped(os.fsencode(name).decode("utf-8", "backslashreplace"), limit)


def tokens(text: str) -> Iterator[Token]:
    """All tokens except white space and comments, then one of kind `end`."""
    line, line_start = 1, 0
    for match in _TOKEN.finditer(text):
        kind = str(match.lastgroup)
        if kind != "space":
            yield Token(kind, match.group(), line, match.start() - line_start + 1)
        newlines = text.count("\n", match.start(), match.end())
        if newlines:
            line += newlines
            line_start = text.rindex("\n", match.start(), match.end()) + 1
    yield Token("end", "end of file", line, len(text) - line_start + 1)


class _TokenReader:
    """A token stream with one token of lookahead."""

    def __init__(self, text: str) -> None:
        self._tokens = tokens(text)
        self._left = TOKENS
        self.head = next(self._tokens)

    def take(self) -> Token:
        token = self.head
        if token.kind != "end":
            self._left -= 1
            if self._left < 0:
                raise OutlineError(token, f"more than {TOKENS} tokens", final=True)
            self.head = next(self._tokens)
        return token


class _Open(NamedTuple):
    """An unclosed block or list. `field` is set for a list; `block` is the one that contains it."""

    block: OutlineBlock
    closer: str
    start: Token
    field: Field | None


def outline(text: str) -> OutlineBlock:
    """The file as a tree. Raises OutlineError if it is not text format."""
    reader = _TokenReader(text)
    root = OutlineBlock(Token("symbol", "", 1, 1), [])
    opened = [_Open(root, "", root.start, None)]
    try:
        while opened:
            _next(reader, opened)
    except OutlineError as error:
        error.trail = _trail(opened)
        raise
    return root


def _next(reader: _TokenReader, opened: list[_Open]) -> None:
    here = opened[-1]
    token = reader.take()
    if token.text == here.closer or (token.kind == "end" and not here.closer):
        opened.pop()
    elif token.kind == "end":
        start = here.start
        raise OutlineError(start, f'"{start.text}" is never closed: expected "{here.closer}" before the end of file')
    elif here.field is not None:
        _list_item(reader, token, here.field, opened)
    elif token.kind == "word":
        _field(reader, token, here.block, opened)
    elif token.text not in (",", ";"):
        raise OutlineError(
            token, f"found {_named(token)}, expected a field name{_or_closer(here)}{_rather(token, here.block)}"
        )
    if len(opened) > DEPTH:
        raise OutlineError(token, f"nested deeper than {DEPTH} levels", final=True)


def _trail(opened: list[_Open]) -> tuple[tuple[str, int], ...]:
    trail = []
    for place, here in enumerate(opened):
        if here.field is not None or not here.block.fields:
            continue
        field = here.block.fields[-1]
        if place + 1 < len(opened) or not field.values:
            name = field.name.text
            index = sum(len(other.values) for other in here.block.fields if other.name.text == name) - 1
            trail.append((name, max(index, 0)))
    return tuple(trail)


def _rather(token: Token, block: OutlineBlock) -> str:
    """A suggestion for a symbol or value in the place of a field name."""
    if not block.fields or not block.fields[-1].values:
        return ""
    last = block.fields[-1].values[-1]
    if isinstance(last, OutlineBlock):
        return ""
    if last.kind == "word" and (last.line, last.column + len(last.text)) == (token.line, token.column):
        return "; strings need quotes"
    return "; write several values as a list: [ 1, 2 ]" if token.kind in ("number", "string") else ""


def _field(reader: _TokenReader, name: Token, block: OutlineBlock, opened: list[_Open]) -> None:
    colon = reader.head.text == ":"
    if colon:
        reader.take()
    token = reader.take()
    field = Field(name, [], token.text == "[")
    block.fields.append(field)
    if field.listed:
        opened.append(_Open(block, "]", token, field))
    elif token.text in _CLOSER:
        _open_block(token, field, opened)
    elif not colon:
        raise OutlineError(
            token, f'found {_named(token)} after "{escaped(name.text)}", expected ":" and a value or "{{"'
        )
    else:
        field.values.append(_scalar(reader, token))


def _list_item(reader: _TokenReader, token: Token, field: Field, opened: list[_Open]) -> None:
    if field.values:
        if token.text != ",":
            raise OutlineError(token, f'found {_named(token)} in a list, expected "," or "]"')
        token = reader.take()
    if token.text in _CLOSER:
        _open_block(token, field, opened)
    else:
        field.values.append(_scalar(reader, token))


def _open_block(token: Token, field: Field, opened: list[_Open]) -> None:
    block = OutlineBlock(token, [])
    field.values.append(block)
    opened.append(_Open(block, _CLOSER[token.text], token, None))


def _scalar(reader: _TokenReader, token: Token) -> Token:
    if token.text in ('"', "'"):
        raise OutlineError(token, "this string is not closed on its line")
    if token.kind not in ("word", "number", "string"):
        raise OutlineError(token, f"found {_named(token)}, expected a value")
    if token.kind == "string":
        pieces = [token.text]
        while reader.head.kind == "string":
            pieces.append(reader.take().text)
        if len(pieces) > 1:
            token = token._replace(text=" ".join(pieces))
    return token


def _named(token: Token) -> str:
    return escaped(token.text) if token.kind in ("end", "string") else f'"{escaped(token.text)}"'


def _or_closer(here: _Open) -> str:
    return f' or "{here.closer}"' if here.closer else ""
