"""The live view of several servers, on textual's test terminal."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from textual.pilot import Pilot

from shmserve.errors import ConnectionLost
from shmserve.tools.top.fleet_app import FleetApp
from shmserve.tools.top.fleet_poller import Pollers
from shmserve.tools.top.screens import HelpScreen
from tests.support.clients.activity_documents import counters, document, model
from tests.support.clients.app_driver import NEVER_S, SIZES, AppDriver
from tests.unit.tools.top.fleet.scripted import Document, ScriptedSource


def answers(*names: str) -> Callable[[int], Document]:
    return lambda number: document(2 * number, *[model(name, counted=counters(100 * number)) for name in names])


def lost(number: int) -> Document:
    raise ConnectionLost("no server at c (refused)")


def sources() -> dict[str, ScriptedSource]:
    return {
        "a": ScriptedSource("http://a", answers("alpha", "beta")),
        "b": ScriptedSource("http://b", answers("alpha")),
        "c": ScriptedSource("http://c", lost),
    }


class Driver(AppDriver[FleetApp]):
    def __init__(self, app: FleetApp, pilot: Pilot[str], fleet: RecordingFleet) -> None:
        super().__init__(app, pilot)
        self.fleet = fleet

    async def proceed(self) -> None:
        self.fleet.refresh()
        await self.app.read()
        await self.pilot.pause()

    @property
    def message(self) -> str:
        return self.message_of(self.app.screen_stack[0])


class RecordingFleet(Pollers):
    interval: float | None = None

    def set_interval(self, seconds: float) -> None:
        self.interval = seconds
        super().set_interval(seconds)


def drive(steps: Callable[[Driver], Awaitable[None]], size: tuple[int, int] = (120, 30), **options: Any) -> str | None:
    async def main() -> str | None:
        fleet = RecordingFleet(sources(), NEVER_S)
        with fleet:
            app = FleetApp(fleet, NEVER_S, **options)
            async with app.run_test(size=size) as pilot:
                driver = Driver(app, pilot, fleet)
                await driver.until(lambda: all(snapshot.settled for snapshot in fleet.snapshots))
                await driver.proceed()
                await steps(driver)
            return app.return_value

    return asyncio.run(main())


def test_the_servers() -> None:
    async def steps(top: Driver) -> None:
        assert top.column("server") == ["a", "b", "c"]
        assert "3 servers   2 READY   1 UNREACHABLE" in top.text
        assert "req/s 150" in top.text
        assert top.message == ""
        await top.press("end")
        assert top.message == "c: no server at c (refused)"
        await top.press("minus")
        assert top.fleet.interval == 60
        await top.press("question_mark")
        assert isinstance(top.app.screen, HelpScreen)
        assert "models over all servers" in top.text
        assert "share of the machine's memory in use" in top.text
        await top.press("escape", "down", "enter")

    assert drive(steps, (100, 60)) == "c"


@pytest.mark.parametrize("size", SIZES)
def test_tables_fit_terminals_of_any_size(size: tuple[int, int]) -> None:
    async def steps(top: Driver) -> None:
        for key in "123":
            await top.press(key)
            top.assert_fits(size)
        await top.press("q" if size == SIZES[0] else "ctrl+c")

    assert drive(steps, size=size) == ("" if size == SIZES[0] else None)


def test_a_model_and_its_servers() -> None:
    async def steps(top: Driver) -> None:
        await top.press("2")
        assert top.column("model") == ["alpha", "beta"]
        assert top.column("servers") == ["2/2", "1/1"]
        await top.press("enter")
        assert (top.column("model"), top.column("server")) == (["alpha", "alpha"], ["a", "b"])
        assert "3 By server 2" in top.text
        await top.press("escape")
        assert top.column("model") == ["alpha", "alpha", "beta"]
        await top.press("down", "enter")

    assert drive(steps) == "b"


def test_sorting_filter_and_pause() -> None:
    async def steps(top: Driver) -> None:
        assert top.column("server") == ["c"]
        assert top.message == "c: it went away"
        await top.press("escape")
        await top.press("escape")
        assert top.message == "c: no server at c (refused)", "of the selected row"
        assert len(top.column("server")) == 3
        await top.press("2", "slash", *"bet", "enter")
        assert top.column("model") == ["beta"]
        await top.press("escape", "space")
        await top.press("1")
        before = top.column("uptime_seconds")
        top.fleet.refresh()
        await top.app.read()
        assert top.column("uptime_seconds") == before
        await top.press("space")
        await top.until(lambda: top.column("uptime_seconds") != before)

    drive(steps, filter_text="c", sort_key="p99", message="c: it went away")
