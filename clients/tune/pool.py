"""Runs simulations in several processes.

Invariant: results come in the order of the tasks, whatever the number of processes. No process outlives the pool.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

Task = TypeVar("Task")
Answer = TypeVar("Answer")


class Pool:
    """With one process, everything runs in this one."""

    def __init__(self, processes: int) -> None:
        self._executor: ProcessPoolExecutor | None = None
        if processes > 1:
            # Not forked: this process may have threads.
            context = multiprocessing.get_context("spawn")
            self._executor = ProcessPoolExecutor(processes, context, _ignore_interrupt)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)

    def run(self, work: Callable[[Task], Answer], tasks: Iterable[Task]) -> Iterator[Answer]:
        """`work` is a function of a module, or a partial of one, so that it can be sent to another process."""
        return iter(map(work, tasks)) if self._executor is None else self._executor.map(work, tasks)


def _ignore_interrupt() -> None:
    """Ctrl-C reaches all processes of the terminal; the one that owns the pool ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
