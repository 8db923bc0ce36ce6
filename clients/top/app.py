"""`shmserve top` on a terminal: the overview, and what keys do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, ClassVar

from textual import events, on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input

from shmserve.clients.top.columns import BY_NAME, TABLES, select, sort
from shmserve.clients.top.panels import History, summary, wrapped
from shmserve.clients.top.screens import ConfirmScreen, DetailScreen, HelpScreen, Lines
from shmserve.clients.top.sources import Source
from shmserve.clients.top.table_view import TableView
from shmserve.clients.top.texts import Line, fit, line_width, pad
from shmserve.clients.top.view import Row, make_view
from shmserve.errors import ServeError
from shmserve.terminal.tables import visible

INTERVALS = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
FIRST = 0.25
"""The first rates are shown after this part of the interval."""
SLOW_S = 1.0
"""A read that takes longer is reported while it lasts."""
KEYS = (
    ("Enter", "detail"), ("/", "filter"), ("<>", "sort"), ("l", "load"), ("u", "unload"), ("r", "restart"),
    ("?", "help"), ("q", "quit"),
)  # fmt: skip
DETAIL_KEYS = (("Esc", "back"), ("l", "load"), ("u", "unload"), ("r", "restart"), ("Up Down", "scroll"), ("q", "quit"))
QUESTIONS = {
    "load": "All its versions are loaded from the repository, or loaded again if they have changed. What is served now "
    "is served until then.",
    "unload": "All its versions finish the requests that they have accepted; then their processes end.",
    "restart": "Its processes are replaced. Requests that have not started move to the new ones.",
}
OF_TABLES = frozenset({"table", "next_table", "filter", "sort", "reverse", "help", "leave"})
"""Actions of the overview only."""
OF_ALL = frozenset({"operate", "slower", "pause", "refresh_now", "end"})
"""Actions of the overview and of the screen of one model."""
DOING = {"load": "loading", "unload": "unloading", "restart": "restarting"}


class TopApp(App[None]):
    """`interval`: seconds between refreshes. `filter_text`, `sort_key` and `table`: what is shown at first."""

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
            *((str(number), f"table('{table.name}')") for number, table in enumerate(TABLES, 1)),
            ("tab", "next_table(1)"),
            ("shift+tab", "next_table(-1)"),
            ("slash", "filter"),
            ("less_than_sign,left", "sort(-1)"),
            ("greater_than_sign,right", "sort(1)"),
            ("R", "reverse"),
            ("l", "operate('load')"),
            ("u", "operate('unload')"),
            ("r", "operate('restart')"),
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
    """With priority, a key takes effect before the next one is read: after `/`, letters are words."""

    def __init__(
        self,
        source: Source,
        first: Mapping[str, Any],
        interval: float,
        filter_text: str = "",
        sort_key: str | None = None,
        table: str = "models",
    ) -> None:
        """`first`: a document that was read already."""
        super().__init__(ansi_color=True)
        self.title = "shmserve top"
        self.theme = "ansi-dark"
        self.source = source
        self.interval = interval
        self.history = History()
        self.view = make_view(None, first)
        self.busy: dict[str, float] = {}
        """Operations in progress, as texts, and when they began."""
        self._before = first
        self._last = time.monotonic()
        self._problem = ""
        self._message: list[tuple[str, str]] = []
        self._paused = False
        self._filter = filter_text
        self._sorts = {one.name: (one.sort, False) for one in TABLES}
        self._table = BY_NAME[table]
        if sort_key is not None and any(column.key == sort_key for column in self._table.columns):
            self._sorts[table] = sort_key, False
        self._wake = asyncio.Event()
        self._reading = asyncio.Lock()

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

    def on_unmount(self) -> None:
        self.source.close()  # ends a read in progress, whose thread would keep the process alive

    # -------------------------------------------------------------------------------------- reading

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
            pause = self.interval

    async def read(self) -> None:
        """Reads a document and shows it."""
        async with self._reading:
            reading = asyncio.ensure_future(asyncio.to_thread(self._attempt))
            await asyncio.wait({reading}, timeout=SLOW_S)
            if not reading.done():
                self._problem = self._problem or "waiting for the server"
                self.draw()
            document = await reading
            if isinstance(document, ServeError):
                self._problem = str(document)
            else:
                self._problem, self._last = "", time.monotonic()
                self.view = make_view(self._before, document)
                self._before = document
                self.history.add(self.view)
        self.draw()

    def _attempt(self) -> Mapping[str, Any] | ServeError:
        """Returns errors: if the user quits meanwhile, nobody awaits this any more."""
        try:
            return self.source.read()
        except ServeError as error:
            return error

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
        rows = self.view.table(self._table.name)
        chosen = select(self._table, rows, self._filter)
        key, reverse = self._sorts[self._table.name]
        empty = f"no {self._table.title if self._table.name == 'gpus' else self._table.title.lower()}"
        if rows:
            empty = f"{empty} with '{self._filter}'; Esc shows all"
        base.query_one(TableView).show(
            self._table, sort(self._table, chosen, key, reverse), self.view.unknown, key, reverse, empty
        )
        base.query_one("#tabs", Lines).show([self._tabs(width)])
        self._draw_bottom()
        for screen in self.screen_stack:
            if isinstance(screen, DetailScreen):
                screen.show_view(self.view)

    def _draw_bottom(self) -> None:
        if not self.is_running:
            return
        width = max(1, self.size.width)
        for screen in self.screen_stack:
            if screen is self._base or isinstance(screen, DetailScreen):
                keys = KEYS if screen is self._base else DETAIL_KEYS
                screen.query_one("#message", Lines).grow(self._messages(width, screen))
                screen.query_one("#keys", Lines).show([_keys(keys, width)])

    def _summary(self, width: int) -> list[Line]:
        lines = summary(self.view, self.source.where, width)
        if self._problem:
            text = f"no answer for {time.monotonic() - self._last:.0f} s: {self._problem}"
            lines[0] = fit([(visible(text), "bad")], width)
        return lines

    def _tabs(self, width: int) -> Line:
        line: Line = []
        for number, table in enumerate(TABLES, 1):
            total = len(self.view.table(table.name))
            if table.name == "clients":
                total = max(total, self.view.server["connections"] or 0)
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

    def _messages(self, width: int, screen: Any) -> list[Line]:
        """Operations in progress, the last results, and why the selected row is not served."""
        now = time.monotonic()
        lines = [fit([(f"{text}, {now - began:.0f} s", "warn")], width) for text, began in self.busy.items()]
        for text, style in self._message:
            lines += wrapped(text, width, style)[:4]
        row = screen.query_one(TableView).selected if screen is self._base else None
        if row is not None and row.get("reason"):
            name = row.get("instance") or f"{row['model']} {row['version'] or ''}".strip()
            lines += wrapped(f"{name}: {row['reason']}", width, "warn")[:2]
        return lines

    # -------------------------------------------------------------------------------------- keys

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """While words are typed, keys are letters; other screens have no table to arrange."""
        if isinstance(self.focused, Input):
            return action == "leave" or action not in OF_TABLES | OF_ALL
        if isinstance(self.screen, ModalScreen):
            return action not in OF_TABLES | OF_ALL
        return not isinstance(self.screen, DetailScreen) or action not in OF_TABLES

    def action_table(self, name: str) -> None:
        self._table = BY_NAME[name]
        self.draw()

    def action_next_table(self, by: int) -> None:
        self._table = TABLES[(TABLES.index(self._table) + by) % len(TABLES)]
        self.draw()

    def action_sort(self, by: int) -> None:
        """By the next visible column."""
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
        self.exit()

    def action_help(self) -> None:
        self.push_screen(HelpScreen(self._table))

    # -------------------------------------------------------------------------------------- filter

    def action_filter(self) -> None:
        field = self.query_one("#filter", Input)
        field.display = True
        self.screen.set_focus(field)  # at once: keys that follow are words

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
            self._message = []
        self._end_filter()

    # -------------------------------------------------------------------------------------- one model

    @on(TableView.Opened)
    def open_detail(self) -> None:
        row = self.query_one(TableView).selected
        if row is not None and "model" in row:
            self.push_screen(DetailScreen(row["model"], row["version"], self.view, self.history), lambda _: self.draw())
            self.call_after_refresh(self.draw)

    def _subject(self) -> Row | None:
        """The model or the instance that keys are about."""
        if isinstance(self.screen, DetailScreen):
            return {"model": self.screen.model, "version": self.screen.version}
        row = self.query_one(TableView).selected
        return row if row is not None and "model" in row else None

    def action_operate(self, what: str) -> None:
        row = self._subject()
        if row is None:
            self.say("select a model or an instance first", "warn")
            return
        if what not in self.source.operations:
            self.say(f"{what} is not possible over HTTP; connect over the lane, ipc or tcp", "warn")
            return
        instance = str(row.get("instance", "")) if what == "restart" else ""
        version = row["version"] if what == "restart" else None
        name = f"instance '{instance}' of model '{row['model']}'" if instance else f"model '{row['model']}'"
        if version is not None and not instance:
            name += f" version {version}"
        name = visible(name)
        screen = ConfirmScreen(f"{what.capitalize()} {name}?", QUESTIONS[what], what.capitalize())

        def decided(yes: bool | None) -> None:
            if yes:
                self.run_worker(self.operate(what, str(row["model"]), version, instance, name), group="operations")

        self.push_screen(screen, decided)

    async def operate(self, what: str, model: str, version: int | None, instance: str, name: str) -> None:
        text = f"{DOING[what]} {name}"
        self.busy[text] = began = time.monotonic()
        self._draw_bottom()
        try:
            warnings = await asyncio.to_thread(self.source.operate, what, model, version, instance)
        except ServeError as error:
            self.say(f"{what} of {name} failed: {error}", "bad")
        else:
            self.say(f"{what} of {name} done in {time.monotonic() - began:.1f} s", "good")
            self._message += [(f"warning: {warning}", "warn") for warning in warnings]
        finally:
            self.busy.pop(text, None)
        await self.read()

    def say(self, text: str, style: str) -> None:
        self._message = [(text, style)]
        self._draw_bottom()


def _keys(keys: tuple[tuple[str, str], ...], width: int) -> Line:
    line: Line = []
    for key, about in keys:
        line += [(f" {key} ", "chosen"), (f"{about} ", "plain")]
    return fit(line, width)
