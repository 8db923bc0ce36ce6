"""The base of the live views of one and of several servers: tables, one of which is shown, and the keys for them.

A subclass provides the tables, their rows and the lines around them, and reads in a worker.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from textual import events, on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input

from shmserve.protocol.rates import Row
from shmserve.tools.top.columns import TopTable, select, sort
from shmserve.tools.top.screens import HelpScreen, Lines
from shmserve.tools.top.sources import FIRST
from shmserve.tools.top.table_view import TableView
from shmserve.tools.top.texts import Line, fit, line_width, pad

INTERVALS = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
SLOW_S = 1.0
"""A read that takes longer is reported while it lasts."""
OF_TABLES = frozenset({"table", "next_table", "filter", "sort", "reverse", "help", "leave"})
"""Actions only for tables."""
OF_ALL = frozenset({"slower", "pause", "refresh_now", "end"})
"""Actions for tables and for the screens above them that are not dialogs."""
KEYS_OF_TABLES = (
    ("Up Down PgUp PgDn", "select a row; also k, j, Home, End"),
    ("/", "show only rows with these words; Esc ends it"),
    ("< >", "sort by the column to the left or right"),
    ("R", "reverse the order"),
    ("+ -", "refresh less, or more, often"),
    ("Space", "pause, and continue"),
    (".", "refresh now"),
)
"""Keys of tables, for the help."""


class TablesApp(App[str]):
    """The result: "" if the user has pressed q, None after Ctrl-C."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { background: ansi_default; color: ansi_default; }
    Lines { height: auto; overflow: hidden; background: ansi_default; }
    #summary { height: 3; margin-bottom: 1; }
    #tabs { height: 1; }
    TableView { height: 1fr; overflow-x: hidden; overflow-y: auto; scrollbar-size-vertical: 1; }
    TableView { background: ansi_default; }
    #detail, #explained { height: 1fr; overflow-y: auto; scrollbar-size-vertical: 1; }
    #bottom { dock: bottom; height: auto; }
    #keys { height: 1; }
    #filter { display: none; height: 1; border: none; padding: 0; background: ansi_default; }
    ModalScreen { align: center middle; background: transparent; }
    #dialog { height: auto; border: round ansi_yellow; padding: 1 2; background: ansi_default; }
    #answers { height: 1; align-horizontal: center; }
    #answers Button { margin: 0 2; min-width: 14; background: ansi_default; color: ansi_default; text-style: none; }
    #answers Button:focus { text-style: bold reverse; }
    #help { width: 100%; max-width: 96; height: 100%; border: round ansi_cyan; padding: 0 1; background: ansi_default; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(keys, action, show=False, priority=True)
        for keys, action in (
            *((str(number), f"table({number})") for number in range(1, 5)),
            ("tab", "next_table(1)"),
            ("shift+tab", "next_table(-1)"),
            ("slash", "filter"),
            ("less_than_sign,left", "sort(-1)"),
            ("greater_than_sign,right", "sort(1)"),
            ("R", "reverse"),
            ("plus,equals_sign", "slower(1)"),
            ("minus", "slower(-1)"),
            ("space", "pause"),
            ("full_stop,f5", "refresh_now"),
            ("question_mark,h,f1", "help"),
            ("escape", "leave"),
            ("q", "end"),
            ("ctrl+c,ctrl+q", "quit"),
        )
    ]
    """With priority, a key takes effect before the next one is read: letters typed after `/` belong to the filter."""

    def __init__(
        self, tables: Sequence[TopTable], interval: float, filter_text: str, sort_key: str | None, table: str
    ) -> None:
        """`interval`: seconds between refreshes. `filter_text`, `sort_key` and `table`: the initial settings."""
        super().__init__(ansi_color=True)
        self.title = "shmserve top"
        self.theme = "ansi-dark"
        self.interval = interval
        self._tables = tuple(tables)
        self._paused = False
        self._filter = filter_text
        self._sorts = {one.name: (one.sort, False) for one in self._tables}
        self._table = next(one for one in self._tables if one.name == table)
        if sort_key is not None and any(column.key == sort_key for column in self._table.columns):
            self._sorts[table] = sort_key, False
        self._wake = asyncio.Event()

    # -------------------------------------------------------------------------------------- of each view

    @abstractmethod
    async def read(self) -> None:
        """Reads new data and draws."""

    @abstractmethod
    def _rows(self, name: str) -> list[Row]:
        """The rows of a table, in any order."""

    @abstractmethod
    def _summary(self, width: int) -> list[Line]:
        """The lines above the tables."""

    @abstractmethod
    def _draw_bottom(self) -> None:
        """Draws the messages and the keys."""

    @abstractmethod
    def _help(self) -> Sequence[tuple[str, str]]:
        """Keys and what they do."""

    def _with_rows_below(self, rows: list[Row]) -> list[Row]:
        """Adds rows that are shown below one of the sorted rows."""
        return rows

    def _total(self, table: TopTable) -> int:
        return len(self._rows(table.name))

    def _unknown(self) -> frozenset[str]:
        """Keys of columns without values."""
        return frozenset()

    def _forget(self) -> None:
        """Removes messages."""

    # -------------------------------------------------------------------------------------- reading

    def compose(self) -> ComposeResult:
        yield Lines(id="summary")
        yield Lines(id="tabs")
        yield TableView(self._table, id="table")
        with Vertical(id="bottom"):
            yield Lines(id="message")
            yield Input(self._filter, placeholder="words to look for", id="filter", compact=True)
            yield Lines(id="keys")

    def on_mount(self) -> None:
        self.query_one(TableView).focus()
        self.call_after_refresh(self.draw)
        self.run_worker(self._run(), name="poll")

    def on_resize(self, event: events.Resize) -> None:
        self.call_after_refresh(self.draw)

    async def _run(self) -> None:
        pause = FIRST * self.interval
        while True:
            try:
                await asyncio.wait_for(self._wake.wait(), pause)
            except asyncio.TimeoutError:
                if self._paused:
                    continue
            self._wake.clear()
            await self.read()
            pause = self._pause_s()

    def _pause_s(self) -> float:
        """Time between two reads."""
        return self.interval

    # -------------------------------------------------------------------------------------- drawing

    @property
    def _base(self) -> Any:
        return self.screen_stack[0]

    def draw(self) -> None:
        if not self.is_running:
            return  # the user has quit during a read, and the widgets are gone
        base = self._base
        width = max(1, self.size.width)
        base.query_one("#summary", Lines).grow(self._summary(width))
        rows = self._rows(self._table.name)
        chosen = select(self._table, rows, self._filter)
        key, reverse = self._sorts[self._table.name]
        empty = f"no {self._table.title if self._table.name == 'gpus' else self._table.title.lower()}"
        if rows:
            empty = f"{empty} with '{self._filter}'; Esc shows all"
        shown = self._with_rows_below(sort(self._table, chosen, key, reverse))
        base.query_one(TableView).show(self._table, shown, self._unknown(), key, empty)
        base.query_one("#tabs", Lines).show([self._tabs(width)])
        self._draw_bottom()

    def _tabs(self, width: int) -> Line:
        line: Line = []
        for number, table in enumerate(self._tables, 1):
            total = self._total(table)
            count = f"{total}"
            if self._filter and table is self._table:
                count = f"{len(self._base.query_one(TableView).rows)}/{total}"
            style = "chosen" if table is self._table else "plain"
            line += [(f" {number} {table.title} {count} ", style), (" ", "plain")]
        key, reverse = self._sorts[self._table.name]
        notes = [f"with '{self._filter}'"] if self._filter else []
        notes.append("paused" if self._paused else f"every {self.interval:g} s")
        notes.append(f"by {self._table.column(key).head}{', reversed' if reverse else ''}")
        room = width - line_width(line)
        while notes and len(" · ".join(notes)) > room:
            notes.pop()
        return [*fit(line, width), (pad(" · ".join(notes), max(0, room), True), "dim")]

    # -------------------------------------------------------------------------------------- keys

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Disables key bindings while a filter is typed, and those for tables in dialogs."""
        if isinstance(self.focused, Input):
            return action == "leave" or action not in OF_TABLES | OF_ALL
        return not isinstance(self.screen, ModalScreen) or action not in OF_TABLES | OF_ALL

    def action_table(self, number: int) -> None:
        if number <= len(self._tables):
            self._show_table(self._tables[number - 1])

    def action_next_table(self, by: int) -> None:
        self._show_table(self._tables[(self._tables.index(self._table) + by) % len(self._tables)])

    def _show_table(self, table: TopTable) -> None:
        self._table = table
        self.draw()

    def action_sort(self, by: int) -> None:
        """Sorts by the next visible column."""
        columns = self.query_one(TableView).layout_of_columns.columns
        key, _ = self._sorts[self._table.name]
        places = [place for place, column in enumerate(columns) if column.key == key]
        place = places[0] + by if places else 0
        self._sorts[self._table.name] = columns[place % len(columns)].key, False
        self.draw()

    def action_reverse(self) -> None:
        key, reverse = self._sorts[self._table.name]
        self._sorts[self._table.name] = key, not reverse
        self.draw()

    @on(TableView.HeadClicked)
    def sort_by(self, event: TableView.HeadClicked) -> None:
        key, reverse = self._sorts[self._table.name]
        self._sorts[self._table.name] = event.column.key, key == event.column.key and not reverse
        self.draw()

    @on(TableView.Moved)
    def another_row(self) -> None:
        self._draw_bottom()

    def action_slower(self, by: int) -> None:
        wanted = [value for value in INTERVALS if (value > self.interval if by > 0 else value < self.interval)]
        if wanted:
            self.interval = wanted[0] if by > 0 else wanted[-1]
            self.action_refresh_now()

    def action_pause(self) -> None:
        self._paused = not self._paused
        if not self._paused:
            self.action_refresh_now()
        self.draw()

    def action_refresh_now(self) -> None:
        self._wake.set()

    def action_end(self) -> None:
        self.exit("")

    def action_help(self) -> None:
        self.push_screen(HelpScreen(self._table, self._help()))

    # -------------------------------------------------------------------------------------- filter

    def action_filter(self) -> None:
        field = self.query_one("#filter", Input)
        field.display = True
        self.screen.set_focus(field)  # at once: following keys belong to the filter

    @on(Input.Changed, "#filter")
    def filter_changed(self, event: Input.Changed) -> None:
        self._filter = event.value
        self.draw()

    @on(Input.Submitted, "#filter")
    def filter_kept(self) -> None:
        self._end_filter()

    def _end_filter(self) -> None:
        self.query_one("#filter", Input).display = False
        self.screen.set_focus(self.query_one(TableView))
        self.draw()

    def action_leave(self) -> None:
        """Ends the filter, then removes the messages."""
        field = self.query_one("#filter", Input)
        if field.value:
            field.value = ""
            self._filter = ""
        else:
            self._forget()
        self._end_filter()


def keys_line(keys: Sequence[tuple[str, str]], width: int) -> Line:
    line: Line = []
    for key, about in keys:
        line += [(f" {key} ", "chosen"), (f"{about} ", "plain")]
    return fit(line, width)
