"""Fixtures for tests of the gateway. A module may override them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shmserve.testing import Server
from tests.support.gateway.running_gateway import Gateway, gated
from tests.support.shared_server import SharedServer


@pytest.fixture(scope="module")
def gate(repository: Path) -> Path:
    """The named pipe that releases requests to the model `gated`."""
    return gated(repository)


@pytest.fixture(scope="module")
def server(gate: Path, server: SharedServer) -> SharedServer:
    """Also serves the model `gated`, which is written first."""
    return server


@pytest.fixture(scope="module")
def gateway(request: pytest.FixtureRequest, server: Server) -> Iterator[Gateway]:
    """A gateway with the options that the module names in GATEWAY. It logs no errors."""
    made = Gateway(server, *request.module.GATEWAY)
    yield made
    log = made.stop().decode()
    assert "Traceback" not in log
    assert "ERROR" not in log
