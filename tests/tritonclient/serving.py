"""A server with the models of models.py and a gateway, and the Python that has `tritonclient`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shmserve.testing import Server
from tests import ROOT
from tests.support.gateway.running_gateway import Gateway
from tests.tritonclient import models as client_models

PYTHON = Path(os.environ.get("SHMSERVE_TRITONCLIENT") or ROOT / "build" / "tritonclient-env" / "bin" / "python")
"""The Python of the environment that `make tritonclient` creates."""
ABSENT = "no environment with tritonclient: run `make tritonclient`, which installs it from the package registry"
ROLES = "infer,observe,operate"
END_S = 60


@contextmanager
def serving(
    repository: Path, names: list[str], load: str = "*", ports: dict[str, int] | None = None
) -> Iterator[dict[str, str]]:
    """Endpoint -> host and port. The server has the name that some clients expect, and grants all roles."""
    client_models.build(repository, names)
    options = [f"--{name}-port={port}" for name, port in (ports or {}).items()]
    options += ["--http-roles", ROLES, "--grpc-roles", ROLES, "--allow-client-shm"]
    with Server(repository, "--id", "triton", "--model-control-mode", "explicit", "--load-model", load) as server:
        gateway = Gateway(server, *options)
        try:
            yield {"http": f"127.0.0.1:{gateway.http}", "grpc": f"127.0.0.1:{gateway.grpc}"}
        finally:
            log = gateway.stop().decode()
    assert "Traceback" not in log, log
