"""Text for the terminal: colour, and tables that fit its width.

Without a terminal, text has no colour and no maximum width, so that programs read whole lines. The styles use the basic
16 colours, which every terminal with colours has and its user can choose.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TextIO

from shmserve.terminal.tables import GAP, aligned, folded, table, text_width, visible

EMPTY = ("", "-")
"""Cells that count as empty."""
LEAST_NAME = 8
"""Minimum width of a column of names, even if the terminal is narrower."""
NARROWEST = 20
"""Minimum width of a column of free text; below it, the text is placed on separate lines."""
HOME, CLEAR, CLEAR_LINE, CLEAR_BELOW = "\x1b[H", "\x1b[2J", "\x1b[K", "\x1b[J"
NO_WRAP, WRAP = "\x1b[?7l", "\x1b[?7h"
HEAD, FAINT, GOOD, WARN, BAD = "bold", "dim", "green", "yellow", "bold red"
_CODES: Mapping[str, str] = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"}
_BELOW = "    "
"""Indents free text below its row."""
STATES: Mapping[str, str] = {
    "READY": GOOD,
    "ready": GOOD,
    "LOADING": WARN,
    "starting": WARN,
    "UNLOADING": WARN,
    "stopping": WARN,
    "backoff": BAD,
    "UNAVAILABLE": BAD,
    "failed": BAD,
    "not loaded": FAINT,
    "stopped": FAINT,
}


def is_colored(choice: bool | None, stream: TextIO) -> bool:
    """Precedence: --color and --no-color, NO_COLOR, FORCE_COLOR, whether `stream` is a terminal with colours."""
    if choice is not None:
        return choice
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and _has_capabilities()


def _has_capabilities() -> bool:
    return os.environ.get("TERM", "dumb") != "dumb"


class Column(NamedTuple):
    """`rank`: if the terminal is too narrow, columns with the highest rank are omitted first; 0: never. `free`: free
    text, which is wrapped or shown below the row. `style` returns the style of a cell for its text."""

    name: str
    right: bool = False
    rank: int = 0
    free: bool = False
    style: Callable[[str], str] | None = None


def state_style(text: str) -> str:
    """The style of a state. READY (degraded) is a warning, READY (asleep) is not."""
    word, _, note = text.partition(" (")
    style = STATES.get(word) or STATES.get(text, "")
    return WARN if note not in ("", "asleep)") and style == GOOD else style


def nonzero(style: str) -> Callable[[str], str]:
    """Styles cells that are neither 0 nor empty."""
    return lambda text: "" if text in ("0", "-", "") else style


def faint(text: str) -> str:
    return FAINT


class Screen:
    """The output of a command, by default standard output. `color`: the choice by --color or --no-color."""

    def __init__(self, color: bool | None = None, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._choice = color

    @property
    def stream(self) -> TextIO:
        return self._stream or sys.stdout

    @property
    def is_terminal(self) -> bool:
        return self.stream.isatty()

    @property
    def can_redraw(self) -> bool:
        """Whether the output is a terminal on which the cursor can be moved."""
        return self.is_terminal and _has_capabilities()

    @property
    def color(self) -> bool:
        return is_colored(self._choice, self.stream)

    @property
    def width(self) -> int | None:
        """The number of columns; None: no limit."""
        return self.size()[0] if self.is_terminal else None

    def size(self) -> tuple[int, int]:
        """Columns and rows, from COLUMNS and LINES, else from the terminal."""
        try:
            known = os.get_terminal_size(self.stream.fileno())
        except (OSError, ValueError):
            known = os.terminal_size((80, 24))
        if os.environ.get("COLUMNS") or os.environ.get("LINES"):
            known = shutil.get_terminal_size(known)
        return known.columns or 80, known.lines or 24

    def styled(self, text: str, style: str) -> str:
        """The text with the escape sequences of a style, e.g. "bold red". Without colour, returns it unchanged."""
        if not style or not text or not self.color:
            return text
        codes = ";".join(_CODES[word] for word in style.split())
        return "\n".join(f"\x1b[{codes}m{line}\x1b[0m" for line in text.split("\n"))

    def state(self, text: str) -> str:
        return self.styled(text, state_style(text))

    def wrapped(self, text: str, first: str, then: str, style: str = "") -> list[str]:
        """The lines of a text, wrapped on a terminal: the first prefixed with `first`, the others with `then`."""
        lines, width = text.split("\n"), self.width
        if width is not None:
            room = max(NARROWEST, width - max(len(first), len(then)))
            lines = [part for line in lines for part in folded(visible(line), room)]
        return [(then if number else first) + self.styled(line, style) for number, line in enumerate(lines)]

    def table(self, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> str:
        """The table as text. On a terminal, columns of free text that are empty in all rows are omitted. If the table
        is still too wide, free text moves below its row; then columns are omitted by rank, with a note about them."""
        shown = list(range(len(columns)))
        if self.width is not None:
            shown = [at for at in shown if not columns[at].free or any(row[at] not in EMPTY for row in rows)]
        if self.width is None and not self.color:
            right = [at for at, column in enumerate(columns) if column.right]
            return table([column.name for column in columns], rows, right)
        return self._fitted(columns, [[visible(cell) for cell in row] for row in rows], shown)

    def frame(self, text: str, again: bool) -> str:
        """The text as one frame of a display that is refreshed in place. `again`: overwrite the previous frame without
        clearing the screen, to avoid flicker. Cuts long lines, and lines beyond the height."""
        height = self.size()[1]
        lines = text.split("\n")
        if len(lines) >= height:
            lines[height - 2 :] = [self.styled(f"... {len(lines) - height + 2:,} more lines", FAINT)]
        body = "".join(f"{line}{CLEAR_LINE}\n" for line in lines)
        return f"{HOME if again else HOME + CLEAR}{NO_WRAP}{body}{WRAP}{CLEAR_BELOW}"

    def _fitted(self, columns: Sequence[Column], rows: Sequence[Sequence[str]], shown: list[int]) -> str:
        widths = [max(map(text_width, [column.name, *(row[at] for row in rows)])) for at, column in enumerate(columns)]
        limit, hidden, below = self.width, [], None
        if limit is not None and _least(columns, widths, shown) > limit:
            below = next((at for at in shown if columns[at].free), None)
            shown = [at for at in shown if at != below]
            for at in sorted(shown, key=lambda at: -columns[at].rank):
                if columns[at].rank and _least(columns, widths, shown) > limit:
                    shown.remove(at)
                    hidden.append(at)
        if limit is not None:  # free text gets the remaining width; without free text, the first column is folded
            flexible = next((at for at in shown if columns[at].free), shown[0])
            others = [at for at in shown if at != flexible]
            room = limit - sum(widths[at] + len(GAP) for at in others)
            widths[flexible] = max(min(widths[flexible], room), LEAST_NAME)
        lines = self._rendered(columns, rows, shown, widths, below)
        if hidden:
            names = ", ".join(columns[at].name for at in sorted(hidden))
            lines += self.wrapped(f"not shown in {limit} columns: {names}", "", "", FAINT)
        return "\n".join(lines)

    def _rendered(
        self,
        columns: Sequence[Column],
        rows: Sequence[Sequence[str]],
        shown: Sequence[int],
        widths: Sequence[int],
        below: int | None,
    ) -> list[str]:
        """The lines of the table. `below`: the column whose cells are placed on separate lines."""
        lines = self._row(columns, [column.name for column in columns], shown, widths, [HEAD] * len(columns))
        for row in rows:
            styles = [column.style(text) if column.style else "" for column, text in zip(columns, row, strict=True)]
            lines += self._row(columns, row, shown, widths, styles)
            if below is not None and row[below] not in EMPTY:
                lines += self.wrapped(row[below], _BELOW, _BELOW, styles[below])
        return lines

    def _row(
        self,
        columns: Sequence[Column],
        row: Sequence[str],
        shown: Sequence[int],
        widths: Sequence[int],
        styles: Sequence[str],
    ) -> list[str]:
        """The lines of one row: as many as its longest cell needs."""
        cells = [folded(row[at], widths[at]) for at in shown]
        lines = []
        for number in range(max(map(len, cells))):
            line, spaces = "", ""
            for at, parts in zip(shown, cells, strict=True):
                part = parts[number] if number < len(parts) else ""
                before, after = aligned(part, widths[at], columns[at].right)
                if part:
                    line += spaces + before + self.styled(part, styles[at])
                    spaces = ""
                else:
                    spaces += before
                spaces += after + GAP
            lines.append(line)
        return lines


def _least(columns: Sequence[Column], widths: Sequence[int], shown: Sequence[int]) -> int:
    """The minimum total width of these columns."""
    minimum = [min(widths[at], NARROWEST) if columns[at].free else widths[at] for at in shown]
    return sum(minimum) + len(GAP) * (len(minimum) - 1)
