"""The structure of a text-format file: blocks, fields and values with their positions.

protobuf's text_format defines what a file means, but it stops at the first error and does not keep positions. The
outline lets `load` report all errors at once, later rules name a line, and `edit` change single fields.

Invariant: the parser does not recurse, and it limits nesting before other code parses the text.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import NamedTuple

from msgspec import Struct

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

_CLOSER = {"{": "}", "<": ">", "[": "]"}


class Token(NamedTuple):
    """`kind` is word, number, string, symbol or end. `start` and `end` are offsets in the text."""

    kind: str
    text: str
    line: int
    column: int
    start: int
    end: int


class Field(NamedTuple):
    """A field as written. `listed`: `values` holds the items of a `[..]` list; otherwise it holds one item.

    The value extends from the offset `start` to `end`.
    """

    name: Token
    values: list[Token | OutlineBlock]
    listed: bool
    start: int
    end: int


class OutlineBlock(NamedTuple):
    """The fields between the braces `start` and `end`, or those of the whole file."""

    start: Token
    fields: list[Field]
    end: Token


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
            yield Token(kind, match.group(), line, match.start() - line_start + 1, *match.span())
        newlines = text.count("\n", match.start(), match.end())
        if newlines:
            line += newlines
            line_start = text.rindex("\n", match.start(), match.end()) + 1
    yield Token("end", "end of file", line, len(text) - line_start + 1, len(text), len(text))


class _TokenReader:
    """A token stream with one token of lookahead."""

    def __init__(self, text: str) -> None:
        self._tokens = tokens(text)
        self._remaining = TOKENS
        self.head = next(self._tokens)

    def take(self) -> Token:
        token = self.head
        if token.kind != "end":
            self._remaining -= 1
            if self._remaining < 0:
                raise OutlineError(token, f"more than {TOKENS} tokens", final=True)
            self.head = next(self._tokens)
        return token


class _Open(Struct):
    """An unclosed block or list. `field` is the name of the field being read: in a list, of the list itself."""

    start: Token
    closer: str
    fields: list[Field]
    values: list[Token | OutlineBlock]
    field: Token | None = None

    @property
    def listed(self) -> bool:
        return self.closer == "]"


def outline(text: str) -> OutlineBlock:
    """The file as a tree. Raises OutlineError if it is not text format."""
    reader = _TokenReader(text)
    opened = [_Open(Token("symbol", "", 1, 1, 0, 0), "", [], [])]
    root: OutlineBlock | None = None
    try:
        while root is None:
            root = _next(reader, opened)
    except OutlineError as error:
        error.trail = _trail(opened)
        raise
    return root


def _next(reader: _TokenReader, opened: list[_Open]) -> OutlineBlock | None:
    """Reads a token or a field. Returns the whole file at its end."""
    here = opened[-1]
    token = reader.take()
    if token.kind == "end" and not here.closer:
        return OutlineBlock(here.start, here.fields, token)
    if token.text == here.closer:
        opened.pop()
        _closed(here, token, opened[-1])
    elif token.kind == "end":
        start = here.start
        raise OutlineError(start, f'"{start.text}" is never closed: expected "{here.closer}" before the end of file')
    elif here.listed:
        _list_item(reader, token, opened)
    elif token.kind == "word":
        _field(reader, token, opened)
    elif token.text not in (",", ";"):
        raise OutlineError(
            token, f"found {_named(token)}, expected a field name{_or_closer(here)}{_suggestion(token, here.fields)}"
        )
    if len(opened) > DEPTH:
        raise OutlineError(token, f"nested deeper than {DEPTH} levels", final=True)
    return None


def _closed(ended: _Open, end: Token, outer: _Open) -> None:
    """Adds a complete block or list to what contains it."""
    if outer.listed:
        outer.values.append(OutlineBlock(ended.start, ended.fields, end))
        return
    assert outer.field is not None
    block: Token | OutlineBlock = OutlineBlock(ended.start, ended.fields, end)
    values = ended.values if ended.listed else [block]
    outer.fields.append(Field(outer.field, values, ended.listed, ended.start.start, end.end))
    outer.field = None


def _trail(opened: list[_Open]) -> tuple[tuple[str, int], ...]:
    trail = []
    for place, here in enumerate(opened):
        if here.listed or here.field is None:
            continue
        name = here.field.text
        index = sum(len(other.values) for other in here.fields if other.name.text == name)
        listed = opened[place + 1] if place + 1 < len(opened) else here
        trail.append((name, index + len(listed.values)))
    return tuple(trail)


def _suggestion(token: Token, fields: list[Field]) -> str:
    """A suggestion for a symbol or value in the place of a field name."""
    last = fields[-1].values[-1] if fields and fields[-1].values else None
    if not isinstance(last, Token):
        return ""
    if last.kind == "word" and last.end == token.start:
        return "; strings need quotes"
    return "; write several values as a list: [ 1, 2 ]" if token.kind in ("number", "string") else ""


def _field(reader: _TokenReader, name: Token, opened: list[_Open]) -> None:
    here = opened[-1]
    here.field = name
    colon = reader.head.text == ":"
    if colon:
        reader.take()
    token = reader.take()
    if token.text in _CLOSER:
        opened.append(_Open(token, _CLOSER[token.text], [], []))
    elif not colon:
        raise OutlineError(
            token, f'found {_named(token)} after "{escaped(name.text)}", expected ":" and a value or "{{"'
        )
    else:
        value = _scalar(reader, token)
        here.fields.append(Field(name, [value], False, value.start, value.end))
        here.field = None


def _list_item(reader: _TokenReader, token: Token, opened: list[_Open]) -> None:
    values = opened[-1].values
    if values:
        if token.text != ",":
            raise OutlineError(token, f'found {_named(token)} in a list, expected "," or "]"')
        token = reader.take()
    if token.text in ("{", "<"):
        opened.append(_Open(token, _CLOSER[token.text], [], []))
    else:
        values.append(_scalar(reader, token))


def _scalar(reader: _TokenReader, token: Token) -> Token:
    if token.text in ('"', "'"):
        raise OutlineError(token, "this string is not closed on its line")
    if token.kind not in ("word", "number", "string"):
        raise OutlineError(token, f"found {_named(token)}, expected a value")
    if token.kind == "string":
        pieces = [token]
        while reader.head.kind == "string":
            pieces.append(reader.take())
        token = token._replace(text=" ".join(piece.text for piece in pieces), end=pieces[-1].end)
    return token


def _named(token: Token) -> str:
    return escaped(token.text) if token.kind in ("end", "string") else f'"{escaped(token.text)}"'


def _or_closer(here: _Open) -> str:
    return f' or "{here.closer}"' if here.closer else ""
