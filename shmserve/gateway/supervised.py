"""A gateway that a server has started: it ends with the server, and writes to the server's log.

Invariant: however the server ends, its ports are free for the next one.
"""

from __future__ import annotations

import logging
import os
import signal

from shmserve.system.process import PDEATHSIG, prctl
from shmserve.terminal.errors import Failed


def end_with(parent: int) -> None:
    """The kernel kills this process when its parent, of that pid, has ended."""
    if error := prctl(PDEATHSIG, signal.SIGKILL):
        raise Failed(f"cannot set the parent-death signal: {os.strerror(error)}")
    if os.getppid() != parent:
        raise Failed(f"the server (process {parent}) exited before its gateway started")


class ServerLog(logging.Formatter):
    """`level: text` per line, as workers write it; the server adds the time."""

    def format(self, record: logging.LogRecord) -> str:
        lines = super().format(record).splitlines() or [""]
        level = record.levelname.lower()
        return "\n".join(f"{level}: {line}" for line in lines)
