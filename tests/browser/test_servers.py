"""The page for several servers: two that know each other, one that needs a token, one that does not run, and one that
accepts connections but never answers."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shmserve.gateway.auth import tokens
from shmserve.testing import Server
from tests.support.browser.chromium import Chromium
from tests.support.browser.tab import Tab, opened
from tests.support.gateway.running_gateway import Gateway
from tests.support.living import identity
from tests.support.system.ports import free_ports

pytestmark = pytest.mark.process

FIRST, SECOND, THIRD, GONE, SILENT = range(5)


class Fleet:
    """Gateways of two brokers. GONE is not started. `silent`: the port of SILENT."""

    def __init__(self, servers: list[Server], folder: Path, silent: int) -> None:
        self.servers = servers
        self.urls = [f"http://localhost:{port}" for port in (*free_ports(4), silent)]
        self.token, line = tokens.new("viewer", "page")
        (folder / "tokens").write_text(f"{line}\n")
        self._options: list[list[str]] = [[], [], ["--tokens-file", str(folder / "tokens")], []]
        self.gateways = [self.start(number) for number in range(3)]

    def start(self, number: int) -> Gateway:
        port = self.urls[number].rpartition(":")[2]
        listed = ("--http-port", port, "--page-servers", ",".join(self.urls))
        return Gateway(self.servers[number], *listed, *self._options[number])

    def name(self, number: int) -> str:
        return self.urls[number].removeprefix("http://")


@pytest.fixture(scope="module")
def fleet(browser: Chromium, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    identity(folder / "models", "echo")
    with (
        Server(folder / "models") as first,
        Server(folder / "models") as second,
        socket.create_server(("127.0.0.1", 0)) as silent,
    ):
        fleet = Fleet([first, second, second, first], folder, silent.getsockname()[1])
        try:
            yield fleet
        finally:
            for gateway in fleet.gateways:
                gateway.stop()


@pytest.fixture
def tab(browser: Chromium, fleet: Fleet) -> Iterator[Tab]:
    with opened(browser, fleet.urls[FIRST], fleet.urls) as tab:
        tab.go("#/servers")
        tab.wait("document.body.dataset.view === 'servers'")
        yield tab


def cell(fleet: Fleet, number: int, column: str) -> str:
    row = f'[data-server="{fleet.name(number)}"]'
    return f"document.querySelector({json.dumps(f'{row} td.{column}')}).textContent"


def wait_for_state(tab: Tab, fleet: Fleet, number: int, state: str) -> None:
    tab.wait(f"{cell(fleet, number, 'status')} === {json.dumps(state)}")


def ask(server: Server) -> None:
    with server.client() as client:
        client.infer("echo", {"x": np.ones((1, 2), np.float32)})


def test_all_servers_are_listed_with_their_state_and_load(tab: Tab, fleet: Fleet) -> None:
    for number, state in ((FIRST, "ready"), (SECOND, "ready"), (THIRD, "refused"), (GONE, "unreachable")):
        wait_for_state(tab, fleet, number, state)
    tab.wait_for("#servers", "2 of 5 servers ready")
    tab.expect(cell(fleet, SILENT, "requests"), "\N{EN DASH}")
    tab.wait_for("main", f"{fleet.name(THIRD)}: it needs a token")
    tab.wait_for("main", f"{fleet.name(GONE)}: it does not answer, or {fleet.urls[FIRST]} is not in its --page-servers")
    measured = f"parseFloat({cell(fleet, SECOND, 'requests')}) > 0 && /s$/.test({cell(fleet, SECOND, 'wait')})"
    while not tab.evaluate(measured):
        ask(fleet.servers[SECOND])
    tab.expect(cell(fleet, FIRST, "wait"), "\N{EN DASH}")
    tab.expect(cell(fleet, FIRST, "listed"), "1")
    assert tab.unnamed() == []
    tab.size(360, 740, mobile=True)
    tab.wait("document.documentElement.scrollWidth <= 360")


def test_the_state_of_drained_started_and_stopped_servers_is_updated(tab: Tab, fleet: Fleet) -> None:
    wait_for_state(tab, fleet, SECOND, "ready")
    with fleet.servers[SECOND].client() as client:
        client.drain()
        wait_for_state(tab, fleet, SECOND, "out of service")
        client.undrain()
        wait_for_state(tab, fleet, SECOND, "ready")
    wait_for_state(tab, fleet, GONE, "unreachable")
    gateway = fleet.start(GONE)
    try:
        wait_for_state(tab, fleet, GONE, "ready")
        tab.wait_for("#servers", "3 of 5 servers ready")
    finally:
        gateway.stop()
    wait_for_state(tab, fleet, GONE, "unreachable")
    tab.expect(cell(fleet, GONE, "requests"), "\N{EN DASH}")
    tab.wait_for("#notices", f"{fleet.name(GONE)}: unreachable")


def test_a_token_is_sent_only_to_its_own_server(tab: Tab, fleet: Fleet) -> None:
    wait_for_state(tab, fleet, THIRD, "refused")
    tab.click("#access")
    tab.evaluate(f"document.querySelector('#token-server').value = {json.dumps(fleet.urls[THIRD])}")
    tab.write("#token", fleet.token)
    tab.press("Enter")
    wait_for_state(tab, fleet, THIRD, "ready")
    tab.wait_for("#servers", "3 of 5 servers ready")
    shown = [one["url"] for one in tab.requests if "Authorization" in one["headers"] and one["method"] == "GET"]
    assert set(shown) == {f"{fleet.urls[THIRD]}/page/events"}


def test_a_server_row_links_to_the_page_of_the_server(tab: Tab, fleet: Fleet) -> None:
    wait_for_state(tab, fleet, SECOND, "ready")
    loaded = tab.loaded
    tab.click(f'[data-server="{fleet.name(SECOND)}"] td.requests')
    tab.wait_for_load(loaded)
    tab.wait_for("[data-model=echo]", "READY")
    tab.expect("location.origin", fleet.urls[SECOND])
    tab.go("#/servers")
    tab.wait_for(f'[data-server="{fleet.name(SECOND)}"]', "this server")
    wait_for_state(tab, fleet, FIRST, "ready")
