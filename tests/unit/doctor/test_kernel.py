"""The checks of the kernel's limits, on trees of files."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from shmserve.broker.processes import cgroups
from shmserve.doctor import kernel
from shmserve.doctor.machine import ERROR, INFO, OK, UNLIMITED, WARNING
from shmserve.protocol.messages import PACKET_BYTES
from tests.unit.doctor.tree import GROUP, machine, only, write


@pytest.mark.parametrize(
    ("release", "state"),
    [("5.2.21-generic", ERROR), ("5.3.0", OK), ("6.18.44-fc", OK), ("4.19.0-26-amd64", ERROR), ("10.0", OK)],
)
def test_linux(tmp_path: Path, release: str, state: str) -> None:
    found = only(kernel.linux(machine(tmp_path, release=release)))
    assert (found.state, found.found, found.needed) == (state, release, "5.3")
    assert bool(found.fix) == (state == ERROR)


@pytest.mark.parametrize(
    ("free", "total", "state", "text"),
    [
        (64 << 20, 64 << 20, WARNING, "64 MiB free of 64 MiB"),
        ((1 << 30) - 4096, 8 << 30, WARNING, "1023 MiB free of 8.0 GiB"),
        (1 << 30, 2 << 30, OK, "1.0 GiB free of 2.0 GiB"),
    ],
)
def test_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, total: int, state: str, text: str
) -> None:
    status = SimpleNamespace(f_bavail=free // 4096, f_blocks=total // 4096, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: status)
    found = only(kernel.shared_memory(machine(tmp_path)))
    assert (found.state, found.found) == (state, text)
    assert ("--shm-size" in found.fix) == (state == WARNING)


def test_without_shared_memory(tmp_path: Path) -> None:
    whole = machine(tmp_path)
    (tmp_path / "dev" / "shm" / ".keep").unlink()
    (tmp_path / "dev" / "shm").rmdir()
    found = only(kernel.shared_memory(whole))
    assert (found.state, found.found) == (ERROR, "No such file or directory")
    assert found.fix.startswith("mount -t tmpfs")


def test_shared_memory_that_is_not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    found = only(kernel.shared_memory(machine(tmp_path)))
    assert found.state == ERROR
    assert "not writable" in found.found


def test_memory(tmp_path: Path) -> None:
    whole = machine(tmp_path)
    assert only(kernel.memory(whole)).found == "16.0 GiB available"
    write(tmp_path, f"sys/fs/cgroup/{GROUP}/memory.max", "max\n")
    assert only(kernel.memory(whole)).state == OK
    write(tmp_path, "sys/fs/cgroup/memory.max", f"{512 << 20}\n")  # the group above it
    found = only(kernel.memory(whole))
    assert (found.state, found.found) == (WARNING, "16.0 GiB available, the control group allows 512 MiB")
    assert "MemoryMax=" in found.fix


def test_little_available_memory_is_a_warning_and_none_an_error(tmp_path: Path) -> None:
    whole = machine(tmp_path)
    write(tmp_path, "proc/meminfo", "MemAvailable:    524288 kB\n")
    assert only(kernel.memory(whole)).state == WARNING
    write(tmp_path, "proc/meminfo", "")
    assert only(kernel.memory(whole)).state == ERROR


@pytest.mark.parametrize(("hard", "state"), [(25_599, WARNING), (25_600, OK), (UNLIMITED, OK)])
def test_descriptors(tmp_path: Path, hard: int, state: str) -> None:
    """25600: 4096 connections, 16384 segments, 1024 of the broker, 4096 for files of models."""
    found = only(kernel.descriptors(machine(tmp_path, descriptors=lambda: hard)))
    assert (found.state, found.needed) == (state, "25600")
    assert ("LimitNOFILE=25600" in found.fix) == (state == WARNING)
    assert found.found == ("no limit" if hard == UNLIMITED else str(hard))


def test_processes(tmp_path: Path) -> None:
    whole = machine(tmp_path)
    assert only(kernel.processes(whole)).state == OK
    write(tmp_path, f"sys/fs/cgroup/{GROUP}/pids.max", "100\n")
    found = only(kernel.processes(whole))
    assert (found.state, found.found) == (WARNING, "user 32768, control group 100")
    assert "TasksMax=" in found.fix
    few = only(kernel.processes(machine(tmp_path, processes=lambda: 512)))
    assert few.fix == "ulimit -u 8192"


@pytest.mark.parametrize(("size", "state"), [("98335\n", ERROR), ("98336\n", OK), ("", INFO)])
def test_socket_buffers(tmp_path: Path, size: str, state: str) -> None:
    whole = machine(tmp_path)
    write(tmp_path, "proc/sys/net/core/wmem_max", size)
    assert only(kernel.socket_buffers(whole)).state == state


def test_the_needed_socket_buffer_is_what_the_kernel_requires() -> None:
    """A packet of the largest size fits into a buffer of the needed size, and not into a smaller one."""
    for less, fits in ((0, True), (64, False)):
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with left, right:
            size = PACKET_BYTES // 2 + kernel.OVERHEAD_BYTES
            left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size - less)
            if fits:
                assert left.send(bytes(PACKET_BYTES)) == PACKET_BYTES
            else:
                with pytest.raises(OSError, match="Message too long"):
                    left.send(bytes(PACKET_BYTES))


def test_cores(tmp_path: Path) -> None:
    whole = machine(tmp_path)
    assert only(kernel.cores(whole)).found == "4 usable"
    write(tmp_path, f"sys/fs/cgroup/{GROUP}/cpu.max", "150000 100000\n")
    found = only(kernel.cores(whole))
    assert (found.state, found.found) == (WARNING, "4 usable, a quota of 2")
    assert "taskset --cpu-list 0-1" in found.fix
    assert only(kernel.cores(machine(tmp_path, cores=(0, 1)))).state == OK


def test_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = machine(tmp_path)
    monkeypatch.setattr(cgroups, "_is_delegated", lambda top: True)
    assert only(kernel.control_groups(whole)).state == OK
    write(tmp_path, f"sys/fs/cgroup/{GROUP}/cgroup.controllers", "cpu\n")
    found = only(kernel.control_groups(whole))
    assert found.state == INFO
    assert "does not have the memory controller" in found.found
    assert "Delegate=memory" in found.fix
    write(tmp_path, "proc/self/mounts", "")
    assert only(kernel.control_groups(whole)).found == "cgroup v2 is not mounted"
