"""Runs one process with a time limit, and passes on what it prints."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import RLock

LINES = 200
"""Maximum number of lines of output that are passed on."""
LINE_BYTES = 4096
PIPE_BYTES = 1 << 16
"""The capacity of a pipe: one read empties it."""


class AgentProcess:
    """A process group. `kill` may be called in any thread, at any time."""

    def __init__(self, command: Sequence[str], line: Callable[[str], None]) -> None:
        self._output = _Output(line)
        self._lock = RLock()  # a signal handler may call `kill`, too
        self._ended = False
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
        )

    def run(self, limit_s: float | None) -> int | None:
        """Waits for the end of the process. Returns the exit code, negative for a signal; None: it was killed after
        `limit_s`.
        """
        process = self._process
        assert process.stderr is not None
        deadline = None if limit_s is None else time.monotonic() + limit_s
        ended = os.pidfd_open(process.pid)
        printed = process.stderr.fileno()
        os.set_blocking(printed, False)
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        poll.register(printed, select.POLLIN)
        in_time = True
        try:
            while True:
                remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
                ready = [descriptor for descriptor, _ in poll.poll(None if remaining is None else remaining * 1000)]
                in_time = bool(ready)
                if not in_time or ended in ready:
                    break
                if not self._output.read(printed):
                    poll.unregister(printed)
        finally:
            os.close(ended)
            self.kill()  # also what it has started
            with self._lock:
                self._ended = True
            code = process.wait()
            self._output.read(printed)
            self._output.finish()
            process.stderr.close()
        return code if in_time else None

    def kill(self) -> None:
        with self._lock, suppress(ProcessLookupError):
            if not self._ended:  # otherwise its number may belong to others
                os.killpg(self._process.pid, signal.SIGKILL)


class _Output:
    """Splits output into lines and limits their number."""

    def __init__(self, line: Callable[[str], None]) -> None:
        self._line = line
        self._rest = b""
        self._count = 0

    def read(self, descriptor: int) -> bool:
        """Reads what is there, once: a process may print faster than it is read. False: nothing more will come."""
        try:
            piece = os.read(descriptor, PIPE_BYTES)
        except BlockingIOError:
            return True
        *lines, self._rest = (self._rest + piece).split(b"\n")
        self._rest = self._rest[:LINE_BYTES]
        for line in lines:
            self._add(line)
        return bool(piece)

    def _add(self, line: bytes) -> None:
        self._count += 1
        if self._count <= LINES:
            self._line(line[:LINE_BYTES].decode(errors="replace"))

    def finish(self) -> None:
        if self._rest:
            self._add(self._rest)
        if self._count > LINES:
            self._line(f"{self._count - LINES} further lines were dropped")
