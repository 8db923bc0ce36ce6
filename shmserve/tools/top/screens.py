"""The screens above the overview: one model in detail, a question before an operation, help."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.events import Resize
from textual.geometry import Size
from textual.screen import ModalScreen, Screen
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Button

from shmserve.protocol.rates import Row
from shmserve.terminal.tables import visible
from shmserve.tools.top.columns import TopTable
from shmserve.tools.top.panels import TrendHistory, detail, wrapped
from shmserve.tools.top.sources import Record
from shmserve.tools.top.table_view import strip_of
from shmserve.tools.top.texts import Line, pad
from shmserve.tools.top.view import View

LEVELS = {"debug": "dim", "warning": "warn", "error": "bad", "critical": "bad"}
"""Level of a record -> style."""


class Lines(ScrollView):
    """Lines of styled text. They scroll if they do not fit into the widget."""

    can_focus = False

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "scroll_up", show=False),
        Binding("down,j", "scroll_down", show=False),
    ]

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.lines: list[Line] = []

    def show(self, lines: list[Line]) -> None:
        self.lines = lines
        self.virtual_size = Size(self.scrollable_content_region.width, len(lines))
        self.refresh()

    def grow(self, lines: list[Line]) -> None:
        """Shows the lines, with the widget's height set to their number."""
        self.display = bool(lines)
        if self.styles.height is None or self.styles.height.value != len(lines):
            self.styles.height = len(lines)
        self.show(lines)

    def render_line(self, y: int) -> Strip:
        place = y + self.scroll_offset.y
        return strip_of(self.lines[place] if place < len(self.lines) else [], self.scrollable_content_region.width)


class DetailScreen(Screen[None]):
    """One version of a model. The app calls `show_view` after each refresh."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,enter,backspace", "dismiss(None)", show=False)]

    def __init__(self, model: str, version: int | None, view: View, history: TrendHistory) -> None:
        super().__init__()
        self.model = model
        self.version = version
        self._view = view
        self._history = history
        self._steps: Sequence[Row] = ()

    def compose(self) -> ComposeResult:
        yield Lines(id="detail")
        with Vertical(id="bottom"):
            yield Lines(id="message")
            yield Lines(id="keys")

    def on_mount(self) -> None:
        self.query_one("#detail").can_focus = True
        self.query_one("#detail").focus()

    def on_resize(self, event: Resize) -> None:
        self._draw()

    def show_view(self, view: View, steps: Sequence[Row]) -> None:
        self._view = view
        self._steps = steps
        self._draw()

    def _draw(self) -> None:
        lines = self.query_one("#detail", Lines)
        width = max(20, lines.scrollable_content_region.width)
        lines.show(detail(self._view, self._history, self.model, self.version, width, self._steps))


class ConfirmScreen(ModalScreen[bool]):
    """Asks for confirmation. The result is whether the user confirmed."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", show=False),
        Binding("n,escape,q", "dismiss(False)", show=False),
        Binding("left,up", "app.focus_previous", show=False),
        Binding("right,down", "app.focus_next", show=False),
    ]
    AUTO_FOCUS = "#no"

    def __init__(self, title: str, text: str, do: str) -> None:
        super().__init__()
        self._title = title
        self._text = text
        self._do = do

    def compose(self) -> ComposeResult:
        with Vertical(id="dialog"):
            yield Lines(id="question")
            with Horizontal(id="answers"):
                yield Button(f"{self._do} (y)", id="yes", compact=True)
                yield Button("Cancel (n)", id="no", compact=True)

    def on_resize(self, event: Resize) -> None:
        width = max(20, min(64, self.size.width - 8))
        self.query_one("#dialog").styles.width = width + 6
        self.query_one("#question", Lines).grow(
            [[(self._title, "strong")], [], *wrapped(self._text, width, "plain"), []]
        )

    def on_button_pressed(self, event: Button.Pressed) -> None:
        self.dismiss(event.button.id == "yes")


class ReadingScreen(ModalScreen[None]):
    """A text over the tables. Keys scroll it."""

    def compose(self) -> ComposeResult:
        with Vertical(id="help"):
            yield Lines(id="explained")

    def on_mount(self) -> None:
        self.text.can_focus = True
        self.text.focus()

    @property
    def text(self) -> Lines:
        return self.query_one("#explained", Lines)


class LogScreen(ReadingScreen):
    """The latest records of a model's log. The app calls `show_records` after each refresh, and the view follows unless
    it has been scrolled up."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,enter,g", "dismiss(None)", show=False)]

    def __init__(self, model: str, records: Sequence[Record]) -> None:
        super().__init__()
        self.model = model
        self._records = records

    def show_records(self, records: Sequence[Record]) -> None:
        self._records = records
        self._draw(self.text.scroll_offset.y >= self.text.max_scroll_y)

    def on_resize(self, event: Resize) -> None:
        self._draw(True)

    def _draw(self, to_end: bool) -> None:
        width = max(20, self.text.scrollable_content_region.width)
        lines: list[Line] = [[(f"Log of {visible(self.model)}", "strong"), ("  Esc closes this.", "dim")], []]
        for record in self._records:
            at = time.strftime("%H:%M:%S", time.localtime(record["time"]))
            level = str(record["level"])
            text = f"{at} {level.upper()} {record['text']}"
            lines += wrapped(text, width, LEVELS.get(level, "plain"))
        self.text.show(lines if self._records else [*lines, [("no records", "dim")]])
        if to_end:
            self.text.scroll_end(animate=False)


class HelpScreen(ReadingScreen):
    """The keys, and what the columns of the current table mean."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,enter,question_mark,space", "dismiss(None)", show=False)]

    def __init__(self, table: TopTable, keys: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self._table = table
        self._keys = keys

    def on_mount(self) -> None:  # and that of ReadingScreen: Textual calls both
        heads = [column.head for column in self._table.columns]
        width = max(map(len, (*[key for key, _ in self._keys], *heads))) + 4
        lines: list[Line] = [[("Keys", "strong")]]
        lines += [[(pad(f"  {key}", width), "good"), (about, "plain")] for key, about in self._keys]
        lines += [[], [(f"Columns of {self._table.title}", "strong")]]
        lines += [[(pad(f"  {one.head}", width), "good"), (one.about, "plain")] for one in self._table.columns]
        lines += [[], [("Esc closes this.", "dim")]]
        self.text.show(lines)
