"""Samples, served by the shared server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shmserve.repo import samples
from shmserve.testing import Server
from tests.support.shared_server import SharedServer


@pytest.fixture(scope="module")
def server(
    request: pytest.FixtureRequest, shared_server: SharedServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Serves the set of samples that the module names in SAMPLES."""
    folder = tmp_path_factory.mktemp("samples")
    built = samples.build(folder, lambda text: None, request.module.SAMPLES)
    with shared_server.serving(folder, *built) as server:
        yield server
