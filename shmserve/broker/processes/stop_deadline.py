"""Limits the time of a stop: the server exits seconds after `--exit-timeout-secs` even if the loop, core or disk hangs.

Runs in a separate thread, so that it works while the loop is stuck in a turn or waits for another thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from shmserve.system import procfs

log = logging.getLogger("shmserve")

KILL_S = 2.0
"""Time for workers and gateways to exit normally, after the time for requests in flight."""
EXIT_S = 1.0
"""Time after the kill for the loop to remove sockets and segments. Then the process exits regardless."""
NAMES = 10
"""Maximum number of processes named in the log."""


class Deadline:
    """`names` returns the names of the broker's processes by pid, `requests` the number of requests in flight. `killed`
    is called from the thread after all child processes were killed."""

    def __init__(
        self, names: Callable[[], Mapping[int, str]], requests: Callable[[], int], killed: Callable[[], object]
    ) -> None:
        self._names = names
        self._requests = requests
        self._killed = killed

    def start(self, limit_s: float) -> None:
        """Starts the deadline. It cannot be cancelled, as interpreter shutdown also waits for threads."""
        threading.Thread(target=self._run, args=(limit_s,), name="deadline", daemon=True).start()

    def _run(self, limit_s: float) -> NoReturn:
        never = threading.Event()
        never.wait(limit_s + KILL_S)
        try:
            log.error("%s", self._report(limit_s))
            kill_children(EXIT_S)
            self._killed()
        finally:
            never.wait(EXIT_S)
            os._exit(1)

    def _report(self, limit_s: float) -> str:
        running = procfs.children(os.getpid())
        names = self._names()
        shown = ", ".join(f"{names.get(pid) or _command(pid)} (pid {pid})" for pid in running[:NAMES])
        more = f" and {len(running) - NAMES} more" if len(running) > NAMES else ""
        return (
            f"the server did not stop within {limit_s:g} s (--exit-timeout-secs) plus {KILL_S:g} s; killing what "
            f"is left: {self._requests()} request(s), {len(running)} process(es){': ' if running else ''}{shown}{more}"
        )


def kill_children(limit_s: float) -> None:
    """Kills and reaps all child processes, including orphans that become children when their parents are killed."""
    end = time.monotonic() + limit_s
    while (remaining := procfs.children(os.getpid())) and time.monotonic() < end:
        for pid in remaining:
            for kill in (os.kill, os.killpg):  # each leads its own session once it has called setsid
                with contextlib.suppress(OSError):
                    kill(pid, signal.SIGKILL)
        for pid in remaining:
            _reap(pid, end)


def _reap(pid: int, end: float) -> None:
    """Waits until the process exits, at most until the time `end`, and reaps it."""
    with contextlib.suppress(OSError):  # the loop has already reaped it
        descriptor = os.pidfd_open(pid)
        try:
            select.select([descriptor], [], [], max(0.0, end - time.monotonic()))
        finally:
            os.close(descriptor)
        os.waitpid(pid, os.WNOHANG)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "a process that has exited"
