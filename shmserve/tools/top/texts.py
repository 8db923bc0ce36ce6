"""Values as short texts for columns of fixed width, and lines as spans of styled text.

Invariant: texts are measured and cut by their width on a terminal, where a character may take two columns or none.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence

UNKNOWN = "n/a"
"""The source cannot know the value."""
NOTHING = "-"
"""There is no value: for example, no request was answered in the interval."""
Span = tuple[str, str]
"""Text and style: plain, dim, strong, good, warn, bad, bar or chosen. Styles only emphasize."""
Line = list[Span]

_UNITS = ("B", "K", "M", "G", "T", "P")


def count_text(value: float) -> str:
    """The count in at most six characters."""
    return f"{value:,.0f}" if abs(value) < 99_999.5 else _short(value, ("", "k", "M", "G", "T", "P"), 1000)


def rate_text(value: float) -> str:
    if value == 0:
        return "0"
    if value < 9.995:
        return f"{value:.2f}"
    return f"{value:.1f}" if value < 999.95 else count_text(value)


def duration_text(seconds: float) -> str:
    """In at most six characters, with up to three significant digits."""
    for factor, unit in ((1e6, "us"), (1e3, "ms"), (1, "s")):
        value = seconds * factor
        if value < 9.995 and unit != "us":
            return f"{value:.2f}{unit}"
        if value < 99.95 and unit != "us":
            return f"{value:.1f}{unit}"
        if value < 999.5 and not (unit == "s" and value >= 99.95):
            return f"{value:.0f}{unit}"
    minutes = int(seconds // 60)
    if minutes < 100:
        return f"{minutes}m{int(seconds % 60):02d}s"
    hours = minutes // 60
    return f"{hours}h{minutes % 60:02d}m" if hours < 100 else f"{hours // 24}d"


def bytes_text(value: float) -> str:
    """In at most six characters, in binary units."""
    return _short(value, _UNITS, 1024)


def share_text(value: float) -> str:
    return f"{value * 100:.0f}%"


def reasons_text(reasons: Mapping[str, int]) -> str:
    """The reasons by frequency, with their shares."""
    total = sum(reasons.values())
    ordered = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    return " ".join(f"{reason} {share_text(count / total)}" for reason, count in ordered)


def _short(value: float, units: Sequence[str], step: int) -> str:
    for unit in units:
        if abs(value) < 999.5 or unit == units[-1]:
            break
        value /= step
    decimals = 0 if unit == units[0] or abs(value) >= 99.95 else 1
    return f"{value:.{decimals}f}{unit}"


# ------------------------------------------------------------------------------------------ widths


def text_width(text: str) -> int:
    """Number of terminal columns that the text takes."""
    return len(text) if text.isascii() else sum(map(_char_width, text))


def pad(text: str, width: int, right: bool = False) -> str:
    """Exactly `width` columns: padded, or cut with an ellipsis at the end."""
    missing = width - text_width(text)
    if missing < 0:
        text = _cut(text, width - 1) + "…" if width > 0 else ""
        missing = width - text_width(text)
    return " " * missing + text if right else text + " " * missing


def fit(line: Line, width: int) -> Line:
    """The first `width` columns of a line."""
    found: Line = []
    for text, style in line:
        if text_width(text) > width:
            found.append((_cut(text, width), style))
            break
        found.append((text, style))
        width -= text_width(text)
    return found


def line_width(line: Line) -> int:
    return sum(text_width(text) for text, _ in line)


def line_text(line: Line) -> str:
    return "".join(text for text, _ in line)


def _cut(text: str, width: int) -> str:
    if text.isascii():
        return text[:width]
    for place, char in enumerate(text):
        width -= _char_width(char)
        if width < 0:
            return text[:place]
    return text


def _char_width(char: str) -> int:
    if unicodedata.category(char) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in ("W", "F") else 1
