"""Checks of the runtime directory and the ports of a server with default settings."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from shmserve.doctor.machine import ERROR, OK, WARNING, Finding, Machine
from shmserve.gateway_options import OPTIONS
from shmserve.paths import BROKER, SOCKET_PATH_BYTES, server_runtime_dir

PORTS = ("http-port", "grpc-port", "metrics-port")


def runtime_directory(machine: Machine) -> list[Finding]:
    """Checks the requirements of `make_runtime_dir`, without creating the directory."""
    path = server_runtime_dir()
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
    return [Finding("runtime directory", OK, str(path), "a writable directory")]


def ports(machine: Machine) -> list[Finding]:
    """Checks the gateway's ports. A port in use prevents the server from starting; if a server of this user is running,
    it is only a warning."""
    runs = machine.has_server(server_runtime_dir() / "lane.sock")
    findings = []
    for option in (option for option in OPTIONS if option.name in PORTS):
        port, name = int(option.default), option.name.removesuffix("-port")
        fix = (
            f"shmserve serve --{option.name} N, or find the program: ss --listening --tcp --processes 'sport = :{port}'"
        )
        if machine.is_free(port):
            findings.append(Finding(f"port {port} ({name})", OK, "free", "free"))
        elif runs:
            found = "in use; a server of yours is running"
            findings.append(Finding(f"port {port} ({name})", WARNING, found, "free for a second server", fix))
        else:
            findings.append(Finding(f"port {port} ({name})", ERROR, "in use", "free", fix))
    return findings


def _existing(path: Path) -> Path:
    return next(place for place in (path, *path.parents) if place.exists())
