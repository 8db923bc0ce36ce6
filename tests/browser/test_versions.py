"""How the page shows versions that share requests, autoscaled instances, and sleeping models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shmserve.testing import Server
from tests.browser.conftest import Site, serving
from tests.support.browser.chromium import Chromium
from tests.support.browser.tab import Tab
from tests.support.living import generation, identity
from tests.support.model_files import parameters

pytestmark = pytest.mark.process

NONE = "\N{EN DASH}"
ALL = "version_policy { all { } }\n"


@pytest.fixture(scope="module")
def site(browser: Chromium, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    repository: Path = tmp_path_factory.mktemp("versions") / "models"
    divided = ALL + parameters(traffic="2=10", aliases="prod=1,next=3", shadow="2=100")
    for version in (1, 2):
        generation(repository, "divided", version, divided, version)
    identity(repository, "scaled", parameters(min_instances="1", max_instances="4"))
    identity(repository, "sleeper", parameters(idle_unload_secs="0.05"))
    with serving(Server(repository), repository) as site:
        yield site


NAMES = (
    "[...document.querySelectorAll('[data-model] td.name')].map((one) => one.innerText.trim().split(/\\s+/).join(' '))"
)


def test_the_overview_shows_shares_bounds_sleep_and_drain(tab: Tab, site: Site) -> None:
    tab.wait_for("[data-model=sleeper] td.status", "ASLEEP")
    tab.wait_for("[data-model=scaled] td.instances", "1/1 (1-4)")
    tab.expect(NAMES, ["divided 1 90 % · @prod", "divided 2 10 % · shadow 100 %", "scaled 1", "sleeper 1"])
    tab.write("input[type=search]", "@prod")
    tab.expect(NAMES, ["divided 1 90 % · @prod"])
    with site.server.client() as client:
        tab.wait_for("#ready", "ready, up")
        client.drain()
        tab.wait_for("#ready", "out of service")
        client.undrain()
        tab.wait("document.querySelector('#ready').dataset.state === 'ready'")


def test_the_model_page_shows_traffic_shadow_and_aliases_of_versions(tab: Tab, site: Site) -> None:
    tab.go("#/model/divided")
    tab.wait_for("table[aria-label=Versions]", "next")
    cells = "[...row.children].map((one) => one.textContent)"
    rows = f"[...document.querySelectorAll('table[aria-label=Versions] tbody tr')].map((row) => {cells})"
    expected = [
        ["1", "READY", "90 %", NONE, NONE, "divided@prod"],
        ["2", "READY", "10 %", "10 %", "100 %", ""],
        ["3", "NOT LOADED", NONE, NONE, NONE, "divided@next"],
    ]
    tab.expect(rows, expected)
    different = "/ [1-9]\\d* different/.test(document.querySelector('main').innerText)"
    while not tab.evaluate(different):
        site.ask("divided")
    tab.wait_for("main", "Shadow 2 compared with version 1: 0 equal")
    with site.server.client() as client:
        client.traffic("divided", shares={}, aliases={"prod": None, "next": None}, shadow={})
    tab.wait("!document.querySelector('.chips').textContent.includes('%')")
    tab.wait_for(".chips", "version 2")


def test_the_model_page_shows_sleep_and_scaling_bounds(tab: Tab, site: Site) -> None:
    tab.go("#/model/scaled")
    tab.wait("document.querySelector('main').innerText.includes('1, at least 1, at most 4')")
    tab.go("#/model/sleeper")
    tab.wait_for(".problem.mild", "Asleep")
    while tab.evaluate("document.querySelector('.problem') !== null"):
        site.ask("sleeper")
    tab.wait_for(".problem.mild", "Asleep")
