"""A server whose repository is missing, started with --exit-on-error=false: it runs, but is neither live nor ready."""

from __future__ import annotations

import contextlib
from http.client import HTTPConnection
from pathlib import Path

import pytest

from shmserve.testing import Server

pytestmark = pytest.mark.process


def test_a_server_with_a_missing_repository_runs_but_is_not_live(tmp_path: Path) -> None:
    options = ("--exit-on-error=false", "--model-control-mode=poll")
    with Server(tmp_path / "none", *options, gateway=True) as server, server.client() as client:
        for path, status in (("/v2/health/live", 400), ("/v2/health/ready", 400), ("/v2", 200)):
            with contextlib.closing(HTTPConnection(server.endpoints["http"], timeout=60)) as connection:
                connection.request("GET", path)
                assert connection.getresponse().status == status
        assert client.models() == []
    assert "none is not a directory: serving no models; the server is neither live nor ready" in server.log
