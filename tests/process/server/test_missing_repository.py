"""A server whose repository is missing, started with --exit-on-error=false: it runs, but is neither live nor ready."""

from __future__ import annotations

from http.client import HTTPConnection
from pathlib import Path

import pytest

from shmserve.testing import Server

pytestmark = pytest.mark.process


def status(address: str, path: str) -> int:
    connection = HTTPConnection(address, timeout=60)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize("mode", ["none", "poll", "explicit"])
def test_a_server_with_a_missing_repository_runs_but_is_not_live(mode: str, tmp_path: Path) -> None:
    options = ["--exit-on-error=false", "--model-control-mode", mode, "--metrics-config", "summary_latencies=true"]
    with Server(tmp_path / "none", *options, gateway=True) as server, server.client() as client:
        found = [status(server.endpoints["http"], path) for path in ("/v2/health/live", "/v2/health/ready", "/v2")]
        assert found == [400, 400, 200]
        assert client.models() == []
    assert "none is not a directory: serving no models; the server is neither live nor ready" in server.log
