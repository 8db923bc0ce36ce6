"""Formats tables, arrays and numbers as human-readable text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache
from importlib.util import find_spec
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
    widths = [max(text_width(line[column]) for line in lines) for column in range(len(head))]
    texts = []
    for line in lines:
        cells = []
        for column, (text, width) in enumerate(zip(line, widths, strict=True)):
            spaces = " " * (width - text_width(text))
            cells.append(spaces + text if column in right else text + spaces)
        texts.append(GAP.join(cells).rstrip())
    return "\n".join(texts)


def shape_text(shape: Sequence[int]) -> str:
    """A shape in the server's notation, e.g. [2, 3]."""
    return f"[{', '.join(map(str, shape))}]"


def values_text(array: np.ndarray[Any, Any]) -> str:
    """The first values in row-major order, and the total number if not all are shown."""
    shown = " ".join(value_text(value) for value in array.reshape(-1)[:FIRST].tolist())
    return f"{shown} ... ({array.size:,} values)" if array.size > FIRST else shown or "(no values)"


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


def duration_text(seconds: float, gap: str = " ") -> str:
    """A duration with up to three significant digits, or in minutes, hours or days. `gap`: before the unit; without it,
    the text has at most six characters."""
    for factor, unit in ((1e6, "us"), (1e3, "ms"), (1, "s")):
        value = seconds * factor
        if value < 9.995 and unit != "us":
            return f"{value:.2f}{gap}{unit}"
        if value < 99.95 and unit != "us":
            return f"{value:.1f}{gap}{unit}"
        if value < 999.5 and unit != "s":
            return f"{value:.0f}{gap}{unit}"
    minutes = int(seconds // 60)
    if minutes < 100:
        return f"{minutes}m{int(seconds % 60):02d}s"
    hours = minutes // 60
    return f"{hours}h{minutes % 60:02d}m" if hours < 100 else f"{hours // 24}d"


def bytes_text(size: int) -> str:
    """A size with up to three significant digits, in bytes or binary units up to TiB."""
    return scaled_text(size, (" bytes", " KiB", " MiB", " GiB", " TiB"), 1024)


def scaled_text(value: float, units: Sequence[str], step: int) -> str:
    """The value in the largest of the units, each `step` times the last, of which it has at least one."""
    for unit in units:
        if abs(value) < 999.5 or unit == units[-1]:
            break
        value /= step
    decimals = 0 if unit == units[0] or abs(value) >= 99.95 else 1
    return f"{value:.{decimals}f}{unit}"


# ------------------------------------------------------------------------------------------ widths


def text_width(text: str) -> int:
    """Number of terminal columns that the text takes. Without `rich`, each character takes one."""
    return len(text) if text.isascii() else _cells()[0](text)


def resized(text: str, width: int) -> str:
    """The text cut or padded to this number of columns."""
    return text[:width].ljust(width) if text.isascii() else _cells()[1](text, width)


@cache
def _cells() -> tuple[Callable[[str], int], Callable[[str, int], str]]:
    if find_spec("rich") is None:
        return len, lambda text, width: text[:width].ljust(width)
    from rich.cells import cell_len, set_cell_size

    return cell_len, set_cell_size
