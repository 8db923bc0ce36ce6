"""Checks of the runtime directory and the ports of the server that runs there, or would."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from shmserve.doctor.machine import ERROR, OK, Finding, Machine
from shmserve.gateway_options import OPTIONS
from shmserve.paths import BROKER, SOCKET_PATH_BYTES, server_runtime_dir

PORTS = ("http-port", "grpc-port", "metrics-port")
_LAST_PORT = 65535


def runtime_directory(machine: Machine) -> list[Finding]:
    """Checks the requirements of `make_runtime_dir`, without creating the directory."""
    path = _runtime_dir(machine)
    fix, longest = "shmserve serve --runtime-dir DIRECTORY", len(os.fsencode(path / BROKER))
    if longest > SOCKET_PATH_BYTES:
        found = f"{path}: {longest} bytes with the socket's name"
        return [Finding("runtime directory", ERROR, found, f"at most {SOCKET_PATH_BYTES} bytes", fix)]
    place = _existing(path)
    status = place.stat()
    if place == path and status.st_uid != os.geteuid():
        return [Finding("runtime directory", ERROR, f"{path} belongs to uid {status.st_uid}", "your own", fix)]
    if place == path and status.st_mode & stat.S_IWOTH:
        fix = f"chmod 700 {path}"
        return [Finding("runtime directory", ERROR, f"{path} is writable by everyone", "your own", fix)]
    if not os.access(place, os.W_OK | os.X_OK):
        return [Finding("runtime directory", ERROR, f"{place} is not writable", "a writable directory", fix)]
    runs = ", where a server runs" if machine.ports_of(path) is not None else ""
    return [Finding("runtime directory", OK, f"{path}{runs}", "a writable directory")]


def ports(machine: Machine) -> list[Finding]:
    """Checks the ports of the server that runs in the runtime directory, or of one that would be started there."""
    served = machine.ports_of(_runtime_dir(machine))
    if served is not None:
        return [
            Finding(f"port {port} ({name})", OK, "used by the server of this directory")
            for name, port in served.items()
        ]
    findings = []
    for option in (option for option in OPTIONS if option.name in PORTS):
        name = option.name.removesuffix("-port")
        variable = f"SHMSERVE_{option.name.replace('-', '_').upper()}"
        given = machine.environment.get(variable, "")
        port = int(given) if given.isdecimal() else int(option.default)
        if port > _LAST_PORT:
            fix = f"set {variable} to one up to {_LAST_PORT}"
            findings.append(Finding(f"port {given} ({name})", ERROR, "not a port", "a port", fix))
            continue
        fix = (
            f"shmserve serve --{option.name} N, or find the program: ss --listening --tcp --processes 'sport = :{port}'"
        )
        if machine.is_free(port):
            findings.append(Finding(f"port {port} ({name})", OK, "free", "free"))
        else:
            findings.append(Finding(f"port {port} ({name})", ERROR, "in use by another program or server", "free", fix))
    return findings


def _runtime_dir(machine: Machine) -> Path:
    return machine.runtime_dir or server_runtime_dir()


def _existing(path: Path) -> Path:
    return next(place for place in (path, *path.parents) if place.exists())
