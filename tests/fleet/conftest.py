"""Three servers at separate addresses, behind a balancer."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import NamedTuple

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from shmserve.testing import Server
from tests.fleet import balancers, load, programs
from tests.fleet.balancers import HERE, Balancer, Ports
from tests.support.system.ports import free_ports

BEHIND_A_BALANCER = ("--trusted-proxies", "127.0.0.0/8")
"""As recommended in the configurations."""
STOPS_SOON = ("--exit-timeout-secs", "8")
"""The server would otherwise wait long for sequences that have lost their clients."""


class Fleet(NamedTuple):
    servers: list[Server]
    ports: Ports
    """The ports, the same at each address."""


@contextmanager
def started(root: Path) -> Iterator[Fleet]:
    ports = Ports(*free_ports(2, *HERE))
    with ExitStack() as stack:
        servers = []
        for number, address in enumerate(HERE):
            models = root / f"models{number}"
            load.write_models(models, number)
            where = ("--http-address", address, "--grpc-address", address)
            listen = ("--http-port", str(ports.http), "--grpc-port", str(ports.grpc))
            options = (*where, *listen, "--allow-metrics", "false", *STOPS_SOON, *BEHIND_A_BALANCER)
            servers.append(stack.enter_context(Server(models, *options, gateway=True)))
        yield Fleet(servers, ports)


@pytest.fixture(scope="session")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with started(tmp_path_factory.mktemp("fleet")) as made:
        yield made


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for 127.0.0.1, with its key in the same file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fleet")])
    now = datetime.now(timezone.utc)
    addresses = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    made = made.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
    signed = made.add_extension(addresses, critical=False).sign(key, hashes.SHA256())
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    form = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path.write_bytes(
        signed.public_bytes(serialization.Encoding.PEM) + key.private_bytes(serialization.Encoding.PEM, *form)
    )
    return path


@pytest.fixture(scope="module", params=balancers.KINDS)
def balancer(
    request: pytest.FixtureRequest, lasting: Fleet, certificate: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Balancer]:
    """A balancer in front of servers that tests do not change."""
    programs.need(request.param)
    with balancers.running(request.param, tmp_path_factory.mktemp(request.param), lasting.ports, certificate) as made:
        yield made


@pytest.fixture(params=balancers.KINDS)
def own_servers(
    request: pytest.FixtureRequest, certificate: Path, tmp_path: Path
) -> Iterator[tuple[list[Server], Balancer]]:
    """Servers that the test may stop, behind a balancer."""
    programs.need(request.param)
    with started(tmp_path) as fleet, balancers.running(request.param, tmp_path, fleet.ports, certificate) as made:
        yield fleet.servers, made
