"""What /proc and /dev/shm say of the processes that are measured.

The rule of the file: read only; a process that is measured is not disturbed.
"""

from __future__ import annotations

import os
import re
import select
from pathlib import Path
from time import monotonic

TICKS = os.sysconf("SC_CLK_TCK")
"""In a second of processor time."""


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


def _stat(pid: int) -> list[str]:
    """The fields from the state on; none of a process that has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def descendants(pid: int) -> list[int]:
    """All live processes below this one."""
    below: dict[int, list[int]] = {}
    started: dict[int, str] = {}
    for entry in os.listdir("/proc"):
        fields = _stat(int(entry)) if entry.isdigit() else []
        if fields and fields[0] != "Z":
            below.setdefault(int(fields[1]), []).append(int(entry))
            started[int(entry)] = fields[19]
    found, open_ = [], [pid]
    while open_:
        children = below.get(open_.pop(), [])
        found += children
        open_ += children
    _seen.update((str(child), started[child]) for child in found)
    return found


_OWNER = re.compile(r"shmserve-(\d+)-(\d+)-")
_seen: set[tuple[str, ...]] = set()
"""Pid and start time of processes that `segments` answers for."""


def seen(pid: int) -> None:
    """Its segments count as ours from now on, also when it has ended."""
    if fields := _stat(pid):
        _seen.add((str(pid), fields[19]))


def own_seconds(pid: int) -> float:
    """Processor time of this process alone; 0 once it has ended."""
    return sum(map(int, _stat(pid)[11:13])) / TICKS


def busy_seconds(pid: int) -> float:
    """Processor time of a process, of all below it, and of those of them that have ended and been waited for."""
    while True:
        below = descendants(pid)
        found = [fields for one in (pid, *below) if (fields := _stat(one))]
        if len(found) == 1 + len(below) and descendants(pid) == below:
            return sum(sum(map(int, fields[11:15])) for fields in found) / TICKS


class Living:
    """Processes that must end soon: each is held by a descriptor, so that a number used again means nothing."""

    def __init__(self, pids: list[int]) -> None:
        self._descriptors = [os.pidfd_open(pid) for pid in pids]

    def still_there(self, seconds: float = 5.0) -> int:
        """How many have not ended within so many seconds. To be called once."""
        end, left = monotonic() + seconds, 0
        for descriptor in self._descriptors:
            left += not select.select([descriptor], [], [], max(0.0, end - monotonic()))[0]
            os.close(descriptor)
        return left


class Others:
    """What everybody else on the machine computed while we measured, in cores. Children count when they have ended."""

    def __init__(self) -> None:
        self._busy, self._ours, self._at = _busy(), _ours(), monotonic()

    def cores(self) -> float:
        busy, ours, at = _busy(), _ours(), monotonic()
        return max(0.0, (busy - self._busy - (ours - self._ours)) / (at - self._at))


def _busy() -> float:
    """Seconds of all cores that were not idle."""
    user, nice, system, _, _, irq, softirq, steal, *_ = map(int, Path("/proc/stat").read_text().split(None, 11)[1:11])
    return (user + nice + system + irq + softirq + steal) / TICKS


def _ours() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def segments() -> set[str]:
    """Names of the segments in /dev/shm of this process and of all below it that live or were `seen`.

    Others on the machine have segments, too, and those of a dead stranger cannot be told from ours but by its pid."""
    descendants(os.getpid())
    seen(os.getpid())
    return {name for name in os.listdir("/dev/shm") if (owner := _OWNER.match(name)) and owner.groups() in _seen}
