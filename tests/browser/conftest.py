"""A server with models for the page, its gateway, and a browser. Without a browser, all tests are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from shmserve.gateway.auth import tokens
from shmserve.testing import Server
from tests.browser.models import write_models
from tests.support.browser import chromium
from tests.support.browser.chromium import Chromium
from tests.support.browser.tab import Tab, opened
from tests.support.gateway.running_gateway import Gateway

EVIL = "evil.example"
"""A host name that its owner has rebound to this machine."""


class Site(NamedTuple):
    """A server with its gateway. `token`: a token with all roles, if the gateway knows one."""

    server: Server
    gateway: Gateway
    repository: Path
    token: str = ""

    @property
    def origin(self) -> str:
        return f"http://localhost:{self.gateway.http}"

    def ask(self, model: str, first: float = 1.0) -> None:
        with self.server.client() as client:
            client.infer(model, {"x": np.array([[first, 2.0]], np.float32)})

    def is_ready(self, model: str) -> bool:
        with self.server.client() as client:
            return client.ready(model)


@contextmanager
def serving(server: Server, repository: Path, *options: str, token: str = "") -> Iterator[Site]:
    """Runs the server, and a gateway with these options."""
    with server:
        gateway = Gateway(server, *options)
        try:
            yield Site(server, gateway, repository, token)
        finally:
            gateway.stop()


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    executable = chromium.find()
    if executable is None:
        pytest.skip("there is no Chromium (Debian: apt-get install chromium); SHMSERVE_BROWSER names another one")
    started = Chromium(executable, tmp_path_factory.mktemp("browser") / "profile", (EVIL,))
    try:
        yield started
    finally:
        started.close()


@pytest.fixture(scope="session")
def site(browser: Chromium, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Without its token, callers may run models and see the page."""
    folder = tmp_path_factory.mktemp("site")
    repository = folder / "models"
    repository.mkdir()
    write_models(repository)
    token, line = tokens.new("operator", "infer,observe,operate,page")
    (folder / "tokens").write_text(f"{line}\n")
    server = Server(repository, "--model-control-mode", "explicit", "--load-model", "*")
    options = ("--tokens-file", str(folder / "tokens"), "--http-roles", "infer,observe,page")
    with serving(server, repository, *options, token=token) as site:
        yield site


@pytest.fixture
def tab(browser: Chromium, site: Site) -> Iterator[Tab]:
    with opened(browser, site.origin) as tab:
        yield tab
