"""Runs an app of `shmserve top` in textual's test terminal."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from textual.app import App
from textual.pilot import Pilot

from shmserve.clients.top.table_view import TableView

A = TypeVar("A", bound=App[Any])


class AppDriver(Generic[A]):
    """Presses keys, and reads the screen."""

    def __init__(self, app: A, pilot: Pilot[Any]) -> None:
        self.app = app
        self.pilot = pilot

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.pilot.pause()

    @property
    def text(self) -> str:
        strips = self.app.screen._compositor.render_strips()
        return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in strips)

    @property
    def table(self) -> TableView:
        found: TableView = self.app.screen_stack[0].query_one(TableView)
        return found
