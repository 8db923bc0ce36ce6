"""The table of all checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from shmserve.doctor import endpoints, installation, kernel
from shmserve.doctor.machine import ERROR, Finding, Machine

CHECKS: Mapping[str, Callable[[Machine], list[Finding]]] = {
    "python": installation.python,
    "packages": installation.packages,
    "linux": kernel.linux,
    "shared_memory": kernel.shared_memory,
    "memory": kernel.memory,
    "cores": kernel.cores,
    "descriptors": kernel.descriptors,
    "processes": kernel.processes,
    "socket_buffers": kernel.socket_buffers,
    "control_groups": kernel.control_groups,
    "runtime_directory": endpoints.runtime_directory,
    "ports": endpoints.ports,
    "gpus": installation.gpus,
    "engines": installation.engines,
}


def examine(machine: Machine) -> list[Finding]:
    return [finding for check in CHECKS.values() for finding in check(machine)]


def can_serve(findings: Sequence[Finding]) -> bool:
    return all(finding.state != ERROR for finding in findings)
