"""Runs simulations in several processes.

Invariant: results are in the order of the tasks, whatever the number of processes. No process outlives the pool.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import resource_tracker
from typing import TypeVar

from shmserve.system import interrupts

Task = TypeVar("Task")
Answer = TypeVar("Answer")


class Pool:
    """With a size of 1, everything runs in this process."""

    def __init__(self, processes: int) -> None:
        self._executor: ProcessPoolExecutor | None = None
        if processes > 1:
            # Not forked: this process may have threads.
            context = multiprocessing.get_context("spawn")
            self._executor = ProcessPoolExecutor(processes, context)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)

    def run(self, work: Callable[[Task], Answer], tasks: Iterable[Task]) -> Iterator[Answer]:
        """`work` is a function of a module, or a partial of one, so that it can be sent to another process."""
        if self._executor is None:
            return iter(map(work, tasks))
        resource_tracker.ensure_running()  # its start would unblock the signal
        with interrupts.blocked_in_children():  # the process that owns the pool ends it
            return self._executor.map(work, tasks)
