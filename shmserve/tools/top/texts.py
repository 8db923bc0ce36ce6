"""Values as short texts for columns of fixed width, and lines as spans of styled text.

Invariant: texts are measured and cut by their width on a terminal, where a character may take two columns or none.
"""

from __future__ import annotations

from collections.abc import Mapping

from shmserve.terminal.tables import duration_text, resized, scaled_text, text_width

UNKNOWN = "n/a"
"""The source cannot know the value."""
NOTHING = "-"
"""There is no value: for example, no request was answered in the interval."""
Span = tuple[str, str]
"""Text and style: plain, dim, strong, good, warn, bad, bar or chosen. Styles only emphasize."""
Line = list[Span]


def count_text(value: float) -> str:
    """The count in at most six characters."""
    return f"{value:,.0f}" if abs(value) < 99_999.5 else scaled_text(value, ("", "k", "M", "G", "T", "P"), 1000)


def rate_text(value: float) -> str:
    if value == 0:
        return "0"
    if value < 9.995:
        return f"{value:.2f}"
    return f"{value:.1f}" if value < 999.95 else count_text(value)


def short_duration(seconds: float) -> str:
    return duration_text(seconds, gap="")


def bytes_text(value: float) -> str:
    """In at most six characters, in binary units."""
    return scaled_text(value, ("B", "K", "M", "G", "T", "P"), 1024)


def share_text(value: float) -> str:
    return f"{value * 100:.0f}%"


def reasons_text(reasons: Mapping[str, int]) -> str:
    """The reasons by frequency, with their shares."""
    total = sum(reasons.values())
    ordered = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    return " ".join(f"{reason} {share_text(count / total)}" for reason, count in ordered)


# ------------------------------------------------------------------------------------------ widths


def pad(text: str, width: int, right: bool = False) -> str:
    """Exactly `width` columns: padded, or cut with an ellipsis at the end."""
    missing = width - text_width(text)
    if missing < 0:
        return resized(text, width - 1) + "…" if width > 0 else ""
    return " " * missing + text if right else text + " " * missing


def fit(line: Line, width: int) -> Line:
    """The first `width` columns of a line."""
    results: Line = []
    for text, style in line:
        if text_width(text) > width:
            results.append((resized(text, width), style))
            break
        results.append((text, style))
        width -= text_width(text)
    return results


def line_width(line: Line) -> int:
    return sum(text_width(text) for text, _ in line)


def line_text(line: Line) -> str:
    return "".join(text for text, _ in line)
