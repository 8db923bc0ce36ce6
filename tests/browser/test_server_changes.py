"""The page while its server changes: a thousand models, and gateways and servers that stop and return."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmserve.testing import Server
from tests.browser.conftest import take
from tests.support.browser.chromium import Chromium
from tests.support.browser.tab import opened
from tests.support.gateway.running_gateway import Gateway
from tests.support.model_files import write_model

pytestmark = pytest.mark.process

MODELS = 1000
TENSORS = """
input [ { name: "x" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 2 ] } ]
"""
STEP = """
ensemble_scheduling { step { model_name: "numbers" model_version: -1
  input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } } }
"""
DRAWN = "document.querySelectorAll('[data-model]').length"
LISTED = "Number(document.querySelector('table.models').ariaRowCount) - 1"


def write_numbers(repository: Path) -> None:
    repository.mkdir()
    write_model(repository, "numbers", f'name: "numbers" backend: "identity" max_batch_size: 8 {TENSORS}')


def ask(server: Server, model: str) -> None:
    with server.client() as client:
        client.infer(model, {"x": np.ones((1, 2), np.float32)})


@pytest.fixture(scope="module")
def thousand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Gateway]]:
    """A thousand ensembles of one model, which need only a few processes."""
    repository = tmp_path_factory.mktemp("thousand") / "models"
    write_numbers(repository)
    for number in range(MODELS):
        name = f"model-{number:04}"
        write_model(repository, name, f'name: "{name}" platform: "ensemble" max_batch_size: 8 {TENSORS} {STEP}')
    with Server(repository, start_timeout=300) as server:
        gateway = Gateway(server)
        try:
            yield server, gateway
        finally:
            gateway.stop()


def test_only_visible_rows_of_a_thousand_models_are_drawn(browser: Chromium, thousand: tuple[Server, Gateway]) -> None:
    server, gateway = thousand
    with opened(browser, f"http://localhost:{gateway.http}") as tab:
        tab.wait(f"{LISTED} === {MODELS + 1}")
        assert tab.evaluate(DRAWN) < 60
        take(tab, "thousand")
        tab.write("input[type=search]", "model-07")
        tab.wait(f"{LISTED} === 100")
        assert tab.evaluate("document.querySelector('[data-model]').dataset.model") == "model-0700"
        tab.write("input[type=search]", "")
        tab.wait(f"{LISTED} === {MODELS + 1}")
        tab.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
        tab.wait("document.querySelector('[data-model=numbers]')")
        assert tab.evaluate(DRAWN) < 60
        tab.evaluate("scrollTo(0, 0)")
        tab.wait("document.querySelector('[data-model=model-0000]')")
        sorts = "document.querySelector('th.requests').ariaSort === 'descending'"
        tab.click("th.requests button")
        tab.wait(sorts)
        while tab.evaluate("document.querySelector('[data-model]').dataset.model") != "model-0777":
            ask(server, "model-0777")
        tab.go("#/model/model-0777")
        tab.wait("document.querySelector('svg[data-graph]')")


def test_only_changed_models_are_sent(thousand: tuple[Server, Gateway]) -> None:
    server, gateway = thousand
    with contextlib.closing(gateway.connection()) as connection:
        connection.request("GET", "/page/events")
        answer = connection.getresponse()
        assert answer.status == 200

        def event() -> tuple[str, Any]:
            name, data, _ = (answer.readline().decode().rstrip("\n") for _ in range(3))
            return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))

        name, state = event()
        assert (name, len(state["models"])) == ("state", MODELS + 1)
        ask(server, "model-0042")
        changed: set[str] = set()
        while "model-0042" not in changed:
            name, change = event()
            assert name == "change"
            changed |= {row["name"] for row in change["models"]}
        assert changed <= {"model-0042", "model-0777", "numbers"}, "the last two are of the test before"


def test_the_page_reconnects_after_a_gateway_restart_and_reports_a_lost_server(
    browser: Chromium, tmp_path: Path
) -> None:
    repository = tmp_path / "models"
    write_numbers(repository)
    with Server(repository) as server:
        gateway = Gateway(server)
        try:
            with opened(browser, f"http://localhost:{gateway.http}") as tab:
                tab.wait_for("[data-model=numbers]", "READY")
                gateway.stop()
                tab.wait("document.body.dataset.connection === 'down'")
                assert "Trying again" in tab.text("#banner")
                take(tab, "reconnecting")
                gateway = Gateway(server, "--http-port", str(gateway.http))
                tab.wait("document.body.dataset.connection === 'live' && document.querySelector('#banner').hidden")
                server.kill()
                tab.wait("document.body.dataset.connection === 'down'")
                assert tab.evaluate("document.querySelector('[data-model=numbers]') !== null"), "the last known state"
                server.start()
                tab.wait("document.body.dataset.connection === 'live'")
                tab.wait_for("[data-model=numbers]", "READY")
                ask(server, "numbers")
        finally:
            gateway.stop()
