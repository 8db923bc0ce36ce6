"""`shmserve drain` against a real server, and how clients and balancers see it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import shmserve
from shmserve.errors import DeadlineExceeded
from shmserve.testing import Server
from tests.support.commands import COMMAND, run
from tests.support.gateway.rpc import Rpcs, message
from tests.support.gateway.served_gateways import ask
from tests.support.living import identity, until
from tests.support.system.terminal import Terminal

pytestmark = pytest.mark.process

SEQUENCES = "sequence_batching { max_sequence_idle_microseconds: 600000000 oldest { max_candidate_sequences: 8 } }\n"
ONE = {"x": np.ones((1, 3), np.float32)}
QUIET = ("--quiet", "0.3")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("models")
    identity(root, "plain")
    identity(root, "talks", SEQUENCES)
    with Server(root, gateway=True) as running:
        yield running


@pytest.fixture
def client(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[shmserve.Client]:
    monkeypatch.setenv("SHMSERVE_RUNTIME_DIR", str(server.runtime_dir))
    monkeypatch.delenv("SHMSERVE_URL", raising=False)
    with server.client() as made:
        yield made
        made.undrain()


def shown(server: Server) -> tuple[Any, ...]:
    """What the endpoints say of the server and its model."""
    http, grpc = (int(server.endpoints[name].rpartition(":")[2]) for name in ("http", "grpc"))
    paths = "/v2/health/ready", "/v2/health/live", "/v2/models/plain/ready"
    with Rpcs(grpc) as rpcs:
        ready = rpcs.ServerReady(message("ServerReadyRequest")).ready
        health = rpcs.Check(message("grpc.health.v1.HealthCheckRequest")).status
    return (*[ask(http, path)[0] for path in paths], ready, health)


IN, OUT = (200, 200, 200, True, 1), (400, 200, 200, False, 2)


def test_drain_takes_the_server_out_of_service_and_undrain_puts_it_back(
    server: Server, client: shmserve.Client
) -> None:
    assert shown(server) == IN
    assert run("drain", *QUIET) == (
        0,
        "the server is empty: no request for 0.3 s; stop it, or run `shmserve drain --undrain`\n",
        "",
    )
    assert shown(server) == OUT
    assert not client.ready()
    assert client.ready("plain")
    assert client.live()
    reason = "the server is not ready: it is out of service; `shmserve drain --undrain` puts it back"
    assert run("ready") == (1, "", f"shmserve ready: {reason}\n")
    with pytest.raises(DeadlineExceeded, match=r"is not ready after 0\.2 s: it is out of service"):
        client.wait_ready(timeout=0.2)
    np.testing.assert_array_equal(client.infer("plain", ONE)["y"], ONE["x"], "it is served")
    assert "shmserve_out_of_service 1\n" in client.metrics()
    assert client.activity()["server"]["out_of_service"] is True

    os.kill(server.pid, signal.SIGHUP)
    until(client, lambda: "repositories reread" in server.log)
    assert shown(server) == OUT, "SIGHUP does not put it back"

    assert run("drain", "--undrain") == (0, "the server is in service again\n", "")
    assert shown(server) == IN
    assert client.service()["quiet_seconds"] == 0
    assert run("ready")[0] == 0


def test_drain_waits_for_open_sequences(client: shmserve.Client) -> None:
    """An open sequence, which continues, and one that begins while the server is out of service."""
    client.infer("talks", ONE, sequence=1, sequence_start=True)
    code, out, error = run("drain", *QUIET, "--timeout", "0.5")
    assert (code, out) == (1, "")
    assert error == (
        "shmserve drain: not empty after 0.5 s: 0 requests, 1 open sequence; the server stays out of service\n"
    )
    client.infer("talks", ONE, sequence=2, sequence_start=True)
    code, out, _ = run("drain", "--no-wait", "--json")
    assert code == 0
    assert json.loads(out).items() >= {"out_of_service": True, "sequences": 2, "quiet_seconds": 0.0}.items()
    for sequence in (1, 2):
        client.infer("talks", ONE, sequence=sequence, sequence_end=True)
    code, out, error = run("drain", *QUIET, "--json")
    assert (code, error) == (0, "")
    *before, last = map(json.loads, out.splitlines())
    assert before
    assert all(not line["empty"] for line in before)
    assert last["empty"]
    assert last["quiet_seconds"] >= 0.3
    assert (last["requests"], last["sequences"]) == (0, 0)


def test_drain_fails_if_the_server_is_put_back_into_service_meanwhile(server: Server, client: shmserve.Client) -> None:
    """Runs on a terminal, where the progress is shown."""
    client.infer("talks", ONE, sequence=1, sequence_start=True)
    with Terminal([*COMMAND, "drain", "--runtime-dir", str(server.runtime_dir)], 80, 10, {}) as terminal:
        terminal.wait_for("0 requests, 1 open sequence")
        client.undrain()
        terminal.wait_for("shmserve drain: the server was put back into service meanwhile")
        assert terminal.ends() == 1
    client.infer("talks", ONE, sequence=1, sequence_end=True)
