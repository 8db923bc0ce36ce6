"""Runs long work on the event loop in slices: one slice of one job per iteration of the loop, so that other clients
wait for one slice, not for the whole job. Reads of large bodies are also bounded per iteration.

A thread would not help: the long operations hold the GIL.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, TypeVar

T = TypeVar("T")
SLICE_BYTES = 64 * 1024
"""Approximate bytes of input or output per slice: a few milliseconds of work."""
COPY_BYTES = 16 * SLICE_BYTES
"""Bytes that are only copied per slice."""
SlicedWork = Generator[None, None, T]
"""Work that yields between its slices."""


class SlicedJob:
    """`then` gets what the work returns, `failed` what it raises; neither is called after `cancel`."""

    __slots__ = ("_failed", "_then", "_work")

    def __init__(self, work: SlicedWork[Any], then: Callable[[Any], None], failed: Callable[[Exception], None]) -> None:
        self._work: SlicedWork[Any] | None = work
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
        """Runs one slice. True: there is more to do."""
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


class JobTurns:
    """The jobs of one loop, round robin."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._jobs: deque[SlicedJob] = deque()
        self._scheduled = False

    def run(self, work: SlicedWork[T], then: Callable[[T], None], failed: Callable[[Exception], None]) -> SlicedJob:
        """Runs the first slice at once, so a job of one slice costs no iteration."""
        job = SlicedJob(work, then, failed)
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
        if self._jobs:
            self._schedule()  # before the step, since a callback in it may raise
        if job.step():
            self._jobs.append(job)
            self._schedule()


READ_BYTES = 2 << 20
"""Bytes that all connections together read in one iteration of the loop: 1 to 2 ms of work."""
MIN_BYTES = 64 * 1024
"""Minimum share of a connection."""
SMALL_READ_BYTES = MIN_BYTES // 32
"""Reads up to this size are not counted: the event loop reads from a connection at most 32 times per iteration."""
BUSY_READ_BYTES = 16 * 1024
"""Maximum size of one read when READ_BYTES or the share of the connection are used up."""


class FairReader(ABC):
    """A connection whose reads of large bodies are bounded."""

    def __init__(self) -> None:
        self.transport: Any = None
        self._reading = True
        self.read_turn = self.read_bytes = 0
        """`read_bytes`: bytes read in the iteration `read_turn`."""

    @property
    @abstractmethod
    def may_read(self) -> bool:
        """Whether nothing else keeps reading paused."""

    def pause(self) -> None:
        self._reading = False
        self.transport.pause_reading()

    def resume(self) -> None:
        transport = self.transport
        if transport is not None and not transport.is_closing() and not self._reading and self.may_read:
            self._reading = True
            transport.resume_reading()

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()


class ReadTurns:
    """Divides reads of large bodies between connections. The event loop lets a connection read as long as it has more
    to read, so a connection that has used its share of READ_BYTES is paused until the next iteration."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._turn = 0
        self._remaining = READ_BYTES
        self._share = READ_BYTES
        self._paused: deque[FairReader] = deque()
        self._scheduled = False

    def bounded(self, reader: FairReader, space: memoryview) -> memoryview:
        """The part of `space` that the next read may use in this iteration."""
        allowed = 0
        if self._remaining > 0:
            allowed = self._share - reader.read_bytes if reader.read_turn == self._turn else self._share
        return space[: allowed if allowed > BUSY_READ_BYTES else BUSY_READ_BYTES]

    def count(self, reader: FairReader, size: int) -> None:
        """Counts bytes that were read, and pauses the connection when its share is used up."""
        if reader.read_turn != self._turn:
            reader.read_turn = self._turn
            reader.read_bytes = 0
        reader.read_bytes += size
        self._remaining -= size
        if reader.read_bytes >= self._share or self._remaining <= 0:
            reader.pause()
            self._paused.append(reader)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._next)

    def _next(self) -> None:
        paused = self._paused
        self._turn += 1
        self._remaining = READ_BYTES
        self._share = max(MIN_BYTES, READ_BYTES // max(1, len(paused)))
        self._scheduled = False
        for _ in range(min(len(paused), READ_BYTES // MIN_BYTES)):
            paused.popleft().resume()
        if paused:
            self._scheduled = True
            self._loop.call_soon(self._next)
