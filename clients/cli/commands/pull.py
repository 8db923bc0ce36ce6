"""`shmserve pull`: downloads a model, shows the progress, and prints the command that serves the model."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import threading
import time

from shmserve.clients.cli.commands.base import CLEAR_LINE
from shmserve.repo.remote.pull import Pull
from shmserve.terminal.errors import Failed
from shmserve.terminal.tables import bytes_text

_STEP = 10
"""Percent between the lines of a progress that is not shown on a terminal."""


def pull(args: argparse.Namespace) -> int:
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    job = Pull(args.url, args.repository, args.name, args.max_size)
    progress = _Progress(job.plan.name, job.plan.size, sys.stderr.isatty())
    try:
        job.run(progress.advance)
    except OSError as error:
        raise Failed(f"cannot write {error.filename or args.repository}: {error.strerror}") from error
    finally:
        progress.end()
    print(job.folder)
    print(shlex.join(["shmserve", "serve", "--model-repository", str(args.repository)]))
    return 0


class _Progress:
    """How much of a model has arrived. `advance` may be called by any thread."""

    def __init__(self, name: str, total: int, terminal: bool) -> None:
        self._name = name
        self._total = total
        self._terminal = terminal
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
            if percent // (1 if self._terminal else _STEP) != self._shown:
                self._shown = percent // (1 if self._terminal else _STEP)
                began, resumed = self._began
                speed = f", {bytes_text(round((self._done - resumed) / (now - began)))}/s" if now > began else ""
                line = f"{self._name}: {percent} % of {bytes_text(self._total)}{speed}"
                sys.stderr.write(f"{CLEAR_LINE}{line}" if self._terminal else f"{line}\n")
                sys.stderr.flush()

    def end(self) -> None:
        if self._terminal and self._shown >= 0:
            sys.stderr.write("\n")
