"""Sends requests in a closed or an open loop and records their times: the core of a generator process.

Invariant: in an open loop, latency counts from the intended time, whatever delayed the request.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from shmserve.errors import ServeError
from shmserve.tools.load.generation.messages import COLUMNS, Samples
from shmserve.tools.load.plan import SECOND, Sequences
from shmserve.tools.load.targets.base import RequestSlot, SequencePart

_ABSOLUTE = 1
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC


class _Times(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in ("interval_s", "interval_ns", "value_s", "value_ns")]


class MonotonicTimer:
    """Waits for times of CLOCK_MONOTONIC, one at a time."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.timerfd_create(time.CLOCK_MONOTONIC, _FLAGS)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._waiting: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._expired)
        self._times = _Times()
        self._reference = ctypes.byref(self._times)

    async def until(self, at: int) -> None:
        """Returns at this time in ns; at once if it has passed."""
        if at <= time.monotonic_ns():
            return
        self._waiting = self._loop.create_future()
        self._times.value_s, self._times.value_ns = divmod(at, SECOND)
        if self._libc.timerfd_settime(self._fd, _ABSOLUTE, self._reference, None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")
        await self._waiting

    def _expired(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)


BURST = 64
"""Number of requests of a late schedule that are dispatched before other work of the event loop gets its turn."""
MAX_ERRORS = 100
"""Maximum number of distinct error texts that are recorded separately."""


class ResponseRecorder:
    """The times of responses, until they are taken."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self._codes: dict[str, int] = {}
        self._clear()

    def _clear(self) -> None:
        self.done, self.latency, self.delay, self.code = array("q"), array("q"), array("q"), array("h")
        self.first, self.gap_at, self.gap = array("q"), array("q"), array("q")
        self.prompt, self.output = array("q"), array("q")

    def add(
        self, intended: int, sent: int, done: int, error: ServeError | None, answers: Answers | None = None
    ) -> None:
        """`answers`: those of a stream."""
        if answers is not None:
            self.first.append(answers.first)
            self.prompt.append(answers.prompt)
            self.output.append(answers.output)
        self.done.append(done)
        self.latency.append(done - intended)
        self.delay.append(sent - intended)
        self.code.append(0 if error is None else self._code(f"{error.code}: {error}"))

    def _code(self, text: str) -> int:
        result = self._codes.get(text)
        if result is None:
            if len(self._codes) >= MAX_ERRORS:
                text = "other errors"
            result = self._codes.setdefault(text, len(self._codes) + 1)
            if result > len(self.errors):
                self.errors.append(text)
        return result

    def take(self, now: int, cpu_ns: int) -> Samples:
        columns = {name: getattr(self, name).tobytes() for name in COLUMNS}
        taken = Samples(now, cpu_ns, list(self.errors), **columns)
        self._clear()
        return taken


class Answers:
    """Times of the answers of one stream."""

    def __init__(self, recorder: ResponseRecorder, intended: int, clock: Callable[[], int]) -> None:
        self._recorder, self._intended, self._clock = recorder, intended, clock
        self.first = self._last = 0
        """The time to the first answer; 0: there was none."""
        self.prompt = self.output = 0
        """Numbers of tokens of a language model."""

    def __call__(self) -> None:
        now, recorder = self._clock(), self._recorder
        if self._last:
            recorder.gap_at.append(now)
            recorder.gap.append(now - self._last)
        else:
            self.first = now - self._intended
        self._last = now

    def count(self, prompt: int, output: int) -> None:
        self.prompt, self.output = prompt, output


class LoadSender:
    """`bodies` are sent round robin. `open_slot` opens a slot; `until` waits for a time of `clock`. `ids`: those of
    sequences, which no other generator process uses."""

    def __init__(
        self,
        bodies: Sequence[Any],
        open_slot: Callable[[], Awaitable[RequestSlot]],
        clock: Callable[[], int],
        until: Callable[[int], Awaitable[None]],
        *,
        stream: bool,
        sequences: Sequences | None,
        ids: Iterator[int],
        first_body: int = 0,
    ) -> None:
        self.recorder = ResponseRecorder()
        self.failure: BaseException | None = None
        """The exception that ended a loop."""
        self._bodies = bodies
        self._open_slot = open_slot
        self._clock = clock
        self._until = until
        self._stream = stream
        self._length = sequences.length if sequences is not None else 0
        self._ids = ids
        self._number = first_body
        self._running = False
        self._slots: list[RequestSlot] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._dispatching: asyncio.Task[None] | None = None
        self._idle: list[asyncio.Future[int | None]] = []
        self._pending: deque[int] = deque()
        self._callers = 0

    # ------------------------------------------------------------------------------------ loops

    async def start_closed(self, concurrency: int, at: int) -> None:
        """Opens the slots and sends from the time `at` on; returns without waiting for that time."""
        self._running = True
        while len(self._slots) < concurrency:
            self._slots.append(await self._open_slot())
        self._spawn(self._closed(concurrency, at))

    async def _closed(self, concurrency: int, at: int) -> None:
        await self._until(at)
        for slot in self._slots[:concurrency]:
            self._spawn(self._caller(slot))

    async def _caller(self, slot: RequestSlot) -> None:
        parts = _Parts(self._length, self._ids)
        while self._running:
            now = self._clock()
            await self._one(slot, parts.next(), now)
        await self._finish(slot, parts)

    def start_open(self, times: Iterator[int], at: int, limit: int) -> None:
        """Sends at `at` plus each of the times; at most `limit` requests are in flight, further ones wait."""
        self._running = True
        self._callers = 0
        self._dispatching = self._spawn(self._dispatch(times, at, limit))

    async def _dispatch(self, times: Iterator[int], start: int, limit: int) -> None:
        for number, after in enumerate(times, 1):
            at = start + after
            await self._until(at)
            if number % BURST == 0:
                await asyncio.sleep(0)  # `until` returns at once when late; an unreachable rate must not block the loop
            if not self._running:
                return
            if self._idle:
                self._idle.pop().set_result(at)
            elif self._callers < limit:
                self._callers += 1
                self._spawn(self._open_caller(at))
            else:
                self._pending.append(at)

    async def _open_caller(self, at: int | None) -> None:
        slot = self._slots.pop() if self._slots else await self._open_slot()
        parts = _Parts(self._length, self._ids)
        try:
            while at is not None:
                await self._one(slot, parts.next(), at)
                if not self._running:
                    break
                if self._pending:
                    at = self._pending.popleft()
                else:
                    idle: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
                    self._idle.append(idle)
                    at = await idle
            await self._finish(slot, parts)
        finally:  # even if the request was cancelled: the next load uses the slot again
            self._slots.append(slot)

    @property
    def is_dispatching(self) -> bool:
        """Whether an open loop has send times left."""
        return self._dispatching is not None and not self._dispatching.done()

    @property
    def backlog(self) -> int:
        """Number of requests that are due in an open loop, and wait because the limit is reached."""
        return len(self._pending)

    async def stop(self, seconds: float) -> int:
        """Stops sending, and waits up to `seconds` for the responses. Returns the number of missing responses."""
        self._running = False
        self._pending.clear()
        if self._dispatching is not None:
            self._dispatching.cancel()  # it may be sleeping until a send time far in the future
            await asyncio.gather(self._dispatching, return_exceptions=True)
            self._dispatching = None
        for idle in self._idle:
            idle.set_result(None)
        self._idle.clear()
        unanswered = 0
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=seconds)
            unanswered = len(late)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        return unanswered

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.failure = task.exception()

    # ------------------------------------------------------------------------------------ one request

    async def _one(self, slot: RequestSlot, part: SequencePart | None, intended: int) -> None:
        body = self._bodies[self._number % len(self._bodies)]
        self._number += 1
        sent = self._clock()
        answers = Answers(self.recorder, intended, self._clock) if self._stream else None
        error = None
        try:
            if answers is None:
                await slot.send(body, part)
            else:
                await slot.stream(body, part, answers)
        except ServeError as failed:
            error = failed.with_traceback(None)
            await asyncio.sleep(0)  # a request that fails at once must not starve the event loop
        self.recorder.add(intended, sent, self._clock(), error, answers)

    async def _finish(self, slot: RequestSlot, parts: _Parts) -> None:
        """Ends a sequence that the end of the load has interrupted. Its requests are not recorded."""
        if parts.is_open:
            try:
                await slot.send(self._bodies[0], parts.last())
            except ServeError:
                return  # the server forgets the sequence after its idle time


class _Parts:
    """The positions of a caller's requests in its sequences; None without sequences."""

    def __init__(self, length: int, ids: Iterator[int]) -> None:
        self._length, self._ids = length, ids
        self._id = self._sent = 0

    def next(self) -> SequencePart | None:
        if not self._length:
            return None
        if not self._sent:
            self._id = next(self._ids)
        self._sent += 1
        part = SequencePart(self._id, self._sent == 1, self._sent == self._length)
        if part.end:
            self._sent = 0
        return part

    @property
    def is_open(self) -> bool:
        return self._sent > 0

    def last(self) -> SequencePart:
        self._sent = 0
        return SequencePart(self._id, False, True)
