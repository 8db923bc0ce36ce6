"""The page while its server changes: a thousand models, and gateways and servers that stop and return."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shmserve.testing import Server
from tests.browser.conftest import Site, serving
from tests.support.browser.chromium import Chromium
from tests.support.browser.tab import Tab, opened
from tests.support.ensemble_models import ensemble
from tests.support.gateway.running_gateway import Gateway
from tests.support.living import identity

pytestmark = pytest.mark.process

MODELS = 1000
DRAWN = "document.querySelectorAll('[data-model]').length"
LISTED = "Number(document.querySelector('table.models').ariaRowCount) - 1"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A thousand ensembles of one model, which need only a few processes."""
    repository = tmp_path_factory.mktemp("thousand") / "models"
    identity(repository, "numbers")
    for number in range(MODELS):
        ensemble(repository, f"model-{number:04}", "x", "y", "numbers(x:x)->(y:y)", more="max_batch_size: 8")
    with serving(Server(repository, start_timeout=300), repository) as site:
        yield site


def test_only_visible_rows_of_a_thousand_models_are_drawn(tab: Tab, site: Site) -> None:
    tab.wait(f"{LISTED} === {MODELS + 1}")
    assert tab.evaluate(DRAWN) < 60
    tab.write("input[type=search]", "model-07")
    tab.wait(f"{LISTED} === 100")
    tab.expect("document.querySelector('[data-model]').dataset.model", "model-0700")
    tab.write("input[type=search]", "")
    tab.wait(f"{LISTED} === {MODELS + 1}")
    tab.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
    tab.wait("document.querySelector('[data-model=numbers]')")
    assert tab.evaluate(DRAWN) < 60
    tab.evaluate("scrollTo(0, 0)")
    tab.wait("document.querySelector('[data-model=model-0000]')")
    tab.click("th.requests button")
    tab.wait("document.querySelector('th.requests').ariaSort === 'descending'")
    while tab.evaluate("document.querySelector('[data-model]').dataset.model") != "model-0777":
        site.ask("model-0777")
    tab.go("#/model/model-0777")
    tab.wait("document.querySelector('svg[data-graph]')")


def test_the_page_reconnects_after_a_gateway_restart_and_reports_a_lost_server(
    browser: Chromium, tmp_path: Path
) -> None:
    repository = tmp_path / "models"
    identity(repository, "numbers")
    with Server(repository) as server:
        gateway = Gateway(server)
        try:
            with opened(browser, f"http://localhost:{gateway.http}") as tab:
                tab.wait_for("[data-model=numbers]", "READY")
                gateway.stop()
                tab.wait("document.body.dataset.connection === 'down'")
                tab.wait_for("#banner", "Trying again")
                gateway = Gateway(server, "--http-port", str(gateway.http))
                tab.wait("document.body.dataset.connection === 'live' && document.querySelector('#banner').hidden")
                server.kill()
                tab.wait("document.body.dataset.connection === 'down'")
                assert tab.evaluate("document.querySelector('[data-model=numbers]') !== null"), "the last known state"
                server.start()
                tab.wait("document.body.dataset.connection === 'live'")
                tab.wait_for("[data-model=numbers]", "READY")
                with server.client() as client:
                    assert client.ready("numbers")
        finally:
            gateway.stop()
