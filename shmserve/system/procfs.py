"""What the kernel says of processes and of the machine.

The rule of the file: a process that has ended meanwhile has used nothing; that is no error.
"""

from __future__ import annotations

import os
from pathlib import Path

from msgspec import Struct

PAGE = os.sysconf("SC_PAGE_SIZE")
TICKS = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")


class Usage(Struct, frozen=True):
    cpu_seconds: float = 0.0
    resident_bytes: int = 0
    """What of it is in memory, shared pages included."""
    started: float = 0.0
    """In seconds after the start of the machine."""


NOTHING = Usage()


def usage(pid: int) -> Usage:
    try:
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return NOTHING
    try:
        text = os.read(descriptor, 4096)
    except ProcessLookupError:
        return NOTHING
    finally:
        os.close(descriptor)
    fields = text.rpartition(b")")[2].split()  # its name, which comes before, may hold anything
    ticks = int(fields[11]) + int(fields[12])
    return Usage(ticks / TICKS, int(fields[21]) * PAGE, int(fields[19]) / TICKS)


def own_bytes(pid: int) -> int:
    """What a process has in memory for itself: without files, and without memory that was made to be shared."""
    try:
        descriptor = os.open(f"/proc/{pid}/statm", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0
    try:
        fields = os.read(descriptor, 256).split()
    except ProcessLookupError:
        return 0
    finally:
        os.close(descriptor)
    return max(0, int(fields[1]) - int(fields[2])) * PAGE


def descriptors() -> int:
    """How many this process has open."""
    return len(os.listdir("/proc/self/fd")) - 1  # without the one of the listing


def boot_time() -> float:
    """When the machine was started, in seconds of the epoch."""
    for line in (_PROC / "stat").read_text().splitlines():
        if line.startswith("btime "):
            return float(line.split()[1])
    return 0.0


def memory() -> tuple[int, int]:
    """Bytes of the machine's memory, and of them those that nobody else could have."""
    found: dict[str, int] = {}
    for line in (_PROC / "meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        found[name] = int(rest.split()[0]) * 1024
    total = found["MemTotal"]
    return total, total - found.get("MemAvailable", found["MemFree"])


class Cores:
    """How busy all cores together were, from one look to the next."""

    def __init__(self, interval_s: float = 0.0) -> None:
        """`interval_s`: looks that are closer together see the same."""
        self._least = max(TICKS // 10, int(interval_s * TICKS * (os.cpu_count() or 1)))
        self._busy, self._total = _times()
        self._share = 0.0

    def share(self) -> float:
        """From 0 to 1."""
        busy, total = _times()
        if total - self._total >= self._least:
            self._share = min(1.0, max(0.0, (busy - self._busy) / (total - self._total)))
            self._busy, self._total = busy, total
        return self._share


def _times() -> tuple[int, int]:
    """Ticks of all cores since the start of the machine: busy, and all."""
    with (_PROC / "stat").open() as file:
        ticks = [int(text) for text in file.readline().split()[1:9]]
    total = sum(ticks)
    return total - ticks[3] - ticks[4], total
