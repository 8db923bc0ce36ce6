"""Help texts for a terminal of 24 lines and 80 columns, with one line for each option."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence

WIDTH = 80
WIDEST = 100
LEFT = 29
"""Maximum number of columns for option names."""


def width() -> int:
    return min(WIDEST, shutil.get_terminal_size((WIDTH, 24)).columns) or WIDTH


def rows(pairs: Sequence[tuple[str, str]], indent: int = 2) -> list[str]:
    """Names and their descriptions in two columns. Wrapped lines are indented like the first."""
    left = min(LEFT, max((len(name) for name, _ in pairs), default=0)) + indent + 2
    lines: list[str] = []
    for name, text in pairs:
        first = f"{' ' * indent}{name}"
        wrapped = textwrap.wrap(text, max(20, width() - left)) or [""]
        if len(first) + 2 > left:
            lines.append(first)
            first = ""
        lines += [f"{first if not number else '':<{left}}{line}".rstrip() for number, line in enumerate(wrapped)]
    return lines
