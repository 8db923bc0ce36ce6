"""CPU time and memory of processes and of the machine, from /proc.

Invariant: a process that has exited is not an error; all its values are 0.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from msgspec import Struct

PAGE = os.sysconf("SC_PAGE_SIZE")
TICKS = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")


class ProcessUsage(Struct, frozen=True):
    cpu_seconds: float = 0.0
    resident_bytes: int = 0
    """Resident memory, including shared pages."""
    started: float = 0.0
    """Seconds after boot."""


NO_USAGE = ProcessUsage()


def stat_fields(pid: int) -> list[bytes]:
    """The fields of `/proc/PID/stat` from the state on; empty if the process has exited."""
    return _read(pid, "stat").rpartition(b")")[2].split()  # the name before ")" may contain any character


def usage(pid: int) -> ProcessUsage:
    fields = stat_fields(pid)
    if not fields:
        return NO_USAGE
    ticks = int(fields[11]) + int(fields[12])
    return ProcessUsage(ticks / TICKS, int(fields[21]) * PAGE, int(fields[19]) / TICKS)


def parent(pid: int) -> int:
    fields = stat_fields(pid)
    return int(fields[1]) if fields else 0


def children(pid: int) -> list[int]:
    """The child processes of a process, regardless of which thread started them."""
    pids: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in os.listdir(_PROC / f"{pid}/task"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has exited
                pids += map(int, (_PROC / f"{pid}/task/{task}/children").read_text().split())
    return pids


def descendants(pid: int) -> list[int]:
    """The children of a process, their children, and so on. Zombies and their children are left out."""
    below: dict[int, list[int]] = {}
    for entry in os.listdir(_PROC):
        fields = stat_fields(int(entry)) if entry.isdecimal() else []
        if fields and fields[0] != b"Z":
            below.setdefault(int(fields[1]), []).append(int(entry))
    pids, remaining = [], [pid]
    while remaining:
        more = below.get(remaining.pop(), [])
        pids += more
        remaining += more
    return pids


def command_line(pid: int) -> str:
    """The words of its command, separated by spaces."""
    try:
        return (_PROC / f"{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def own_bytes(pid: int) -> int:
    """Private resident memory of a process, without files and shared memory."""
    fields = _read(pid, "statm").split()
    return max(0, int(fields[1]) - int(fields[2])) * PAGE if fields else 0


def written_bytes(pid: int) -> int:
    """The memory that the process has written and shares with no other. On a kernel that does not report it, 0."""
    return (_kilobytes(_read(pid, "smaps_rollup"), b"Private_Dirty:") or 0) * 1024


def proportional_bytes(pid: int) -> int:
    """The proportional memory (PSS) of a process: shared pages are divided by the number of processes that map them.
    Takes time for large processes. On a kernel that does not report it, the resident memory."""
    size = _kilobytes(_read(pid, "smaps_rollup"), b"Pss:")
    return size * 1024 if size is not None else usage(pid).resident_bytes


def anonymous_bytes(pid: int) -> tuple[int, int]:
    """The anonymous memory of a process, without files and shared memory, and an upper bound of its peak. Pages shared
    with the process from which it was forked count proportionally. Takes time for large processes."""
    rollup, status = _read(pid, "smaps_rollup"), _read(pid, "status")
    now, whole = (_kilobytes(rollup, name) for name in (b"Pss_Anon:", b"Anonymous:"))
    if now is None:  # an old kernel
        now = whole = own_bytes(pid) // 1024
    # All from one reading: a process that frees its memory as it exits would otherwise count it twice.
    sizes = [_kilobytes(status, name) for name in (b"RssAnon:", b"VmHWM:", b"VmRSS:")]
    anonymous, highest, resident = (size or 0 for size in sizes)
    peak = anonymous + max(0, highest - resident) - ((whole or 0) - now)
    return now * 1024, max(now, peak) * 1024


def _kilobytes(text: bytes, name: bytes) -> int | None:
    _, label, rest = text.partition(b"\n" + name)
    return int(rest.split(None, 1)[0]) if label else None


def _read(pid: int, name: str) -> bytes:
    """A file of a process; empty if the process has exited."""
    try:
        descriptor = os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):
        return b""
    try:
        return os.read(descriptor, 4096)
    except ProcessLookupError:
        return b""
    finally:
        os.close(descriptor)


def descriptors() -> int:
    """The number of open descriptors of this process."""
    return len(os.listdir("/proc/self/fd")) - 1  # without the descriptor of the listing


def boot_time() -> float:
    """Boot time in seconds since the epoch."""
    for line in (_PROC / "stat").read_text().splitlines():
        if line.startswith("btime "):
            return float(line.split()[1])
    return 0.0


def memory() -> tuple[int, int]:
    """The machine's total and unavailable memory in bytes."""
    sizes: dict[str, int] = {}
    for line in (_PROC / "meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        sizes[name] = int(rest.split()[0]) * 1024
    total = sizes["MemTotal"]
    return total, total - sizes.get("MemAvailable", sizes["MemFree"])


class Cores:
    """Average utilization of all cores between two samples."""

    def __init__(self, interval_s: float = 0.0) -> None:
        """`interval_s`: minimum interval between samples; in between, the last result is returned."""
        self._min_ticks = max(TICKS // 10, int(interval_s * TICKS * (os.cpu_count() or 1)))
        self._busy, self._total = _times()
        self._share = 0.0

    def share(self) -> float:
        """Utilization from 0 to 1."""
        busy, total = _times()
        if total - self._total >= self._min_ticks:
            self._share = min(1.0, max(0.0, (busy - self._busy) / (total - self._total)))
            self._busy, self._total = busy, total
        return self._share


def busy_seconds() -> float:
    """CPU time of all cores since boot, without idle time."""
    return _times()[0] / TICKS


def _times() -> tuple[int, int]:
    """Ticks of all cores since boot: (busy, total)."""
    with (_PROC / "stat").open() as file:
        ticks = [int(text) for text in file.readline().split()[1:9]]
    total = sum(ticks)
    return total - ticks[3] - ticks[4], total
