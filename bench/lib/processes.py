"""Facts about measured processes from /proc and /dev/shm.

Read-only: the measured processes are not disturbed.
"""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

from shmserve.system import procfs


def private_bytes(pid: int) -> int:
    """Private_Clean + Private_Dirty of all mappings except shared memory.

    smaps counts a shared page that only one process has touched as private, so segments are excluded by name.
    """
    total, counted = 0, True
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        key = line.split(None, 1)[0]
        if not key.endswith(":"):
            name = line.split(None, 5)[5] if len(line.split(None, 5)) == 6 else ""
            counted = not name.startswith(("/memfd:", "/dev/shm/"))
        elif counted and key in ("Private_Clean:", "Private_Dirty:"):
            total += int(line.split()[1]) * 1024
    return total


def memory_bytes(pid: int) -> int:
    """PSS without files, which the kernel can drop. 0: it has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(size) * 1024 for size in re.findall(r"^Pss_(?:Anon|Shmem): +(\d+)", text, re.MULTILINE))


def descriptors(pid: int) -> list[str]:
    """The kind of each open descriptor: socket, memfd, pipe, ..., sorted, without inode numbers."""
    results = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{fd}")
        except FileNotFoundError:
            continue
        results.append(target.split(":[")[0])
    return sorted(results)


def descendants(pid: int) -> list[int]:
    """All live descendants of a process, which are `seen` from now on."""
    pids = procfs.descendants(pid)
    for each in pids:
        seen(each)
    return pids


_OWNER = re.compile(r"shmserve-(\d+)-(\d+)-")
_seen: set[tuple[str, ...]] = set()
"""Pid and start time of the processes whose segments `segments` reports."""


def seen(pid: int) -> None:
    """Includes the segments of this process from now on, also after it has ended."""
    if fields := procfs.stat_fields(pid):
        _seen.add((str(pid), fields[19].decode()))


def busy_seconds(pid: int) -> float:
    """Processor time of a process and its descendants, including those that have ended and been waited for."""
    while True:
        below = descendants(pid)
        results = [fields for one in (pid, *below) if (fields := procfs.stat_fields(one))]
        if len(results) == 1 + len(below) and descendants(pid) == below:
            return sum(sum(map(int, fields[11:15])) for fields in results) / procfs.TICKS


class Living:
    """Processes that must end soon, held by pidfds, so that reused pids do not matter."""

    def __init__(self, pids: list[int]) -> None:
        self._descriptors = [os.pidfd_open(pid) for pid in pids]

    def still_there(self) -> int:
        """The number of processes that have not ended after five seconds. Call it only once."""
        end, remaining = monotonic() + 5.0, 0
        for descriptor in self._descriptors:
            remaining += not select.select([descriptor], [], [], max(0.0, end - monotonic()))[0]
            os.close(descriptor)
        return remaining


class OtherLoad:
    """Cores used by all other processes on the machine during a measurement. Children count when they have ended."""

    def __init__(self) -> None:
        self._busy, self._ours, self._at = procfs.busy_seconds(), _ours(), monotonic()

    def cores(self) -> float:
        busy, ours, at = procfs.busy_seconds(), _ours(), monotonic()
        return max(0.0, (busy - self._busy - (ours - self._ours)) / (at - self._at))


def _ours() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def segments() -> set[str]:
    """Names in /dev/shm of segments of this process and its descendants, alive or `seen`.

    Other processes on the machine have segments too, and those of a dead process can only be identified by its pid.
    """
    descendants(os.getpid())
    seen(os.getpid())
    return {name for name in os.listdir("/dev/shm") if (owner := _OWNER.match(name)) and owner.groups() in _seen}


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Runs processes beside a measurement that compute all the time, each in a session of its own like a service."""
    started = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True) for _ in range(count)
    ]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()
