"""The live views of one server and of several, on textual's test terminal: keys, dialogs and sizes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from textual.events import MouseScrollDown
from textual.pilot import Pilot

from shmserve.errors import ConnectionLost, Denied
from shmserve.tools.top.app import TopApp
from shmserve.tools.top.columns import MODELS
from shmserve.tools.top.fleet_app import FleetApp
from shmserve.tools.top.fleet_poller import Pollers
from shmserve.tools.top.screens import ConfirmScreen, DetailScreen, HelpScreen, LogScreen
from tests.support.clients.activity_documents import client, counters, document, gpu, instance, model
from tests.support.clients.app_driver import NEVER_S, SIZES, AppDriver
from tests.unit.tools.top.fleet.scripted import Document, ScriptedSource

NAMES = ("alpha", "beta", "gamma", "delta")


class OperatedSource(ScriptedSource):
    """Each document is 2 s after the last one."""

    def __init__(self, *operations: str, names: tuple[str, ...] = NAMES) -> None:
        super().__init__("unix:///run/lane.sock", self.document)
        self.operations = operations or ("load", "unload", "restart")
        self.names = names
        self.error: Exception | None = None
        self.done: list[tuple[str, str, int | None, str]] = []
        self.records = 50
        self.step_reads = 0

    def document(self, number: int) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        models = [
            model(
                name,
                counted=counters(number * 100 * place),
                queued=10 - place,
                instances=[instance(f"{name}_0_{count}", batch_rows=count * place) for count in range(2)],
            )
            for place, name in enumerate(self.names)
        ]
        models[-1]["ensemble"] = True
        failed = model("broken", state="UNAVAILABLE", reason="no such file", instances=[], counters={})
        return document(2 * number, *models, failed, clients=[client(7, "[red]camera")], gpus=[gpu(0)])

    def operate(self, what: str, model: str, version: int | None, instance: str) -> list[str]:
        self.gate.wait()
        self.done.append((what, model, version, instance))
        if self.error is not None:
            raise self.error
        return ["it is old"] if what == "load" else []

    def history(self, model: str, version: int | None) -> dict[str, list[float | None]]:
        curve: list[float | None] = [*[50.0] * 8, *[0.0] * 8]
        return {"requests": curve} if (model, version) == ("beta", 1) else {}

    def recent(self) -> list[dict[str, Any]]:
        return [{"name": "beta", "version": "1", "requests": [0.0] * 52 + [7.0] * 8}]

    def steps(self, model: str, version: int | None) -> list[dict[str, Any]]:
        """Each execution waits 1 ms, and runs 3 ms; the second step also fails."""
        if model != "delta":
            return []
        self.step_reads += 1
        ns = self.step_reads * 10**9
        times = {"queue_ns": ns, "input_ns": ns, "infer_ns": ns, "output_ns": ns}
        count = self.step_reads * 1000
        both = (("alpha", "", 0), ("beta", "1", self.step_reads * 10))
        return [
            {"index": at, "model": name, "version": number, "count": count, "failed": failed, **times}
            for at, (name, number, failed) in enumerate(both)
        ]

    def log(self, model: str) -> list[dict[str, Any]]:
        if self.error is not None:
            raise self.error
        return [
            {"time": 0.0, "level": "error", "text": f"{model} failed [red]{number}"} for number in range(self.records)
        ]


class Driver(AppDriver[TopApp]):
    def __init__(self, app: TopApp, pilot: Pilot[str], source: OperatedSource) -> None:
        super().__init__(app, pilot)
        self.source = source

    async def read(self) -> None:
        await self.app.read()
        await self.pilot.pause()

    async def asked(self, question: str) -> None:
        """The dialog is shown, and its button has the focus."""
        app = self.app
        await self.until(lambda: isinstance(app.screen, ConfirmScreen) and app.focused and question in self.text)

    async def decided(self, key: str) -> None:
        """Presses a key that ends the dialog, and waits until the resulting operation has ended."""
        await self.press(key)
        await self.until(lambda: not isinstance(self.app.screen, ConfirmScreen))
        for worker in [one for one in self.app.workers if one.group == "operations"]:
            await worker.wait()
        await self.pilot.pause()

    async def confirm(self, keys: str, question: str, answer: str = "y") -> None:
        await self.press(*keys.split())
        await self.asked(question)
        await self.decided(answer)

    @property
    def names(self) -> list[str]:
        return self.column("model")

    @property
    def message(self) -> str:
        screens = [screen for screen in self.app.screen_stack if not isinstance(screen, ConfirmScreen)]
        return self.message_of(screens[-1])


def driven(
    source: OperatedSource | None = None, size: tuple[int, int] = (100, 30), **options: Any
) -> Callable[[Callable[[Any], Awaitable[None]]], Callable[[], None]]:
    made = source or OperatedSource()

    async def main(steps: Callable[[Any], Awaitable[None]]) -> None:
        app = TopApp(made, made.read(), **{"interval": NEVER_S} | options)
        async with app.run_test(size=size) as pilot:
            driver = Driver(app, pilot, made)
            await driver.read()
            await steps(driver)

    def decorate(steps: Callable[[Any], Awaitable[None]]) -> Callable[[], None]:
        def test() -> None:
            asyncio.run(main(steps))
            assert made.closed

        return test

    return decorate


@pytest.mark.parametrize("size", SIZES)
def test_the_screen_fits_terminals_of_any_size(size: tuple[int, int]) -> None:
    @driven(size=size)
    async def test(top: Driver) -> None:
        top.assert_fits(size)
        if size[0] >= 80:
            assert "test 1.2.3   READY" in top.text.split("\n")[0]
            assert "alpha" in top.text
            assert "q quit" in " ".join(top.text.split("\n")[-1].split())
        for key in "1234":
            await top.press(key)
            top.assert_fits(size)
        await top.press("1", "enter")
        await top.until(lambda: isinstance(top.app.screen, DetailScreen))
        await top.press("u")
        await top.asked("Unload model")

    test()


@driven(size=(100, 64), table="instances", sort_key="batch_rows", filter_text="beta")
async def test_keys_switch_between_the_tables_and_help(top: Driver) -> None:
    assert top.column("instance") == ["beta_0_1", "beta_0_0"]
    await top.press("escape", "tab")
    assert "[red]camera" in top.text, "no markup"
    await top.press("tab")
    assert "Stand-in" in top.text
    await top.press("tab")
    assert top.names == ["alpha", "beta", "broken", "delta", "gamma"]
    await top.press("shift+tab")
    assert top.table.table.name == "gpus"
    await top.press("1", "question_mark")
    await top.until(lambda: isinstance(top.app.screen, HelpScreen) and "99th percentile" in top.text)
    assert [column.about for column in MODELS.columns if column.about not in top.text] == []
    await top.press("escape")
    await top.until(lambda: not isinstance(top.app.screen, HelpScreen))


@driven()
async def test_sorting_by_keys(top: Driver) -> None:
    columns = [column.key for column in top.table.layout_of_columns.columns]
    for _ in range(columns.index("queued")):
        await top.press("greater_than_sign")
    assert top.names[:4] == ["alpha", "beta", "gamma", "delta"]
    await top.press("R")
    assert top.names[:4] == ["broken", "delta", "gamma", "beta"]
    assert "by queue, reversed" in top.text
    for _ in range(columns.index("queued")):
        await top.press("less_than_sign")
    assert top.names == ["alpha", "beta", "broken", "delta", "gamma"]
    await top.press("less_than_sign", "greater_than_sign")
    assert top.names == ["alpha", "beta", "broken", "delta", "gamma"], "the last column is before the first"


@driven()
async def test_the_cursor_stays_at_its_row_and_the_table_scrolls_with_it(top: Driver) -> None:
    await top.press("down", "j")
    assert top.table.selected is not None
    assert top.table.selected["model"] == "broken"
    assert "broken 1: no such file" in top.message
    top.source.names = ("zeta", "alpha", "another", "beta", "between")
    await top.read()
    assert top.table.selected["model"] == "broken"
    top.source.names = ("alpha",)
    await top.press("end")
    await top.read()
    assert top.table.selected["model"] == "broken", "the row is gone: the last one"
    top.source.names = tuple(f"model-{number:03}" for number in range(100))
    await top.press("home", "up")
    await top.read()
    assert "model-000" in top.text
    assert "model-099" not in top.text
    await top.press("end")
    assert "model-099" in top.text
    assert "model-000" not in top.text
    assert "req/s" in top.text.split("model-0")[0], "the heading stays"
    await top.press("pageup")
    assert top.table.cursor == 100 - (top.table.size.height - 2)


@driven()
async def test_the_filter_selects_rows_by_name(top: Driver) -> None:
    await top.press("slash", *"eta")
    assert top.names == ["beta"]
    assert "Models 1/5" in top.text
    await top.press("q", "u")
    assert top.names == [], "letters are words here, not keys"
    assert "no models with 'etaqu'; Esc shows all" in top.text
    await top.press("backspace", "backspace", "enter")
    await top.press("2")
    assert {row["instance"] for row in top.table.rows} == {"beta_0_0", "beta_0_1"}
    await top.press("escape")
    assert len(top.table.rows) == 8


@driven()
async def test_enter_shows_the_details_of_a_model(top: Driver) -> None:
    top.app.interval = 2.0
    await top.press("down", "enter")
    await top.until(lambda: isinstance(top.app.screen, DetailScreen) and "beta  version 1" in top.text)
    await top.until(lambda: "████▁" in top.text)  # recorded before the first refresh, every other second
    assert "50.0" in top.text
    assert "beta_0_1" in top.text
    assert "alpha" not in top.text
    await top.press("slash", "2", "tab")  # keys of the overview
    assert isinstance(top.app.screen, DetailScreen)
    top.source.names = ("alpha",)
    await top.read()
    assert "beta is not listed by the server any more" in top.text
    await top.press("escape")
    await top.until(lambda: not isinstance(top.app.screen, DetailScreen))
    assert top.names == ["alpha", "broken"]


@driven()
async def test_steps_are_shown_below_their_ensemble_and_in_its_details(top: Driver) -> None:
    assert "delta ▸" in top.text
    await top.press("down", "down", "down", "s")
    await top.until(lambda: top.source.step_reads)
    await top.read()
    assert top.names == ["alpha", "beta", "broken", "delta", "alpha", "beta", "gamma"]
    for line in (r"├ alpha +1 ", r"└ beta +1 "):
        assert re.search(line, top.text), top.text
    first, second = top.table.rows[4:6]
    assert (first["queue_seconds"], first["compute_seconds"]) == (0.001, 0.003)
    assert first["failed_per_s"] == 0 < second["failed_per_s"] < second["requests_per_s"]
    await top.press("down", "down", "r")
    await top.asked("Restart model 'beta' version 1?")
    await top.press("n", "s")
    await top.until(lambda: top.names == ["alpha", "beta", "broken", "delta", "gamma"])
    await top.press("home", "s")
    await top.until(lambda: "no steps of model 'alpha', which is not an ensemble" in top.message)
    await top.press("down", "down", "down", "enter")
    await top.until(lambda: isinstance(top.app.screen, DetailScreen) and "steps" in top.text)
    assert re.search(r"beta +1 ", top.text)
    await top.press("escape")
    await top.until(lambda: not isinstance(top.app.screen, DetailScreen))
    reads = top.source.step_reads
    await top.read()
    assert top.source.step_reads == reads, "its details are closed"


@driven(size=(160, 12), interval=30.0)
async def test_graphs_of_rows_and_the_mouse(top: Driver) -> None:
    await top.until(lambda: re.search(r"^beta .* ▁+█ ", top.text, re.M))  # with what was recorded before
    place = next(number for number, line in enumerate(top.text.split("\n")) if line.startswith("beta "))
    await top.pilot.click(offset=(2, place))
    assert top.table.selected is not None
    assert top.table.selected["model"] == "beta"
    top.table.post_message(MouseScrollDown(top.table, 2, 2, 0, 1, 0, False, False, False))
    await top.until(lambda: top.table.scroll_offset.y > 0)
    assert top.table.selected["model"] == "beta"
    await top.pilot.click(offset=(2, place - 1), times=2)
    await top.until(lambda: isinstance(top.app.screen, DetailScreen))


@driven()
async def test_the_log_of_a_model_follows_unless_it_was_scrolled_up(top: Driver) -> None:
    await top.press("down", "g")
    await top.until(lambda: isinstance(top.app.screen, LogScreen) and "ERROR beta failed [red]49" in top.text)
    top.source.records = 52
    await top.read()
    assert "[red]51" in top.text
    await top.press("home")
    await top.until(lambda: "Log of beta" in top.text)
    top.source.records = 54
    await top.read()
    assert "Log of beta" in top.text
    await top.press("g")
    await top.until(lambda: not isinstance(top.app.screen, LogScreen))
    top.source.error = Denied("it needs the role operate")
    await top.press("enter", "g")
    await top.until(lambda: "the log of model 'beta' cannot be read: it needs the role operate" in top.message)
    await top.press("escape")


@driven()
async def test_operations_after_a_confirmation(top: Driver) -> None:
    for key in ("n", "escape", "enter"):  # the focus is on Cancel
        await top.confirm("u", "Unload model 'alpha'?", key)
    assert top.source.done == []
    top.source.gate.clear()
    await top.press("u")
    await top.asked("Unload model 'alpha'?")
    await top.press("y")
    await top.until(lambda: "unloading model 'alpha'" in top.message)
    top.source.gate.set()
    await top.until(lambda: "unload of model 'alpha' done" in top.message)
    await top.press("l")
    await top.asked("Load model 'alpha'?")
    await top.press("tab")
    await top.decided("enter")
    assert "warning: it is old" in top.message
    await top.confirm("r", "Restart model 'alpha' version 1?")
    await top.confirm("2 down down r", "Restart instance 'beta_0_0' of model 'beta'?")
    await top.press("1", "end", "enter")
    await top.until(lambda: isinstance(top.app.screen, DetailScreen))
    await top.confirm("r", "Restart model 'gamma' version 1?")
    assert "restart of model 'gamma' version 1 done" in top.message
    assert top.source.done == [
        ("unload", "alpha", None, ""),
        ("load", "alpha", None, ""),
        ("restart", "alpha", 1, ""),
        ("restart", "beta", 1, "beta_0_0"),
        ("restart", "gamma", 1, ""),
    ]


@driven(OperatedSource("load", "unload"))
async def test_operations_that_are_not_possible(top: Driver) -> None:
    await top.press("r")
    assert "restart is not possible over HTTP" in top.message
    await top.press("3", "u")
    assert "select a model or an instance first" in top.message
    await top.press("1", "u")
    await top.asked("Unload model 'alpha'?")
    top.source.error = Denied("'unload' needs the role operate\n\x1b[2J")
    await top.decided("y")
    assert "unload of model 'alpha' failed: 'unload' needs the role operate \\x1b[2J" in top.message
    await top.press("escape")
    assert top.message == ""


@driven()
async def test_a_server_that_does_not_answer(top: Driver) -> None:
    top.source.error = ConnectionLost("no server at unix:///run/lane.sock")
    await top.read()
    assert re.search(r"no answer for \d+ s: no server at unix:///run/lane\.sock", top.text)
    assert "alpha" in top.text, "the last values stay"
    top.source.error = None
    await top.read()
    assert "no answer" not in top.text


@pytest.mark.parametrize("operation", [False, True])
def test_quitting_while_the_server_is_asked(operation: bool) -> None:
    @driven()
    async def test(top: Driver) -> None:
        if operation:
            await top.press("u")
            await top.asked("Unload model 'alpha'?")
        top.source.gate.clear()
        top.source.reading.clear()
        await top.press("y" if operation else "full_stop")
        await top.until(lambda: top.app.busy if operation else top.source.reading.is_set())
        await top.press("ctrl+c")

    test()


@driven()
async def test_the_interval_and_pauses(top: Driver) -> None:
    count = top.source.reads
    await top.press("space")
    assert "paused" in top.text
    top.app.interval = 2.0
    await top.press("plus")
    assert top.app.interval == 5.0
    await top.press("minus", "minus", "minus", "minus", "minus")
    assert top.app.interval == 0.5
    await top.press("full_stop")
    await top.until(lambda: top.source.reads > count)
    await top.press("space")
    assert "every 0.5 s" in top.text


def answers(*names: str) -> Callable[[int], Document]:
    return lambda number: document(2 * number, *[model(name, counted=counters(100 * number)) for name in names])


def lost(number: int) -> Document:
    raise ConnectionLost("no server at c (refused)")


def fleet_sources() -> dict[str, ScriptedSource]:
    return {
        "a": ScriptedSource("http://a", answers("alpha", "beta")),
        "b": ScriptedSource("http://b", answers("alpha")),
        "c": ScriptedSource("http://c", lost),
    }


class FleetDriver(AppDriver[FleetApp]):
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


def drive(
    steps: Callable[[FleetDriver], Awaitable[None]], size: tuple[int, int] = (120, 30), **options: Any
) -> str | None:
    async def main() -> str | None:
        fleet = RecordingFleet(fleet_sources(), NEVER_S)
        with fleet:
            app = FleetApp(fleet, NEVER_S, **options)
            async with app.run_test(size=size) as pilot:
                driver = FleetDriver(app, pilot, fleet)
                await driver.until(lambda: all(snapshot.settled for snapshot in fleet.snapshots))
                await driver.proceed()
                await steps(driver)
            return app.return_value

    return asyncio.run(main())


def test_the_servers() -> None:
    async def steps(top: FleetDriver) -> None:
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
    async def steps(top: FleetDriver) -> None:
        for key in "123":
            await top.press(key)
            top.assert_fits(size)
        await top.press("q" if size == SIZES[0] else "ctrl+c")

    assert drive(steps, size=size) == ("" if size == SIZES[0] else None)


def test_a_model_and_its_servers() -> None:
    async def steps(top: FleetDriver) -> None:
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


def test_the_message_and_pauses() -> None:
    async def steps(top: FleetDriver) -> None:
        assert top.column("server") == ["c"]
        assert top.message == "c: it went away"
        await top.press("escape")
        await top.press("escape")
        assert top.message == "c: no server at c (refused)", "of the selected row"
        await top.press("space")
        before = top.column("uptime_seconds")
        top.fleet.refresh()
        await top.app.read()
        assert top.column("uptime_seconds") == before
        await top.press("space")
        await top.until(lambda: top.column("uptime_seconds") != before)

    drive(steps, filter_text="c", sort_key="p99", message="c: it went away")
