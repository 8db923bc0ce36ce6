"""A machine made of files below a folder, with limits that a test chooses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from shmserve.doctor.machine import Finding, Machine
from shmserve.extras import GATEWAY, NEEDED

GROUP = "service"
INSTALLED = {*NEEDED, *GATEWAY}


def machine(root: Path, **changes: Any) -> Machine:
    """A machine that lacks nothing. Its group of cgroup v2 is GROUP, which has no limit."""
    group = root / "sys" / "fs" / "cgroup"
    files = {
        "proc/meminfo": "MemTotal:       33554432 kB\nMemAvailable:   16777216 kB\n",
        "proc/self/cgroup": f"0::/{GROUP}\n",
        "proc/self/mounts": f"cgroup2 {group} cgroup2 rw 0 0\n",
        "proc/sys/net/core/wmem_max": "212992\n",
        f"sys/fs/cgroup/{GROUP}/cgroup.controllers": "cpu memory pids\n",
        "dev/shm/.keep": "",
    }
    for name, text in files.items():
        write(root, name, text)
    whole = Machine(
        root=root,
        environment={},
        python=(3, 12),
        implementation="CPython",
        release="6.1.0-17-amd64",
        cores=(0, 1, 2, 3),
        descriptors=lambda: 1 << 20,
        processes=lambda: 1 << 15,
        version=lambda package: "",
        has_module=INSTALLED.__contains__,
        is_free=lambda port: True,
        ports_of=lambda path: None,
    )
    return msgspec.structs.replace(whole, **changes)


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def only(findings: list[Finding]) -> Finding:
    (found,) = findings
    return found
