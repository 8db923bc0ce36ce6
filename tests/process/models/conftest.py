"""A server in mode explicit that the tests of a module share; each test has its own models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import shmserve
from shmserve.testing import Server
from tests.support.living import unload_all


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository") / "models"
    root.mkdir()
    return root


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, root: Path) -> Iterator[Server]:
    """The shared server. A module may define its OPTIONS."""
    with Server(root, "--model-control-mode", "explicit", *getattr(request.module, "OPTIONS", ())) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[shmserve.Client]:
    """A client. After the test, no model is served and no worker is left."""
    with server.client() as client:
        yield client
        unload_all(client)
