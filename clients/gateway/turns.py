"""Long work on the event loop, a slice at a time. The rule of the file: one slice per iteration of the loop, whoever it
is for, so other clients wait for one slice and not for all of the work.

Work is a generator that yields between slices. A thread would not help: what takes long here holds the interpreter's
lock.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, TypeVar

T = TypeVar("T")
SLICE_BYTES = 64 * 1024
"""Bytes of input or output that one slice is about: a few milliseconds of work."""
Work = Generator[None, None, T]


class Job:
    """`then` gets what the work returns, `failed` what it raises; neither is called after `cancel`."""

    __slots__ = ("_failed", "_then", "_work")

    def __init__(self, work: Work[Any], then: Callable[[Any], None], failed: Callable[[Exception], None]) -> None:
        self._work: Work[Any] | None = work
        self._then = then
        self._failed = failed

    @property
    def running(self) -> bool:
        return self._work is not None

    def cancel(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.close()

    def step(self) -> bool:
        """Whether there is more to do."""
        work = self._work
        if work is None:
            return False
        try:
            try:
                next(work)
                return True
            except StopIteration as end:
                self._work = None
                self._then(end.value)
        except Exception as error:
            self._work = None
            self._failed(error)
        return False


class Turns:
    """The jobs of one loop, round robin."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._jobs: deque[Job] = deque()
        self._scheduled = False

    def run(self, work: Work[T], then: Callable[[T], None], failed: Callable[[Exception], None]) -> Job:
        """The first slice runs at once, so work of one slice costs no iteration."""
        job = Job(work, then, failed)
        if job.step():
            self._jobs.append(job)
            self._schedule()
        return job

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        job = self._jobs.popleft()
        if job.step():
            self._jobs.append(job)
        if self._jobs:
            self._schedule()


def finished(work: Work[T]) -> T:
    """All of it at once, for work that is known to be small."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            found: T = end.value
            return found
