"""Processor and GPU use during a load: of the machine, and of the server's processes if they run on it.

The server is found by the process that listens at its address.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

from msgspec import Struct

from shmserve import paths
from shmserve.system import procfs
from shmserve.tools.load.plan import Endpoint
from shmserve.tools.load.record import MachineUsage

_OUR_MODULES = ("shmserve.broker", "shmserve.clients.cli.main", "shmserve.workers")
_LISTEN = "0A"


def usable_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


def server_pid(endpoint: Endpoint) -> int:
    """The root of the server's process tree; 0 if it is not found or not on this machine."""
    try:
        pid = _listener(endpoint)
    except OSError:
        return 0
    while pid:
        parent = procfs.parent(pid)
        if parent <= 1 or not any(name in procfs.command_line(parent) for name in _OUR_MODULES):
            return pid
        pid = parent
    return 0


def _listener(endpoint: Endpoint) -> int:
    if endpoint.has_port:
        return _listening_at(endpoint.address[1]) if is_local(endpoint) else 0
    url = endpoint.url or ""
    scheme, _, rest = url.partition("://")
    if scheme == "tcp":
        host, _, port = rest.rpartition(":")
        return _listening_at(int(port)) if _is_local_host(host) and port.isdecimal() else 0
    if scheme == "ipc" or scheme == "unix":
        folder = Path(rest).parent
    else:
        folder = Path(endpoint.runtime_dir) if endpoint.runtime_dir else paths.client_runtime_dir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as created:
        created.settimeout(1.0)
        created.connect(str(folder / paths.LANE))
        pid: int = struct.unpack("3i", created.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        return pid


def is_local(endpoint: Endpoint) -> bool:
    if endpoint.has_port:
        return _is_local_host(endpoint.address[0])
    scheme, _, rest = (endpoint.url or "").partition("://")
    return scheme != "tcp" or _is_local_host(rest.rpartition(":")[0])


def _is_local_host(host: str) -> bool:
    return host in ("localhost", "::1", "[::1]", "0.0.0.0") or host.startswith("127.")


def _listening_at(port: int) -> int:
    inodes = set()
    for name in ("tcp", "tcp6"):
        path = Path("/proc/net") / name
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            fields = line.split()
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and inodes & _descriptors(int(entry)):
            return int(entry)
    return 0


def _descriptors(pid: int) -> set[str]:
    """Targets of the process's descriptors, as far as they may be read; none for a process that has ended."""
    result: set[str] = set()
    hidden = (FileNotFoundError, PermissionError, ProcessLookupError)
    with suppress(*hidden):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with suppress(*hidden):  # in a user namespace, the folder of an outer process can be listed, but not read
                result.add(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    return result


def _role(pid: int, top: int) -> str:
    command = procfs.command_line(pid)
    if "shmserve" in command or pid != top:
        if "cli.main gateway" in command or "gateway" in Path(f"/proc/{pid}/comm").read_text():
            return "gateway"
        return "broker" if pid == top else "models"
    return Path(f"/proc/{pid}/comm").read_text().strip() or "server"


class Meter:
    """Takes readings of counters."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._top = server_pid(endpoint)
        self._gpus = _Gpus() if is_local(endpoint) else None

    def read(self) -> UsageReading:
        processes: dict[int, tuple[str, float]] = {}
        for pid in (self._top, *procfs.descendants(self._top)) if self._top else ():
            try:
                processes[pid] = (_role(pid, self._top), procfs.usage(pid).cpu_seconds)
            except (FileNotFoundError, ProcessLookupError):
                continue
        return UsageReading(procfs.busy_seconds(), processes, self._gpus.read() if self._gpus is not None else {})


class UsageReading(Struct, frozen=True):
    machine: float
    """Busy seconds of all cores."""
    processes: dict[int, tuple[str, float]]
    """The server's processes: pid -> role and seconds."""
    gpus: dict[str, tuple[float, int]]
    """GPU -> utilization and used bytes."""


def used(readings: Sequence[UsageReading], seconds: float) -> MachineUsage:
    """The use between the first and last reading; for GPUs, the mean of all readings but the first."""
    before, after = readings[0], readings[-1]
    roles: dict[str, float] = {}
    for pid, (role, busy) in after.processes.items():
        earlier = before.processes.get(pid, ("", 0.0))[1]
        roles[role] = roles.get(role, 0.0) + max(0.0, busy - earlier) / seconds
    later = [reading.gpus for reading in readings[1:]]
    gpus = [name for name in after.gpus if all(name in reading for reading in later)]
    return MachineUsage(
        machine=max(0.0, after.machine - before.machine) / seconds,
        server={role: round(cores, 4) for role, cores in roles.items()},
        gpus={name: fmean(reading[name][0] for reading in later) for name in gpus},
        gpu_bytes={name: max(reading[name][1] for reading in later) for name in gpus},
    )


class _Gpus:
    """Utilization and memory of the machine's GPUs from NVML; none without its package or a driver."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: list[Any] = []
        try:
            import pynvml
        except ImportError:
            return
        try:
            pynvml.nvmlInit()
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError:
            return
        self._nvml = pynvml

    def read(self) -> dict[str, tuple[float, int]]:
        results = {}
        for number, handle in enumerate(self._handles):
            try:
                share = self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
                results[f"GPU {number}"] = (share, int(self._nvml.nvmlDeviceGetMemoryInfo(handle).used))
            except self._nvml.NVMLError:
                continue  # some GPUs, e.g. with MIG, do not report utilization
        return results
