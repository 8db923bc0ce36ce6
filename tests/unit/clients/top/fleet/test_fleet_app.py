"""The live view of several servers, on textual's test terminal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from textual.pilot import Pilot

from shmserve.clients.top.fleet.fleet_app import FleetApp
from shmserve.clients.top.fleet.poller import Fleet
from shmserve.clients.top.screens import HelpScreen, Lines
from shmserve.clients.top.texts import line_text
from shmserve.errors import ConnectionLost
from tests.support.clients.activity_documents import counters, document, model
from tests.support.clients.app_driver import AppDriver
from tests.unit.clients.top.fleet.scripted import PATIENCE_S, Document, ScriptedSource

NEVER_S = 1e6


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
    def __init__(self, app: FleetApp, pilot: Pilot[str], fleet: Fleet) -> None:
        super().__init__(app, pilot)
        self.fleet = fleet

    async def until(self, holds: Callable[[], object]) -> None:
        """Reads all servers until `holds` returns something true."""
        end = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < end, self.text
            self.fleet.refresh()
            await self.app.read()
            await self.pilot.pause()

    def column(self, key: str) -> list[Any]:
        return [row[key] for row in self.table.rows]

    @property
    def message(self) -> str:
        return "\n".join(line_text(line) for line in self.app.screen_stack[0].query_one("#message", Lines).lines)


def drive(steps: Callable[[Driver], Awaitable[None]], size: tuple[int, int] = (120, 30), **options: Any) -> str | None:
    async def main() -> str | None:
        with Fleet(sources(), NEVER_S) as fleet:
            app = FleetApp(fleet, NEVER_S, **options)
            async with app.run_test(size=size) as pilot:
                driver = Driver(app, pilot, fleet)
                await driver.until(lambda: app._view.total["requests_per_s"] == 150 and len(app._view.servers) == 3)
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
        await top.press("q")

    assert drive(steps) == ""


@pytest.mark.parametrize("size", [(20, 6), (80, 24), (250, 60)])
def test_tables_fit_terminals_of_any_size(size: tuple[int, int]) -> None:
    async def steps(top: Driver) -> None:
        for key in "123":
            await top.press(key)
            lines = top.text.split("\n")
            assert len(lines) <= size[1]
            assert max(map(len, lines)) <= size[0]

    drive(steps, size=size)


def test_a_server_in_detail() -> None:
    async def steps(top: Driver) -> None:
        await top.press("down", "enter")

    assert drive(steps) == "b"


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


def test_ctrl_c_is_not_q() -> None:
    async def steps(top: Driver) -> None:
        await top.press("ctrl+c")

    assert drive(steps) is None


def test_sorting_filter_and_pause() -> None:
    async def steps(top: Driver) -> None:
        assert top.column("server") == ["c"]
        await top.press("escape")
        assert len(top.column("server")) == 3
        await top.press("2", "slash", *"bet", "enter")
        assert top.column("model") == ["beta"]
        await top.press("escape", "space")
        before = top.app._view
        top.fleet.refresh()
        await top.app.read()
        assert top.app._view is before
        await top.press("space")
        await top.until(lambda: top.app._view is not before)

    drive(steps, filter_text="c", sort_key="p99")


def test_the_reason_for_a_server_that_is_not_shown() -> None:
    async def steps(top: Driver) -> None:
        assert top.message == "c: it went away"
        await top.press("escape")
        assert top.message == ""

    drive(steps, message="c: it went away")


def test_the_interval_applies_to_all_servers() -> None:
    async def steps(top: Driver) -> None:
        await top.press("minus")
        assert {poller.interval for poller in top.fleet._pollers} == {60.0}

    drive(steps)


def test_help() -> None:
    async def steps(top: Driver) -> None:
        await top.press("question_mark")
        assert isinstance(top.app.screen, HelpScreen)
        assert "models over all servers" in top.text
        assert "share of the machine's memory in use" in top.text

    drive(steps, size=(100, 60))
