"""Text for the terminal: colour, and tables that fit its width.

Without a terminal, text has no colour and no maximum width, so that programs read whole lines. The same applies without
`rich`, which the extra `cli` installs. Invariant: `rich` is imported only for text with colour or a limited width.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from shmserve.terminal.tables import GAP, table, text_width, visible

if TYPE_CHECKING:
    from rich.console import Console

EMPTY = ("", "-")
"""Cells that count as empty."""
WIDEST = 100_000
"""Width of coloured text that is not for a terminal."""
MIN_NAME = 8
"""Minimum width of a column of names, even if the terminal is narrower."""
NARROWEST = 20
"""Minimum width of a column of free text; below it, the text is placed on separate lines."""
HOME, CLEAR, CLEAR_LINE, CLEAR_BELOW = "\x1b[H", "\x1b[2J", "\x1b[K", "\x1b[J"
NO_WRAP, WRAP = "\x1b[?7l", "\x1b[?7h"
HEAD, FAINT, GOOD, WARN, BAD = "bold", "dim", "green", "yellow", "bold red"
STATES: Mapping[str, str] = {
    "READY": GOOD,
    "ready": GOOD,
    "LOADING": WARN,
    "RELOADING": WARN,
    "UNLOADING": WARN,
    "DEGRADED": WARN,
    "starting": WARN,
    "waiting": WARN,
    "stopping": WARN,
    "backoff": BAD,
    "failed": BAD,
    "killed": BAD,
    "quarantined": BAD,
    "UNAVAILABLE": BAD,
    "not loaded": FAINT,
    "stopped": FAINT,
}
"""State of a version or an instance -> style."""


def is_colored(choice: bool | None, stream: TextIO) -> bool:
    """Precedence: --color and --no-color, NO_COLOR, FORCE_COLOR, whether `stream` is a terminal with colours."""
    if not _has_rich():
        return False
    if choice is not None:
        return choice
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and _has_capabilities()


def _has_capabilities() -> bool:
    return os.environ.get("TERM", "dumb") != "dumb"


@cache
def _has_rich() -> bool:
    return find_spec("rich") is not None


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
        self._console: Console | None = None

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
        return self.size()[0] if self.is_terminal and _has_rich() else None

    def size(self) -> tuple[int, int]:
        """Columns and rows, from COLUMNS and LINES, else from the terminal."""
        try:
            known = os.get_terminal_size(self.stream.fileno())
        except (OSError, ValueError):
            known = os.terminal_size((80, 24))
        if os.environ.get("COLUMNS") or os.environ.get("LINES"):
            known = shutil.get_terminal_size(known)
        return known.columns or 80, known.lines or 24

    def console(self) -> Console:
        """A console of rich with these colours, for progress and live displays, for which this class has no method."""
        from rich.console import Console

        return Console(
            file=self.stream,
            force_terminal=self.color or self.is_terminal,
            no_color=not self.color,
            color_system=("auto" if _has_capabilities() else "standard") if self.color else None,
            width=self.width,
            highlight=False,
            markup=False,
            emoji=False,
        )

    def styled(self, text: str, style: str) -> str:
        """The text with the escape sequences of a style, e.g. "bold red". Without colour, returns it unchanged."""
        if not style or not text or not self.color:
            return text
        from rich.style import Style

        system = self._rich()._color_system
        return "\n".join(Style.parse(style).render(line, color_system=system) for line in text.split("\n"))

    def state(self, text: str) -> str:
        return self.styled(text, state_style(text))

    def wrapped(self, text: str, first: str, then: str, style: str = "") -> list[str]:
        """The lines of a text, wrapped on a terminal: the first prefixed with `first`, the others with `then`."""
        lines, width = text.split("\n"), self.width
        if width is not None:
            room = max(NARROWEST, width - max(len(first), len(then)))
            lines = [part for line in lines for part in textwrap.wrap(visible(line), room) or [""]]
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

    # ------------------------------------------------------------------------------------ with rich

    def _rich(self) -> Console:
        if self._console is None:
            self._console = self.console()
        return self._console

    def _fitted(self, columns: Sequence[Column], rows: Sequence[Sequence[str]], shown: list[int]) -> str:
        widths = [max(map(text_width, [column.name, *(row[at] for row in rows)])) for at, column in enumerate(columns)]
        limit, hidden, below = self.width, [], None
        if limit is not None and _min_width(columns, widths, shown) > limit:
            below = next((at for at in shown if columns[at].free), None)
            shown = [at for at in shown if at != below]
            for at in sorted(shown, key=lambda at: -columns[at].rank):
                if columns[at].rank and _min_width(columns, widths, shown) > limit:
                    shown.remove(at)
                    hidden.append(at)
        if limit is not None:  # free text gets the remaining width; without free text, the first column is folded
            flexible = next((at for at in shown if columns[at].free), shown[0])
            others = [at for at in shown if at != flexible]
            room = limit - sum(widths[at] + len(GAP) for at in others)
            widths[flexible] = max(min(widths[flexible], room), MIN_NAME)
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
        from rich.padding import Padding
        from rich.table import Table
        from rich.text import Text

        def grid(header: bool, shown_rows: Sequence[Sequence[str]]) -> list[str]:
            result = Table(box=None, pad_edge=False, padding=(0, len(GAP), 0, 0), header_style=HEAD, show_header=header)
            for at in shown:
                justify: Any = "right" if columns[at].right else "left"
                result.add_column(Text(columns[at].name), justify=justify, width=widths[at], overflow="fold")
            for row in shown_rows:
                result.add_row(*(Text(row[at], _style(columns[at], row[at])) for at in shown))
            return self._lines(result, len(GAP))

        if below is None:
            return grid(True, rows)
        lines = grid(True, [])
        for row in rows:
            lines += grid(False, [row])
            if row[below] not in EMPTY:
                lines += self._lines(Padding(Text(row[below], _style(columns[below], row[below])), (0, 0, 0, 4)))
        return lines

    def _lines(self, renderable: Any, trailing: int = 0) -> list[str]:
        """The lines that rich renders, without trailing spaces. `trailing`: additional width for spaces that are cut,
        as rich counts the gap after the last column.
        """
        console = self._rich()
        options = console.options.update(width=(self.width or WIDEST) + trailing)
        results = []
        for line in console.render_lines(renderable, options, pad=False):
            while line and not line[-1].text.strip():
                line.pop()
            system = console._color_system
            results.append(
                "".join(part.style.render(part.text, color_system=system) if part.style else part.text for part in line)
            )
        return results


def _min_width(columns: Sequence[Column], widths: Sequence[int], shown: Sequence[int]) -> int:
    minimum = [min(widths[at], NARROWEST) if columns[at].free else widths[at] for at in shown]
    return sum(minimum) + len(GAP) * (len(minimum) - 1)


def _style(column: Column, text: str) -> str:
    return column.style(text) if column.style else ""
