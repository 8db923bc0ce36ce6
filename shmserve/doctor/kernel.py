"""Checks of the kernel's limits: memory, descriptors, processes, sockets, control groups."""

from __future__ import annotations

import os
import re
from pathlib import Path

from shmserve.broker.listeners.lane import OWN_DESCRIPTORS
from shmserve.broker.processes import cgroups, cpus
from shmserve.core.limits import Limits
from shmserve.doctor.machine import ERROR, INFO, OK, UNLIMITED, WARNING, Finding, Machine, mib
from shmserve.protocol.messages import PACKET_BYTES
from shmserve.repo.storage.generation import ALL_DESCRIPTORS

LINUX = (5, 3)
"""The first release with pidfd_open, which the server needs to wait for processes."""
SHM_BYTES = 1 << 30
"""Recommended space in /dev/shm, for named segments: tensors of ZeroMQ clients, and Triton's system shared memory."""
MEMORY_BYTES = 1 << 30
"""Recommended memory for the broker, a gateway and a few workers with small models (docs/operations.md, Sizing)."""
PROCESSES = 1024
"""Recommended limit. Threads count as well, and an engine has one per core."""
OVERHEAD_BYTES = 32
"""Overhead of a packet in the send buffer."""


def linux(machine: Machine) -> list[Finding]:
    numbers = tuple(map(int, re.findall(r"\d+", machine.release)[:2]))
    state = OK if numbers >= LINUX else ERROR
    fix = "" if state == OK else "apt-get install linux-image-amd64, or another newer kernel"
    return [Finding("linux", state, machine.release, ".".join(map(str, LINUX)), fix)]


def shared_memory(machine: Machine) -> list[Finding]:
    path = machine.path("dev/shm")
    needed = f"{mib(SHM_BYTES)} free"
    try:
        status = os.statvfs(path)
    except OSError as error:
        return [Finding("/dev/shm", ERROR, error.strerror or "missing", needed, "mount -t tmpfs tmpfs /dev/shm")]
    free, total = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    found = f"{mib(free)} free of {mib(total)}"
    if not os.access(path, os.W_OK):
        return [Finding("/dev/shm", ERROR, f"{found}, not writable", needed, "chmod 1777 /dev/shm")]
    if free >= SHM_BYTES:
        return [Finding("/dev/shm", OK, found, needed)]
    fix = "mount -o remount,size=2g /dev/shm; in a container: --shm-size 2g; remove what else is in it"
    return [Finding("/dev/shm", WARNING, found, needed, fix)]


def memory(machine: Machine) -> list[Finding]:
    """Checks the available memory, or the limit of the control group if that is less."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", machine.read("proc/meminfo"), re.MULTILINE)
    if match is None:
        text = "/proc/meminfo does not contain MemAvailable"
        return [Finding("memory", ERROR, text, mib(MEMORY_BYTES), "mount -t proc proc /proc")]
    available, limit = int(match[1]) * 1024, _group_limit(machine, "memory.max")
    room = min(available, limit)
    found = f"{mib(available)} available" + ("" if limit == UNLIMITED else f", the control group allows {mib(limit)}")
    if room >= MEMORY_BYTES:
        return [Finding("memory", OK, found, mib(MEMORY_BYTES))]
    fix = "raise MemoryMax= of the service or --memory of the container, or stop other programs"
    return [Finding("memory", WARNING, found, mib(MEMORY_BYTES), fix)]


def descriptors(machine: Machine) -> list[Finding]:
    """Checks the hard limit. The broker raises the soft limit to the sum of its own limits, up to the hard limit."""
    limits, hard = Limits(), machine.descriptors()
    wanted = limits.connections + limits.segments + OWN_DESCRIPTORS + ALL_DESCRIPTORS
    found = _count(hard)
    if hard >= wanted:
        return [Finding("descriptors", OK, found, str(wanted))]
    fix = f"ulimit -Hn {wanted}; for a service: LimitNOFILE={wanted}; in a container: --ulimit nofile={wanted}"
    return [Finding("descriptors", WARNING, found, str(wanted), fix)]


def processes(machine: Machine) -> list[Finding]:
    """Checks the limits of the user and of the control group, which both count threads."""
    user, group = machine.processes(), _group_limit(machine, "pids.max")
    found = f"user {_count(user)}, control group {_count(group)}"
    if min(user, group) >= PROCESSES:
        return [Finding("processes", OK, found, str(PROCESSES))]
    fix = (
        "ulimit -u 8192" if user < PROCESSES else "TasksMax=8192 of the service, or --pids-limit 8192 of the container"
    )
    return [Finding("processes", WARNING, found, str(PROCESSES), fix)]


def socket_buffers(machine: Machine) -> list[Finding]:
    """Checks the maximum send buffer. The kernel doubles a requested size, and refuses packets that do not fit."""
    text, needed = machine.read("proc/sys/net/core/wmem_max").strip(), PACKET_BYTES // 2 + OVERHEAD_BYTES
    if not text.isdecimal():
        return [Finding("socket buffers", INFO, "not shown by this kernel", f"{needed} bytes")]
    if int(text) >= needed:
        return [Finding("socket buffers", OK, f"{text} bytes", f"{needed} bytes")]
    return [Finding("socket buffers", ERROR, f"{text} bytes", f"{needed} bytes", "sysctl -w net.core.wmem_max=212992")]


def cores(machine: Machine) -> list[Finding]:
    allowed = cpus.quota(machine.path("proc/self/cgroup"), machine.path("sys"))
    found = f"{len(machine.cores)} usable" + (f", a quota of {allowed}" if allowed else "")
    if not allowed or allowed >= len(machine.cores):
        return [Finding("cores", OK, found, "1")]
    fix = f"bind the server to as many cores as the quota allows: taskset --cpu-list 0-{allowed - 1} shmserve serve"
    return [Finding("cores", WARNING, found, f"a quota of {len(machine.cores)}, or none", fix)]


def control_groups(machine: Machine) -> list[Finding]:
    """Checks for a delegated group, without which memory limits of workers are enforced by polling."""
    try:
        cgroups.check_own(machine.path("proc/self/cgroup"), machine.path("proc/self/mounts"))
    except cgroups.CgroupsUnavailable as reason:
        fix = "only for memory limits of workers: run it as a service (make install-systemd), which has Delegate=memory"
        return [Finding("control groups", INFO, str(reason), "a delegated group of cgroup v2", fix)]
    return [Finding("control groups", OK, "delegated, with the memory controller", "a delegated group of cgroup v2")]


def _group_limit(machine: Machine, name: str) -> int:
    """The lowest limit of this process's group and its visible ancestors."""
    try:
        folder = cgroups.own(machine.path("proc/self/cgroup"), machine.path("proc/self/mounts"))
    except cgroups.CgroupsUnavailable:
        return UNLIMITED
    return min((_number(place / name) for place in (folder, *folder.parents)), default=UNLIMITED)


def _number(path: Path) -> int:
    try:
        text = path.read_text().strip()
    except OSError:
        return UNLIMITED
    return int(text) if text.isdecimal() else UNLIMITED


def _count(limit: int) -> str:
    return "no limit" if limit == UNLIMITED else str(limit)
