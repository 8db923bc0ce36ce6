"""Formats tables, arrays and numbers as human-readable text."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

GAP = "  "
FIRST = 6
"""Maximum number of array values to show."""
STRING = 40
"""Maximum number of characters of a string to show."""


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Aligns the columns, those in `right` to the right. Lines have no trailing spaces."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    texts = []
    for line in lines:
        cells = [
            text.rjust(width) if column in right else text.ljust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ]
        texts.append(GAP.join(cells).rstrip())
    return "\n".join(texts)


def shape_text(shape: Sequence[int]) -> str:
    """A shape in the server's notation, e.g. [2, 3]."""
    return f"[{', '.join(map(str, shape))}]"


def values_text(array: np.ndarray[Any, Any], first: int = FIRST) -> str:
    """The first values in row-major order, and the total number if not all are shown."""
    shown = " ".join(value_text(value) for value in array.reshape(-1)[:first].tolist())
    return f"{shown} ... ({array.size:,} values)" if array.size > first else shown or "(no values)"


def value_text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (bytes, str)):
        text = plain_text(value)
        return repr(text if len(text) <= STRING else text[: STRING - 3] + "...")
    return str(value)


def visible(text: str) -> str:
    """The text with control characters escaped, so that it cannot change colours or move the cursor."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def plain_text(value: bytes | str) -> str:
    """A string as text; bytes that are not valid UTF-8 are shown as \\xNN."""
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else value


def duration_text(seconds: float) -> str:
    """A duration in s with two decimals, or in ms or us with up to three significant digits."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    if seconds >= 0.001:
        ms = seconds * 1e3
        return f"{ms:.{max(0, 2 - int(math.log10(ms)))}f} ms"
    return f"{seconds * 1e6:.0f} us"


def bytes_text(size: int) -> str:
    """A size with up to three significant digits, in bytes or binary units up to TiB."""
    value, units = float(size), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1024
        del units[0]
    return f"{value:.{0 if value >= 99.95 or units[0] == 'bytes' else 1}f} {units[0]}"
