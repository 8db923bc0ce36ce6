"""Fixtures for tests with real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import shmserve
from shmserve.testing import Server
from tests import ROOT
from tests.support.shared_server import SharedServer


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServer]:
    """The server for tests that need only their own models: `with shared_server.serving(folder): ...`."""
    server = SharedServer(tmp_path_factory.mktemp("shared"))
    with server:
        yield server
        assert not list(server.root.iterdir()), "a test left its models to the others"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, shared_server: SharedServer, repository: Path) -> Iterator[SharedServer]:
    """Serves the models that `write_models` of the module writes."""
    request.module.write_models(repository)
    with shared_server.serving(repository) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[shmserve.Client]:
    """A client of the server of the module."""
    with server.client() as made:
        yield made


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a clean clone of HEAD. The environment has no variable that refers to the checkout."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    place = tmp_path_factory.mktemp("wheel")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_"))}
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input")
    for command in (
        ("git", "clone", "--quiet", "--depth", "1", ROOT.as_uri(), "clone"),
        (*pip, "wheel", "--no-deps", "--wheel-dir", str(place), str(place / "clone")),
    ):
        ended = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    (found,) = place.glob("shmserve-*.whl")
    return found
