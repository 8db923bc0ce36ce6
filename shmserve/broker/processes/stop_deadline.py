"""The end of a stop: whatever the event loop, the core or a disk does, the server has ended a few seconds after
`--exit-timeout-secs`.

A thread of its own, because it must also work while the loop is stuck in a turn or waits for another thread.
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

log = logging.getLogger("shmserve")

KILL_S = 2.0
"""After the time that requests in flight have, for workers and gateways to end in the usual way."""
EXIT_S = 1.0
"""After the kill, for the loop to remove sockets and segments. Then the process exits without that."""
NAMES = 10
"""Processes named in the log, at most."""


class Deadline:
    """`names`: what the processes known to the broker are called, by pid. `requests`: how many are unanswered.
    `killed` is called from the thread when no process is left."""

    def __init__(
        self, names: Callable[[], Mapping[int, str]], requests: Callable[[], int], killed: Callable[[], object]
    ) -> None:
        self._names = names
        self._requests = requests
        self._killed = killed

    def start(self, limit_s: float) -> None:
        """The server stops now. There is no way to cancel this: interpreter shutdown waits for threads, too."""
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
        left = children()
        names = self._names()
        shown = ", ".join(f"{names.get(pid) or _command(pid)} (pid {pid})" for pid in left[:NAMES])
        more = f" and {len(left) - NAMES} more" if len(left) > NAMES else ""
        return (
            f"the server did not stop within {limit_s:g} s (--exit-timeout-secs) plus {KILL_S:g} s; killing what "
            f"is left: {self._requests()} request(s), {len(left)} process(es){': ' if left else ''}{shown}{more}"
        )


def children() -> list[int]:
    """The child processes of this one, whichever of its threads started them."""
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            found += map(int, (task / "children").read_text().split())
    return found


def kill_children(limit_s: float) -> None:
    """Kills and reaps all child processes, and those that become children of this one by that, as their parents end."""
    end = time.monotonic() + limit_s
    while (left := children()) and time.monotonic() < end:
        for pid in left:
            for kill in (os.kill, os.killpg):  # each leads a session of its own, once it has got that far
                with contextlib.suppress(OSError):
                    kill(pid, signal.SIGKILL)
        for pid in left:
            _reap(pid, end)


def _reap(pid: int, end: float) -> None:
    """Waits for the end of the process, until that time."""
    with contextlib.suppress(OSError):  # the loop has reaped it
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
