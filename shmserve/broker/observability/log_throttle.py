"""Rate limit for logging a child process's output. Consecutive identical lines are counted instead of repeated.

Pure: the caller passes the time. The limit applies to windows of one second rather than to a token bucket, so that
logged lines are contiguous and one notice covers the rest of the window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shmserve.terminal.tables import bytes_text

WINDOW_S = 1.0
LINES = 200
BYTES = 1 << 20
"""Limits per window and child."""


class Throttle:
    def __init__(self) -> None:
        self.trailing = 0
        """Number of lines dropped since the last admitted line."""
        self._until = float("-inf")
        """End of the window."""
        self._lines = self._bytes = 0
        self._full = False
        self._dropped = self._dropped_bytes = 0
        self._last: bytes | None = None
        self._repeats = 0

    @property
    def pending(self) -> bool:
        """Whether `flush` has notices."""
        return bool(self._dropped or self._repeats)

    def admit(self, lines: Sequence[bytes], now: float) -> Iterator[bytes | str]:
        """The entries to log: lines (bytes), and notices about repeated or dropped lines (str)."""
        if now >= self._until:
            yield from self.flush()
            self._until = now + WINDOW_S
            self._lines = self._bytes = 0
            self._full = False
        for number, line in enumerate(lines):
            if line == self._last:
                self._repeats += 1
                continue
            if self._repeats:
                yield from self._repeated()
            if self._is_over(len(line)):
                self._full = True
                self.drop(len(lines) - number, sum(map(len, lines[number:])) + len(lines) - number)
                return
            self._last = line
            self._bytes += len(line)
            self._lines += 1
            self.trailing = 0
            yield line

    def is_full(self, now: float) -> bool:
        """Whether all lines are dropped until the window ends."""
        return self._full and now < self._until

    def drop(self, lines: int, size: int) -> None:
        self._last = None
        self._dropped += lines
        self._dropped_bytes += size
        self.trailing += lines

    def _is_over(self, size: int) -> bool:
        return self._lines >= LINES or self._bytes + size > BYTES

    def flush(self) -> Iterator[str]:
        """Notices about repeated and dropped lines since the last call."""
        yield from self._repeated()
        if self._dropped:
            dropped = f"{self._dropped:,} lines ({bytes_text(self._dropped_bytes)}) of output were dropped"
            yield f"{dropped}; the limit is {LINES:,} lines or {bytes_text(BYTES)} per second"
            self._dropped = self._dropped_bytes = 0

    def _repeated(self) -> Iterator[str]:
        if self._repeats:
            yield repeated(self._repeats)
            self._lines += 1
            self._repeats = 0


def repeated(count: int) -> str:
    return f"last message repeated {count:,} time{'' if count == 1 else 's'}"
