"""Runs a balancer with its configuration from deploy/balancers, in which only addresses and files are replaced."""

from __future__ import annotations

import contextlib
import http.client
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests import ROOT
from tests.fleet import programs
from tests.support.patience import CLUSTER_PATIENCE_S
from tests.support.system.ports import free_ports

CONFIGURATIONS = ROOT / "deploy" / "balancers"
PAUSE_S = 0.05
"""Between two questions: other suites run beside this one."""
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
    process: subprocess.Popen[bytes]
    log: Path

    def status(self, path: str, method: str = "GET") -> tuple[int, bytes]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.ports.http, timeout=60)) as connection:
            connection.request(method, path)
            answer = connection.getresponse()
            return answer.status, answer.read()


def haproxy(ports: Ports, servers: Ports, certificate: Path) -> str:
    changes = {f"bind :{old}": f"bind 127.0.0.1:{new}" for old, new in zip((HTTP, GRPC, TLS), ports, strict=True)}
    for here, there in zip(HERE, SERVERS, strict=True):
        changes |= {f"{there}:{HTTP}": f"{here}:{servers.http}", f"{there}:{GRPC}": f"{here}:{servers.grpc}"}
    return _changed("haproxy.cfg", changes | {"/etc/haproxy/shmserve.pem": str(certificate)})


def envoy(ports: Ports, servers: Ports, certificate: Path) -> str:
    changes = {}
    for old, new in zip((HTTP, GRPC, TLS), ports, strict=True):
        changes[f"address: 0.0.0.0, port_value: {old} "] = f"address: 127.0.0.1, port_value: {new} "
    for here, there in zip(HERE, SERVERS, strict=True):
        for old, new in ((HTTP, servers.http), (GRPC, servers.grpc)):
            changes[f"address: {there}, port_value: {old} "] = f"address: {here}, port_value: {new} "
    changes |= dict.fromkeys(("/etc/envoy/shmserve.pem", "/etc/envoy/shmserve.key"), str(certificate))
    return _changed("envoy.yaml", changes)


def _changed(name: str, changes: dict[str, str]) -> str:
    text = (CONFIGURATIONS / name).read_text()
    for old, new in changes.items():
        assert old in text, f"{name} has no '{old}'"
        text = text.replace(old, new)
    return text


KINDS = {
    "haproxy": (haproxy, ("-db", "-f")),
    "envoy": (envoy, ("--log-level", "warning", "--concurrency", "2", "--disable-hot-restart", "-c")),
}
"""Name -> its configuration, and its arguments before the file."""


@contextlib.contextmanager
def running(name: str, place: Path, servers: Ports, certificate: Path) -> Iterator[Balancer]:
    configure, words = KINDS[name]
    program = programs.need(name)
    ports = Ports(*free_ports(3))
    file = place / ("envoy.yaml" if name == "envoy" else "haproxy.cfg")
    file.write_text(configure(ports, servers, certificate))
    log = place / f"{name}.log"
    with log.open("wb") as out:
        command = [str(program), *words, str(file)]
        process = subprocess.Popen(command, stdout=out, stderr=out, env=programs.environment())
    balancer = Balancer(name, ports, process, log)
    try:
        _await_ready(balancer)
        yield balancer
    finally:
        process.terminate()
        try:
            process.wait(CLUSTER_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


def await_end(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Waits for the end of the process, or for this time."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def _await_ready(balancer: Balancer) -> None:
    """Waits until the balancer sees a ready server."""
    end = time.monotonic() + CLUSTER_PATIENCE_S
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException):
            if balancer.status("/v2/health/ready")[0] == 200:
                return
        await_end(balancer.process, PAUSE_S)
        assert balancer.process.poll() is None, balancer.log.read_text()
        assert time.monotonic() < end, balancer.log.read_text()
