"""The checks of the kernel's limits, on trees of files."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shmserve.broker.processes import cgroups
from shmserve.doctor import checks
from shmserve.doctor.machine import ERROR, INFO, OK, UNLIMITED, WARNING, Finding, Machine
from shmserve.protocol.messages import PACKET_BYTES
from tests.support.cases import cases
from tests.unit.doctor.tree import GROUP, machine, only, write

OWN = f"sys/fs/cgroup/{GROUP}"


@cases(
    (checks.linux, {"release": "5.2.21-generic"}, {}, ERROR, "5.2.21-generic", "5.3"),
    (checks.linux, {"release": "5.3.0"}, {}, OK, "5.3.0", ""),
    (checks.linux, {"release": "4.19.0-26-amd64"}, {}, ERROR, "4.19.0-26-amd64", "5.3"),
    (checks.linux, {"release": "10.0"}, {}, OK, "10.0", ""),
    (checks.memory, {}, {}, OK, "16.0 GiB available", ""),
    (checks.memory, {}, {f"{OWN}/memory.max": "max\n"}, OK, "16.0 GiB available", ""),
    (
        checks.memory,
        {},
        {"sys/fs/cgroup/memory.max": f"{512 << 20}\n"},  # of the group above its own
        WARNING,
        "16.0 GiB available, the control group allows 512 MiB",
        "MemoryMax=",
    ),
    (checks.memory, {}, {"proc/meminfo": "MemAvailable:    524288 kB\n"}, WARNING, "512 MiB available", ""),
    (checks.memory, {}, {"proc/meminfo": ""}, ERROR, "", ""),
    # 25600: 4096 connections, 16384 segments, 1024 of the broker, 4096 for files of models
    (checks.descriptors, {"descriptors": lambda: 25_599}, {}, WARNING, "25599", "LimitNOFILE=25600"),
    (checks.descriptors, {"descriptors": lambda: 25_600}, {}, OK, "25600", ""),
    (checks.descriptors, {"descriptors": lambda: UNLIMITED}, {}, OK, "no limit", ""),
    (checks.processes, {}, {}, OK, "", ""),
    (checks.processes, {}, {f"{OWN}/pids.max": "100\n"}, WARNING, "user 32768, control group 100", "TasksMax="),
    (checks.processes, {"processes": lambda: 512}, {}, WARNING, "", "ulimit -u 8192"),
    (checks.socket_buffers, {}, {"proc/sys/net/core/wmem_max": "98335\n"}, ERROR, "", ""),
    (checks.socket_buffers, {}, {"proc/sys/net/core/wmem_max": "98336\n"}, OK, "", ""),
    (checks.socket_buffers, {}, {"proc/sys/net/core/wmem_max": ""}, INFO, "", ""),
    (checks.cores, {}, {}, OK, "4 usable", ""),
    (checks.cores, {}, {f"{OWN}/cpu.max": "150000 100000\n"}, WARNING, "4 usable, a quota of 2", "--cpu-list 0-1"),
    (checks.cores, {"cores": (0, 1)}, {}, OK, "2 usable", ""),
)
def test_limits(
    check: Callable[[Machine], list[Finding]],
    changes: dict[str, Any],
    files: dict[str, str],
    state: str,
    found: str,
    fix: str,
    tmp_path: Path,
) -> None:
    """`found`: a part of what was found; `fix`: of what to do, or what is needed."""
    whole = machine(tmp_path, **changes)
    for name, text in files.items():
        write(tmp_path, name, text)
    finding = only(check(whole))
    assert finding.state == state
    assert found in finding.found
    assert fix in finding.fix + finding.needed
    assert bool(finding.fix) == (state in (WARNING, ERROR))


def test_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = machine(tmp_path)
    for free, total, state, text in (
        (64 << 20, 64 << 20, WARNING, "64 MiB free of 64 MiB"),
        ((1 << 30) - 4096, 8 << 30, WARNING, "1023 MiB free of 8.0 GiB"),
        (1 << 30, 2 << 30, OK, "1.0 GiB free of 2.0 GiB"),
    ):
        status = SimpleNamespace(f_bavail=free // 4096, f_blocks=total // 4096, f_frsize=4096)
        with monkeypatch.context() as patch:
            patch.setattr(os, "statvfs", lambda path, status=status: status)
            found = only(checks.shared_memory(whole))
        assert (found.state, found.found) == (state, text)
        assert ("--shm-size" in found.fix) == (state == WARNING)
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: False)
        found = only(checks.shared_memory(whole))
    assert (found.state, "not writable" in found.found) == (ERROR, True)
    (tmp_path / "dev" / "shm" / ".keep").unlink()
    (tmp_path / "dev" / "shm").rmdir()
    found = only(checks.shared_memory(whole))
    assert (found.state, found.found) == (ERROR, "No such file or directory")
    assert found.fix.startswith("mount -t tmpfs")


def test_the_needed_socket_buffer_is_what_the_kernel_requires() -> None:
    """A packet of the largest size fits into a buffer of the needed size, and not into a smaller one."""
    for less, fits in ((0, True), (64, False)):
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with left, right:
            size = PACKET_BYTES // 2 + checks.OVERHEAD_BYTES
            left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size - less)
            if fits:
                assert left.send(bytes(PACKET_BYTES)) == PACKET_BYTES
            else:
                with pytest.raises(OSError, match="Message too long"):
                    left.send(bytes(PACKET_BYTES))


def test_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = machine(tmp_path)
    monkeypatch.setattr(cgroups, "_is_delegated", lambda top: True)
    assert only(checks.control_groups(whole)).state == OK
    write(tmp_path, f"{OWN}/cgroup.controllers", "cpu\n")
    found = only(checks.control_groups(whole))
    assert found.state == INFO
    assert "does not have the memory controller" in found.found
    assert "Delegate=memory" in found.fix
    write(tmp_path, "proc/self/mounts", "")
    assert only(checks.control_groups(whole)).found == "cgroup v2 is not mounted"
