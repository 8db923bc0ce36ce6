"""HAProxy as a proxy of TCP connections: the server learns its clients from the headers of the PROXY protocol."""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

import shmserve
from shmserve.clients.cli.commands.status import callers_of
from shmserve.testing import Server
from tests.fleet import load, programs
from tests.support.gateway.rpc import Rpcs, infer_request
from tests.support.living import until
from tests.support.patience import CLUSTER_PATIENCE_S
from tests.support.system.ports import free_ports

pytestmark = pytest.mark.process

CLIENTS = {"send-proxy": ("192.0.2.1", "192.0.2.1"), "send-proxy-v2": ("2001:db8:1:2::9", "2001:db8:1:2::/64")}
"""How HAProxy sends the header -> the address of the client, and what the server counts it by."""
DEFAULTS = "defaults\n    mode tcp\n    timeout connect 60s\n    timeout client 60s\n    timeout server 60s\n"
LISTENER = """
listen {sends}-{target}
    bind 127.0.0.1:{port}
    tcp-request connection set-src str({client})
    server server 127.0.0.1:{target} {sends}
"""


@pytest.fixture(params=[False, True], ids=["plain", "TLS"])
def certificates(request: pytest.FixtureRequest, certificate: Path) -> bytes | None:
    """What clients verify the server by; None: without TLS, which HAProxy does not end."""
    return certificate.read_bytes() if request.param else None


@pytest.fixture
def server(tmp_path: Path, certificate: Path, certificates: bytes | None) -> Iterator[Server]:
    load.write_models(tmp_path / "models", 0)
    options = ["--trusted-proxies=127.0.0.0/8"]
    options += [f"--tls-cert={certificate}"] if certificates else []
    with Server(tmp_path / "models", *options, gateway=True) as running:
        yield running


def haproxy(place: Path, ports: dict[tuple[str, int], int]) -> contextlib.AbstractContextManager[programs.Program]:
    """`ports`: how it sends the header, and the target -> the port on which it listens."""
    text = DEFAULTS
    for (sends, target), port in ports.items():
        text += LISTENER.format(sends=sends, target=target, port=port, client=CLIENTS[sends][0])
    (place / "haproxy.cfg").write_text(text)
    return programs.running("haproxy", place, "-W", "-db", "-f", str(place / "haproxy.cfg"))


def infer_over_http(port: int, certificates: bytes | None) -> None:
    if certificates is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=CLUSTER_PATIENCE_S)
    else:
        tls = ssl.create_default_context(cadata=certificates.decode().partition("-----BEGIN PRIVATE")[0])
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=CLUSTER_PATIENCE_S, context=tls)
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [2.0]}
    with contextlib.closing(connection):
        connection.request("POST", "/v2/models/twice/infer", json.dumps({"inputs": [tensor]}))
        answer = connection.getresponse()
        text = answer.read()
        assert answer.status == 200, text
        assert json.loads(text)["outputs"][0]["data"][0] == 4.0


def infer_over_grpc(port: int, certificates: bytes | None) -> None:
    credentials = None if certificates is None else grpc.ssl_channel_credentials(certificates)
    value = np.array([[2.0]], np.float32)
    with Rpcs(port, credentials=credentials) as rpcs:
        answer = rpcs.ModelInfer(
            infer_request("twice", {"x": ("FP32", value, value.tobytes())}),
            timeout=CLUSTER_PATIENCE_S,
            wait_for_ready=True,
        )
        assert np.frombuffer(answer.raw_output_contents[0], np.float32)[0] == 4.0


def requests_of_callers(client: shmserve.Client) -> dict[str, int]:
    return {entry["user"]: entry["requests"] for entry in callers_of(client.activity())}


def test_the_server_counts_the_clients_of_the_proxy(server: Server, tmp_path: Path, certificates: bytes | None) -> None:
    targets = {name: int(server.endpoints[name].rpartition(":")[2]) for name in ("http", "grpc")}
    pairs = [(sends, target) for sends in CLIENTS for target in targets.values()]
    ports = dict(zip(pairs, free_ports(len(pairs)), strict=True))
    with haproxy(tmp_path, ports), server.client() as client:
        for count, (sends, (_, name)) in enumerate(CLIENTS.items(), 1):
            infer_over_grpc(ports[sends, targets["grpc"]], certificates)  # its client waits for the port
            infer_over_http(ports[sends, targets["http"]], certificates)
            until(client, lambda name=name: requests_of_callers(client).get(name) == 2)  # type: ignore[misc]
            assert len(requests_of_callers(client)) == count
