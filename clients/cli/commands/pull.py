"""`shmserve pull`: downloads a model, shows the progress, and prints the command that serves the model."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import threading
import time

from shmserve.clients.cli.commands.base import StatusLine
from shmserve.repo.remote.pull import Pull
from shmserve.terminal.errors import Failed
from shmserve.terminal.tables import bytes_text

_STEP = 10
"""Percent between the lines of a progress that is not shown on a terminal."""


def pull(args: argparse.Namespace) -> int:
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    job = Pull(args.url, args.repository, args.name, args.max_size)
    try:
        with StatusLine() as status:
            job.run(_Progress(job.plan.name, job.plan.size, status).advance)
    except OSError as error:
        raise Failed(f"cannot write {error.filename or args.repository}: {error.strerror}") from error
    print(job.folder)
    print(shlex.join(["shmserve", "serve", "--model-repository", str(args.repository)]))
    return 0


class _Progress:
    """How much of a model has arrived. `advance` may be called by any thread."""

    def __init__(self, name: str, total: int, status: StatusLine) -> None:
        self._name = name
        self._total = total
        self._status = status
        self._step = 1 if status.is_shown else _STEP
        self._guard = threading.Lock()
        self._done = 0
        self._began: tuple[float, int] | None = None
        """When the first bytes arrived, and how many an earlier command had downloaded."""
        self._shown = -1

    def advance(self, size: int) -> None:
        with self._guard:
            self._done += size
            now = time.monotonic()
            self._began = self._began or (now, self._done)
            percent = 100 * self._done // self._total if self._total else 100
            if percent // self._step == self._shown:
                return
            self._shown = percent // self._step
            began, resumed = self._began
            speed = f", {bytes_text(round((self._done - resumed) / (now - began)))}/s" if now > began else ""
            line = f"{self._name}: {percent} % of {bytes_text(self._total)}{speed}"
            self._status.show(line)
            if not self._status.is_shown:
                print(line, file=sys.stderr, flush=True)
