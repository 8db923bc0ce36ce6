"""A widget that shows rows of a table, with a cursor. Only the lines on the screen are rendered."""

from __future__ import annotations

from typing import Any, ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from shmserve.protocol.rates import Row
from shmserve.tools.top.columns import ColumnLayout, TopColumn, TopTable, choose, heading, spans
from shmserve.tools.top.texts import Line, pad

STYLES = {
    "plain": Style(),
    "dim": Style(dim=True),
    "strong": Style(bold=True),
    "good": Style(color="green"),
    "warn": Style(color="yellow"),
    "bad": Style(color="red", bold=True),
    "bar": Style(color="cyan"),
    "chosen": Style(reverse=True),
}
"""Colours are from the terminal's palette, so they suit its background."""
HEAD = Style(bold=True, color="cyan")
SORTED = HEAD + Style(reverse=True)
CURSOR = Style(reverse=True)
NO_CURSOR = Style(bold=True)
"""Style of the selected row while the table does not have the focus."""


def strip_of(line: Line, width: int) -> Strip:
    return Strip([Segment(text, STYLES[style]) for text, style in line]).adjust_cell_length(width)


class TableView(ScrollView):
    """The rows of one table. The cursor stays on its row while other rows appear, disappear and move."""

    can_focus = True

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown", "page(1)", show=False),
        Binding("home,g", "move(-1000000000)", show=False),
        Binding("end,G", "move(1000000000)", show=False),
        Binding("enter", "open", show=False),
    ]

    class Opened(Message):
        """Posted to show the selected row in detail."""

    class Moved(Message):
        """Posted when another row is selected."""

    class HeadClicked(Message):
        def __init__(self, column: TopColumn) -> None:
            self.column = column
            super().__init__()

    def __init__(self, table: TopTable, **options: Any) -> None:
        super().__init__(**options)
        self.table = table
        self.rows: list[Row] = []
        self.cursor = 0
        self._layout = ColumnLayout((), ())
        self._arranged_for = 0
        """The width for which the columns were chosen."""
        self._unknown: frozenset[str] = frozenset()
        self._sorted = ""
        self._empty = ""

    @property
    def selected(self) -> Row | None:
        return self.rows[self.cursor] if self.rows else None

    def show(self, table: TopTable, rows: list[Row], unknown: frozenset[str], sorted_by: str, empty: str) -> None:
        """`empty`: text to show if there are no rows."""
        before = self.selected if table is self.table else None
        place = self.cursor if table is self.table else 0
        self.table, self.rows, self._unknown = table, rows, unknown
        self._sorted, self._empty = sorted_by, empty
        identity = table.identity_of(before) if before is not None else None
        places = [number for number, row in enumerate(rows) if table.identity_of(row) == identity]
        self.cursor = places[0] if places else max(0, min(place, len(rows) - 1))
        self._arrange()
        if places and places[0] != place:
            self._reveal()

    def on_resize(self, event: events.Resize) -> None:
        self._arrange()
        self._reveal()

    def _arrange(self) -> None:
        self._arranged_for = 0
        self.virtual_size = Size(self.scrollable_content_region.width, len(self.rows) + 1)
        self.refresh()

    @property
    def layout_of_columns(self) -> ColumnLayout:
        """The layout for the current width, which changes when the scrollbar appears or disappears."""
        width = max(1, self.scrollable_content_region.width)
        if width != self._arranged_for:
            self._layout, self._arranged_for = choose(self.table, self.rows, width, self._unknown), width
        return self._layout

    # -------------------------------------------------------------------------------------- drawing

    def render_line(self, y: int) -> Strip:
        """The first line is the heading, which does not scroll."""
        width = self.scrollable_content_region.width
        if y == 0:
            return self._heading(width)
        place = y - 1 + self.scroll_offset.y
        if place >= len(self.rows):
            text = self._empty if place == 0 else ""
            return strip_of([(pad(text, width), "dim")], width)
        strip = strip_of(spans(self.layout_of_columns, self.rows[place], self._unknown), width)
        if place == self.cursor:
            strip = _overlaid(strip, CURSOR if self.has_focus else NO_CURSOR)
        return strip

    def _heading(self, width: int) -> Strip:
        segments: list[Segment] = []
        layout = self.layout_of_columns
        for column, text in zip(layout.columns, heading(layout), strict=True):
            if segments:
                segments.append(Segment(" " * layout.gap, HEAD))
            segments.append(Segment(text, SORTED if column.key == self._sorted else HEAD))
        return Strip(segments).adjust_cell_length(width, HEAD)

    # -------------------------------------------------------------------------------------- the cursor

    def action_move(self, by: int) -> None:
        place = max(0, min(self.cursor + by, len(self.rows) - 1))
        if place != self.cursor:
            self.cursor = place
            self.refresh()
            self.post_message(self.Moved())
        self._reveal()

    def action_page(self, direction: int) -> None:
        self.action_move(direction * max(1, self.size.height - 2))

    def action_open(self) -> None:
        if self.rows:
            self.post_message(self.Opened())

    def _reveal(self) -> None:
        """Scrolls until the cursor is visible. The heading takes one line of the height."""
        first, visible = self.scroll_offset.y, max(1, self.size.height - 1)
        if self.cursor < first:
            self.scroll_to(y=self.cursor, animate=False)
        elif self.cursor >= first + visible:
            self.scroll_to(y=self.cursor - visible + 1, animate=False)

    def on_click(self, event: events.Click) -> None:
        if event.y == 0:
            start = 0
            for column, width in zip(self.layout_of_columns.columns, self.layout_of_columns.widths, strict=True):
                if start <= event.x < start + width:
                    self.post_message(self.HeadClicked(column))
                start += width + self.layout_of_columns.gap
        elif event.y - 1 + self.scroll_offset.y < len(self.rows):
            again = event.y - 1 + self.scroll_offset.y == self.cursor
            self.action_move(event.y - 1 + self.scroll_offset.y - self.cursor)
            if again and event.chain == 2:
                self.action_open()

    def on_focus(self) -> None:
        self.refresh()

    def on_blur(self) -> None:
        self.refresh()


def _overlaid(strip: Strip, style: Style) -> Strip:
    """The strip in one style, which must be visible without colours."""
    return Strip([Segment(segment.text, style) for segment in strip])
