"""Reads the text format of Prometheus, as far as a live view needs it: names, labels and values of samples."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")
_ESCAPES = {"n": "\n"}

Sample = tuple[str, dict[str, str], float]


def samples(text: str, wanted: Collection[str]) -> Iterator[Sample]:
    """The samples with these names. All other lines, including invalid ones, are skipped."""
    for line in text.splitlines():
        end = line.find("{")
        name = line[:end] if end >= 0 else line.partition(" ")[0]
        if name not in wanted:
            continue
        inside, closing, rest = line[end + 1 :].rpartition("}") if end >= 0 else ("", "}", line[len(name) :])
        try:
            value = float(rest.split()[0])
        except (ValueError, IndexError):
            continue
        if closing:
            yield name, {key: _ESCAPED.sub(_unescape, raw) for key, raw in _LABEL.findall(inside)}, value


def _unescape(match: re.Match[str]) -> str:
    return _ESCAPES.get(match[1], match[1])
