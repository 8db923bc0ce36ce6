"""A server in mode explicit for the tests of a module, each of which has its own models.

It is the server that all modules share, unless the module defines OPTIONS.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import shmserve
from shmserve.testing import Server
from tests.support.living import unload_all


@pytest.fixture(scope="module")
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The repository, which is empty before and after the module."""
    if hasattr(request.module, "OPTIONS"):
        root = tmp_path_factory.mktemp("repository") / "models"
        root.mkdir()
    else:
        root = request.getfixturevalue("shared_server").root
    yield root
    for folder in root.iterdir():
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, root: Path) -> Iterator[Server]:
    if hasattr(request.module, "OPTIONS"):
        with Server(root, "--model-control-mode", "explicit", *request.module.OPTIONS) as server:
            yield server
    else:
        yield request.getfixturevalue("shared_server")


@pytest.fixture
def client(server: Server) -> Iterator[shmserve.Client]:
    """A client. After the test, no model is served and no worker is left."""
    with server.client() as client:
        yield client
        unload_all(client)
