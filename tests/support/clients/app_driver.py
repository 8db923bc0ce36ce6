"""Runs an app of `shmserve top` in textual's test terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from textual.app import App
from textual.pilot import Pilot
from textual.strip import Strip

from shmserve.tools.top.screens import Lines
from shmserve.tools.top.table_view import TableView
from shmserve.tools.top.texts import line_text
from tests.support.patience import PATIENCE_S

NEVER_S = 1e6
"""An interval that does not end in a test: the test reads documents itself."""
SIZES = [(20, 6), (80, 24), (250, 60)]
A = TypeVar("A", bound=App[Any])


class AppDriver(Generic[A]):
    def __init__(self, app: A, pilot: Pilot[Any]) -> None:
        self.app = app
        self.pilot = pilot

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.pilot.pause()

    async def until(self, accepts: Callable[[], object]) -> None:
        """Lets the app process messages until then, for up to PATIENCE_S."""
        end = time.monotonic() + PATIENCE_S
        while not accepts():
            assert time.monotonic() < end, f"{self.app.screen} {self.app.focused}\n{self.text}"
            await self.proceed()

    async def proceed(self) -> None:
        await self.pilot.pause()

    @property
    def strips(self) -> list[Strip]:
        return list(self.app.screen._compositor.render_strips())  # noqa: SLF001 - textual shows its picture nowhere else

    @property
    def text(self) -> str:
        return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in self.strips)

    @property
    def table(self) -> TableView:
        found: TableView = self.app.screen_stack[0].query_one(TableView)
        return found

    def column(self, key: str) -> list[Any]:
        return [row[key] for row in self.table.rows]

    def message_of(self, screen: Any) -> str:
        return "\n".join(line_text(line) for line in screen.query_one("#message", Lines).lines)

    def assert_fits(self, size: tuple[int, int]) -> None:
        lines = self.text.split("\n")
        assert len(lines) <= size[1]
        assert max(map(len, lines)) <= size[0]
