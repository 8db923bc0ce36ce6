"""Fixtures for tests of the gateway. A module may override them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.gateway.running_gateway import gated


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def gate(repository: Path) -> Path:
    """The named pipe that releases requests to the model `gated`."""
    return gated(repository)
