"""Runs a balancer with its configuration from deploy/balancers, in which only addresses and files are replaced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests import ROOT
from tests.fleet import programs
from tests.support.system.ports import free_ports

CONFIGURATIONS = ROOT / "deploy" / "balancers"
HTTP, GRPC, TLS = 8000, 8001, 8443
"""Ports in the configurations."""
SERVERS = ("10.0.0.11", "10.0.0.12", "10.0.0.13")
"""Addresses in the configurations."""
HERE = ("127.0.0.11", "127.0.0.12", "127.0.0.13")
"""Addresses of the servers in the tests."""


class Ports(NamedTuple):
    http: int
    grpc: int
    tls: int = 0


class Balancer(NamedTuple):
    name: str
    ports: Ports

    def status(self, path: str, method: str = "GET") -> tuple[int, bytes]:
        return programs.get(self.ports.http, path, method)


def haproxy(ports: Ports, servers: Ports, certificate: Path) -> str:
    changes = {f"bind :{old}": f"bind 127.0.0.1:{new}" for old, new in zip((HTTP, GRPC, TLS), ports, strict=True)}
    for here, there in zip(HERE, SERVERS, strict=True):
        changes |= {f"{there}:{HTTP}": f"{here}:{servers.http}", f"{there}:{GRPC}": f"{here}:{servers.grpc}"}
    return programs.changed(CONFIGURATIONS / "haproxy.cfg", changes | {"/etc/haproxy/shmserve.pem": str(certificate)})


def envoy(ports: Ports, servers: Ports, certificate: Path) -> str:
    changes = {}
    for old, new in zip((HTTP, GRPC, TLS), ports, strict=True):
        changes[f"address: 0.0.0.0, port_value: {old} "] = f"address: 127.0.0.1, port_value: {new} "
    for here, there in zip(HERE, SERVERS, strict=True):
        for old, new in ((HTTP, servers.http), (GRPC, servers.grpc)):
            changes[f"address: {there}, port_value: {old} "] = f"address: {here}, port_value: {new} "
    changes |= dict.fromkeys(("/etc/envoy/shmserve.pem", "/etc/envoy/shmserve.key"), str(certificate))
    return programs.changed(CONFIGURATIONS / "envoy.yaml", changes)


KINDS = {
    "haproxy": (haproxy, ("-db", "-f")),
    "envoy": (envoy, ("--log-level", "warning", "--concurrency", "2", "--disable-hot-restart", "-c")),
}
"""Name -> its configuration, and its arguments before the file."""


@contextlib.contextmanager
def running(name: str, place: Path, servers: Ports, certificate: Path) -> Iterator[Balancer]:
    """A balancer that sees a ready server."""
    configure, words = KINDS[name]
    ports = Ports(*free_ports(3))
    file = place / ("envoy.yaml" if name == "envoy" else "haproxy.cfg")
    file.write_text(configure(ports, servers, certificate))
    balancer = Balancer(name, ports)
    with programs.running(name, place, *words, str(file)) as program:
        program.until(lambda: balancer.status("/v2/health/ready")[0] == 200)
        yield balancer
