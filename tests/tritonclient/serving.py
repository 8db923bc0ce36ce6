"""A server with the models of models.py and a gateway, and the Python that has `tritonclient`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shmserve.testing import Server
from tests import ROOT
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
    control = ("--model-control-mode", "explicit", "--load-model", load)
    with Server(repository, "--id", "triton", *control) as server, _gateway(server, ports or {}) as endpoints:
        yield endpoints


@contextmanager
def _gateway(server: Server, ports: dict[str, int]) -> Iterator[dict[str, str]]:
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "shmserve.clients.cli.main", "gateway", "--runtime-dir", str(server.runtime_dir)]
    command += [f"--{name}-port={ports.get(name, 0)}" for name in ("http", "grpc", "metrics")]
    command += ["--http-roles", ROLES, "--grpc-roles", ROLES, "--allow-client-shm", "--ready-fd", str(writer)]
    with open(reader) as ready:
        process = subprocess.Popen(command, pass_fds=[writer], stderr=subprocess.PIPE)
        os.close(writer)
        try:
            words = ready.readline().split()
            if words[:1] != ["READY"]:
                raise RuntimeError(f"the gateway has not come up:\n{process.communicate()[1].decode()}")
            named = (word.partition("=") for word in words[1:])
            yield {endpoint: f"127.0.0.1:{port}" for endpoint, _, port in named}
        finally:
            process.send_signal(signal.SIGTERM)
            log = process.communicate(timeout=END_S)[1].decode()
    if process.returncode or "Traceback" in log:
        raise RuntimeError(f"the gateway ended with code {process.returncode}:\n{log}")
