"""`shmserve top` on a terminal: the overview of one server, and its key bindings."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from msgspec import Struct
from textual import on
from textual.binding import Binding, BindingType

from shmserve.errors import ServeError
from shmserve.protocol.rates import Row
from shmserve.terminal.tables import visible
from shmserve.tools.top.columns import MODELS, TABLES, TopTable
from shmserve.tools.top.panels import TrendHistory, summary, wrapped
from shmserve.tools.top.screens import ConfirmScreen, DetailScreen, Lines, LogScreen
from shmserve.tools.top.sources import Source, Step
from shmserve.tools.top.table_view import TableView
from shmserve.tools.top.tables_app import KEYS_OF_TABLES, OF_TABLES, SLOW_S, TablesApp, keys_line
from shmserve.tools.top.texts import Line, fit
from shmserve.tools.top.view import make_view, step_rows

KEYS = (
    ("Enter", "detail"),
    ("/", "filter"),
    ("<>", "sort"),
    ("l", "load"),
    ("u", "unload"),
    ("r", "restart"),
    ("?", "help"),
)
DETAIL_KEYS = (("Esc", "back"), ("l", "load"), ("u", "unload"), ("r", "restart"), ("g", "log"), ("Up Down", "scroll"))
HELP = (
    ("1 2 3 4, Tab", "models, instances, clients, GPUs"),
    ("Enter", "one model in detail; Esc goes back"),
    ("l u r", "load, unload, restart what is selected"),
    ("s", "the steps of the selected ensemble, below its row"),
    ("g", "the log of the selected model, which follows"),
    *KEYS_OF_TABLES,
)
QUESTIONS = {
    "load": "All its versions are loaded from the repository, or loaded again if they have changed. What is served now "
    "is served until then.",
    "unload": "All its versions finish the requests that they have accepted; then their processes end.",
    "restart": "Its processes are replaced. Requests that have not started move to the new ones.",
}
Key = tuple[str, int | None]
Result = TypeVar("Result")
DOING = {"load": "loading", "unload": "unloading", "restart": "restarting"}


class OpenEnsemble(Struct):
    """The steps of an ensemble, as last read."""

    rows: list[Row] = []
    steps: Sequence[Step] = ()
    read_at: float = 0.0

    def add(self, steps: Sequence[Step], now: float) -> None:
        self.rows = step_rows(self.steps, steps, now - self.read_at)
        self.steps, self.read_at = steps, now


def _tried(call: Callable[..., Result], *arguments: Any) -> Result | ServeError:
    """Returns errors instead of raising them: if the user quits during a read, no task awaits it any more."""
    try:
        return call(*arguments)
    except ServeError as error:
        return error


class TopApp(TablesApp):
    """One server."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *(
            Binding(key, f"operate('{what}')", show=False, priority=True)
            for key, what in (("l", "load"), ("u", "unload"), ("r", "restart"))
        ),
        Binding("g", "show_log", show=False, priority=True),
        Binding("s", "steps", show=False, priority=True),
    ]

    def __init__(
        self,
        source: Source,
        first: Mapping[str, Any],
        interval: float,
        filter_text: str = "",
        sort_key: str | None = None,
        table: str = "models",
        end_key: str = "quit",
    ) -> None:
        """`first`: a document that has already been read. `end_key`: what the key q does."""
        super().__init__(TABLES, interval, filter_text, sort_key, table)
        self.source = source
        self.history = TrendHistory()
        self.view = make_view(None, first)
        self._ensembles: dict[Key, OpenEnsemble] = {}
        """Those whose steps are shown below their rows."""
        self._detailed: dict[Key, OpenEnsemble] = {}
        """The one on the screen of one model."""
        self.busy: dict[str, float] = {}
        """Operations in progress, as texts, and when they began."""
        self._end_key = ("q", end_key)
        self._before = first
        self._last = time.monotonic()
        self._seeded = False
        """The graphs of the rows have been filled."""
        self._problem = ""
        self._message: list[tuple[str, str]] = []
        self._reading = asyncio.Lock()

    def on_unmount(self) -> None:
        self.source.close()  # ends a read in progress, whose thread would keep the process alive

    # -------------------------------------------------------------------------------------- reading

    async def read(self) -> None:
        async with self._reading:
            reading = asyncio.ensure_future(asyncio.to_thread(_tried, self.source.read))
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
                if not self._seeded:
                    self._seeded = True
                    self.run_worker(self._seed_all(), group="history")
                self.history.draw(self.view)
            await self._read_opened()
        self.draw()

    async def _read_opened(self) -> None:
        """Reads what the user has opened: steps of ensembles, and a log."""
        for ensembles in (self._ensembles, self._detailed):
            for key, ensemble in list(ensembles.items()):
                steps = await asyncio.to_thread(_tried, self.source.steps, key[0], key[1])
                if isinstance(steps, ServeError) or not steps:
                    reason = f": {steps}" if isinstance(steps, ServeError) else ", which is not an ensemble"
                    if ensembles is self._ensembles:
                        self.say(f"no steps of model '{visible(key[0])}'{reason}", "warn")
                    ensembles.pop(key, None)
                else:
                    ensemble.add(steps, time.monotonic())
        if isinstance(self.screen, LogScreen):
            screen = self.screen
            records = await asyncio.to_thread(_tried, self.source.log, screen.model)
            if not isinstance(records, ServeError) and screen is self.screen:
                screen.show_records(records)

    # -------------------------------------------------------------------------------------- drawing

    def draw(self) -> None:
        super().draw()
        for screen in self.screen_stack if self.is_running else ():
            if isinstance(screen, DetailScreen) and screen.is_mounted:  # else it draws when it is
                opened = self._detailed.get((screen.model, screen.version))
                screen.show_view(self.view, opened.rows if opened is not None else ())

    def _rows(self, name: str) -> list[Row]:
        return self.view.table(name)

    def _with_rows_below(self, rows: list[Row]) -> list[Row]:
        """The steps of the ensembles that are open, below their rows."""
        if self._table is not MODELS:
            return rows
        shown: list[Row] = []
        defaults = {row["model"]: row["version"] for row in self.view.models if row["default"]}
        for row in rows:
            key = row["model"], row["version"]
            opened = self._ensembles.get(key)
            shown.append(row | {"mark": " ▾" if opened is not None else " ▸"} if row["ensemble"] or opened else row)
            steps = opened.rows if opened is not None else []
            for place, step in enumerate(steps):
                known = {"version": step["version"] or defaults.get(step["model"]), "below": (*key, place)}
                shown.append(step | known | {"branch": "└ " if place == len(steps) - 1 else "├ "})
        return shown

    def _total(self, table: TopTable) -> int:
        """Number of rows: the server counts more clients than it lists."""
        total = len(self.view.table(table.name))
        return max(total, self.view.server["connections"] or 0) if table.name == "clients" else total

    def _unknown(self) -> frozenset[str]:
        return self.view.unknown

    def _draw_bottom(self) -> None:
        if not self.is_running:
            return
        width = max(1, self.size.width)
        for screen in self.screen_stack:
            if screen is self._base or (isinstance(screen, DetailScreen) and screen.is_mounted):
                keys = KEYS if screen is self._base else DETAIL_KEYS
                screen.query_one("#message", Lines).grow(self._messages(width, screen))
                screen.query_one("#keys", Lines).show([keys_line([*keys, self._end_key], width)])

    def _summary(self, width: int) -> list[Line]:
        lines = summary(self.view, self.source.where, width)
        if self._problem:
            text = f"no answer for {time.monotonic() - self._last:.0f} s: {self._problem}"
            lines[0] = fit([(visible(text), "bad")], width)
        return lines

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

    def _help(self) -> Sequence[tuple[str, str]]:
        return (*HELP, self._end_key)

    def _forget(self) -> None:
        self._message = []

    # -------------------------------------------------------------------------------------- keys

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Disables the keys for tables on the screen of one model."""
        if action in ("operate", "show_log", "steps"):  # allowed on all screens that are not dialogs
            action = "end"
        return bool(super().check_action(action, parameters)) and not (
            isinstance(self.screen, DetailScreen) and action in OF_TABLES
        )

    # -------------------------------------------------------------------------------------- one model

    @on(TableView.Opened)
    def open_detail(self) -> None:
        row = self.query_one(TableView).selected
        if row is not None and "model" in row:
            self.push_screen(DetailScreen(row["model"], row["version"], self.view, self.history), self._detail_closed)
            self.call_after_refresh(self.draw)
            if row.get("ensemble", False) is not False:  # None: the source does not know
                self._detailed[row["model"], row["version"]] = OpenEnsemble()
            self.action_refresh_now()
            if not self.history.of(row["model"], row["version"]).seeded:
                self.run_worker(self._seed(row["model"], row["version"]), group="history")

    def _detail_closed(self, _: None) -> None:
        self._detailed.clear()
        self.draw()

    async def _seed(self, model: str, version: int | None) -> None:
        """Shows the minutes before this program was started."""
        try:
            curves = await asyncio.to_thread(self.source.history, model, version)
        except ServeError as error:
            self.say(f"no history of model '{visible(model)}' from the gateway: {error}", "dim")
        else:
            self.history.seed(model, version, curves, max(1, round(self.interval)))
            self.draw()

    async def _seed_all(self) -> None:
        """Shows the last minute of all models in the graphs of their rows."""
        trends = await asyncio.to_thread(_tried, self.source.recent)
        if isinstance(trends, ServeError):
            return  # a server without this history has no graphs of the time before
        for one in trends:
            version = int(one["version"]) if one["version"].isdecimal() else None
            step = max(1, round(self.interval))
            self.history.seed(one["name"], version, {"requests": one["requests"]}, step, whole=False)
        self.history.draw(self.view)
        self.draw()

    def action_steps(self) -> None:
        """Shows or hides the steps of the selected ensemble."""
        row = self.query_one(TableView).selected
        if self._table is not MODELS or row is None or isinstance(self.screen, DetailScreen):
            return
        key = row["below"][:2] if row.get("below") else (row["model"], row["version"])
        if self._ensembles.pop(key, None) is None:
            self._ensembles[key] = OpenEnsemble()
            self.action_refresh_now()
        self.draw()

    def _subject(self) -> Row | None:
        """The model or the instance that keys apply to."""
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

    def action_show_log(self) -> None:
        row = self._subject()
        if row is None:
            self.say("select a model or an instance first", "warn")
        else:
            self.run_worker(self._show_log(str(row["model"])), group="logs", exclusive=True)

    async def _show_log(self, model: str) -> None:
        try:
            records = await asyncio.to_thread(self.source.log, model)
        except ServeError as error:
            self.say(f"the log of model '{visible(model)}' cannot be read: {error}", "bad")
        else:
            self.push_screen(LogScreen(model, records))

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
