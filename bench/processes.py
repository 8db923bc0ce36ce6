"""What /proc and /dev/shm say of the processes that are measured.

The rule of the file: read only; a process that is measured is not disturbed.
"""

from __future__ import annotations

import os
from pathlib import Path


def private_bytes(pid: int) -> int:
    """Private_Clean + Private_Dirty of every mapping but those of shared memory.

    A shared page that only one process has touched counts as private in smaps, so segments are left out by name."""
    total, counted = 0, True
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        key = line.split(None, 1)[0]
        if not key.endswith(":"):
            name = line.split(None, 5)[5] if len(line.split(None, 5)) == 6 else ""
            counted = not name.startswith(("/memfd:", "/dev/shm/"))
        elif counted and key in ("Private_Clean:", "Private_Dirty:"):
            total += int(line.split()[1]) * 1024
    return total


def descriptors(pid: int) -> list[str]:
    """What each open descriptor is: socket, memfd, pipe, ..., sorted, without inode numbers."""
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{fd}")
        except FileNotFoundError:
            continue
        found.append(target.split(":[")[0])
    return sorted(found)


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def descendants(pid: int) -> list[int]:
    """All live processes below this one."""
    below: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if fields[0] != "Z":
            below.setdefault(int(fields[1]), []).append(int(entry))
    found, open_ = [], [pid]
    while open_:
        children = below.get(open_.pop(), [])
        found += children
        open_ += children
    return found


def segments() -> set[str]:
    """Names of shmserve's segments in /dev/shm."""
    return {name for name in os.listdir("/dev/shm") if name.startswith("shmserve")}
