"""The return value of `submit`: a concurrent.futures.Future, as far as wait(), as_completed() and asyncio.wrap_future()
need one.

Locks, callback lists and conditions are only created on demand, so a plain future stays cheap.
"""

from __future__ import annotations

import concurrent.futures
import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from shmserve.errors import ServeError
from shmserve.protocol.messages import Reply
from shmserve.session import RowReply, Ticket, inline_result

log = logging.getLogger("shmserve")

PENDING = "PENDING"
CANCELLED = "CANCELLED_AND_NOTIFIED"
FINISHED = "FINISHED"


class ResponseReader(Protocol):
    """The interface of the link that delivers the answer (`clients.shared_link`)."""

    uncollected: int
    result_collected: bool

    @property
    def lock(self) -> AbstractContextManager[bool]: ...

    @property
    def condition(self) -> threading.Condition: ...

    def wait(self, future: Future, timeout: float | None) -> bool: ...

    def poll(self, future: Future) -> None: ...

    def cancel(self, future: Future) -> None: ...

    def notify(self, future: Future) -> None: ...

    def ensure_reader(self, future: Future) -> None: ...


class Watch:
    """The callbacks and waiting threads to notify when a future is done."""

    __slots__ = ("callbacks", "counted", "gates", "waiters")

    def __init__(self) -> None:
        self.callbacks: list[Callable[[Any], object]] = []
        self.counted = False
        """Whether this watch keeps the reader thread running."""
        self.gates: list[Any] = []
        """Locks of threads that wait for the result while another thread reads."""
        self.waiters: list[Any] = []
        """Waiters of concurrent.futures.wait() and as_completed()."""


class Future(Ticket, concurrent.futures.Future[Any]):
    """The result of a request, returned by `result()`. Dropping a future does not cancel its request; use
    `cancel()`.
    """

    _state = PENDING
    _exception: BaseException | None = None
    _answer: Any = None
    _watch: Watch | None = None

    def __init__(self, reader: ResponseReader) -> None:
        self._reader = reader

    # ------------------------------------------------------------------------------------ called by the session

    def settle(self, answer: Any) -> None:
        self._answer = answer
        self._state = FINISHED
        if self._watch is not None:
            self._reader.notify(self)

    def fail(self, error: ServeError) -> None:
        self._exception = error
        self._state = FINISHED
        if self._watch is not None:
            self._reader.notify(self)

    # ------------------------------------------------------------------------------------ public interface

    def result(self, timeout: float | None = None) -> Any:
        """Waits for the result. TimeoutError after `timeout` seconds; the request stays active."""
        if self._state is not FINISHED:
            self._wait(timeout)
        answer = self._answer
        if type(answer) is RowReply or type(answer) is Reply:
            reader = self._reader
            reader.uncollected -= 1
            reader.result_collected = True
            try:
                answer = self._answer = inline_result(answer)
            except ServeError as error:
                self._exception = error
        if self._exception is not None:
            try:
                raise self._exception
            finally:
                del self  # otherwise the traceback and this future would keep each other alive
        return answer

    def exception(self, timeout: float | None = None) -> BaseException | None:
        try:
            self.result(timeout)
        except ServeError as error:
            if error is not self._exception:
                raise
            return error.with_traceback(None)  # the traceback and this future would keep each other alive
        return None

    def _wait(self, timeout: float | None) -> None:
        if not self._reader.wait(self, timeout):
            raise concurrent.futures.TimeoutError
        if self._state is CANCELLED:
            raise concurrent.futures.CancelledError

    def done(self) -> bool:
        """Whether the answer has arrived. Sends buffered requests and reads pending packets without blocking."""
        if self._state is PENDING:
            self._reader.poll(self)
        return self._state is not PENDING

    def running(self) -> bool:
        return False

    def cancelled(self) -> bool:
        return self._state is CANCELLED

    def cancel(self) -> bool:
        """Cancels the request: the server drops it if it is still queued. False: the answer has already arrived."""
        if self._state is PENDING:
            self._reader.cancel(self)
        return self._state is CANCELLED

    def mark_cancelled(self) -> None:
        self._state = CANCELLED
        if self._watch is not None:
            self._reader.notify(self)

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        """Calls `fn(self)` when the answer arrives, in the thread that reads it. Starts the reader thread if needed."""
        reader = self._reader
        with reader.lock:
            if self._state is PENDING:
                self.watch().callbacks.append(fn)
                reader.ensure_reader(self)
                return
        self._call(fn)

    def notify_waiters(self) -> None:
        """Called with the lock held, once the future is done."""
        for waiter in self.watch().waiters:
            if self._state is not FINISHED:
                waiter.add_cancelled(self)
            elif self._exception is not None:
                waiter.add_exception(self)
            else:
                waiter.add_result(self)

    def drop_watch(self) -> None:
        self._watch = None

    def call_back(self) -> None:
        """Runs the callbacks. Must be called without the lock."""
        watch = self._watch
        while watch is not None and watch.callbacks:
            self._call(watch.callbacks.pop(0))

    def _call(self, fn: Callable[[Any], object]) -> None:
        try:
            fn(self)
        except Exception:
            log.exception("a callback of a future failed: %r", fn)

    def watch(self) -> Watch:
        """Must be called with the lock held."""
        watch = self._watch
        if watch is None:
            watch = self._watch = Watch()
        return watch

    def __repr__(self) -> str:
        return f"<shmserve.Future {self._state.lower()}>"

    # ------------------------------------------------------------------------------------ used by concurrent.futures

    @property
    def _condition(self) -> Any:  # type: ignore[override]
        """The condition that all futures of a client share."""
        return self._reader.condition

    @property
    def _waiters(self) -> list[Any]:  # type: ignore[override]
        """concurrent.futures is about to wait without calling this class: ensure that a thread reads."""
        with self._reader.lock:
            waiters = self.watch().waiters
            if self._state is PENDING:
                self._reader.ensure_reader(self)
            return waiters
