"""What `submit` returns. The rule of the file: a future costs nothing that its user does not ask for: no lock, no list
of callbacks and no condition of its own.

It is a concurrent.futures.Future in all that wait(), as_completed() and asyncio.wrap_future() use of one.
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
from shmserve.session import Ticket, inline_result

log = logging.getLogger("shmserve")

PENDING = "PENDING"
CANCELLED = "CANCELLED_AND_NOTIFIED"
FINISHED = "FINISHED"


class AnswerReader(Protocol):
    """What a future needs of the connection over which its answer comes (`transport.shared_reader`)."""

    uncollected: int
    collecting: bool

    @property
    def lock(self) -> AbstractContextManager[bool]: ...

    @property
    def condition(self) -> threading.Condition: ...

    def wait(self, future: Future, timeout: float | None) -> bool: ...

    def look(self, future: Future) -> None: ...

    def cancel(self, future: Future) -> None: ...

    def tell(self, future: Future) -> None: ...

    def need_reader(self, future: Future) -> None: ...


class Watch:
    """Who wants to be told, beside those who ask for the result."""

    __slots__ = ("callbacks", "counted", "gates", "waiters")

    def __init__(self) -> None:
        self.callbacks: list[Callable[[Any], object]] = []
        self.counted = False
        """A reading thread is needed for it."""
        self.gates: list[Any] = []
        """Locks on which threads wait for the result while another reads."""
        self.waiters: list[Any] = []
        """Those of concurrent.futures.wait() and as_completed()."""


class Future(Ticket, concurrent.futures.Future[Any]):
    """The result of a request: `result()` gives it. Dropping a future does not cancel the request; `cancel()` does."""

    _state = PENDING
    _result = None
    _exception: BaseException | None = None
    _answer: Any = None
    _watch: Watch | None = None

    def __init__(self, reader: AnswerReader) -> None:
        self._reader = reader

    # ------------------------------------------------------------------------------------ from the session

    def settle(self, answer: Any) -> None:
        self._answer = answer
        self._state = FINISHED
        if self._watch is not None:
            self._reader.tell(self)

    def fail(self, error: ServeError) -> None:
        self._exception = error
        self._state = FINISHED
        if self._watch is not None:
            self._reader.tell(self)

    # ------------------------------------------------------------------------------------ for the user

    def result(self, timeout: float | None = None) -> Any:
        """The result, when it is there. TimeoutError after `timeout` seconds: the request goes on."""
        if self._state is not FINISHED:
            self._wait(timeout)
        answer = self._answer
        if type(answer) is Reply:
            reader = self._reader
            reader.uncollected -= 1
            reader.collecting = True
            try:
                answer = self._answer = inline_result(answer)
            except ServeError as error:
                self._exception = error
        if self._exception is not None:
            try:
                raise self._exception
            finally:
                del self  # else the traceback and this future would keep each other
        return answer

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if self._state is not FINISHED:
            self._wait(timeout)
        return self._exception

    def _wait(self, timeout: float | None) -> None:
        if not self._reader.wait(self, timeout):
            raise concurrent.futures.TimeoutError
        if self._state is CANCELLED:
            raise concurrent.futures.CancelledError

    def done(self) -> bool:
        """Whether the answer is here. Sends what is still to be sent, and takes in what has come."""
        if self._state is PENDING:
            self._reader.look(self)
        return self._state is not PENDING

    def running(self) -> bool:
        return False

    def cancelled(self) -> bool:
        return self._state is CANCELLED

    def cancel(self) -> bool:
        """Takes the request back: the server drops it if it still waits. False: the answer is here already."""
        if self._state is PENDING:
            self._reader.cancel(self)
        return self._state is CANCELLED

    def mark_cancelled(self) -> None:
        self._state = CANCELLED
        if self._watch is not None:
            self._reader.tell(self)

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        """Calls `fn(self)` when the answer is here, in the thread that reads it; from now on there is one."""
        reader = self._reader
        with reader.lock:
            if self._state is PENDING:
                self.watch().callbacks.append(fn)
                reader.need_reader(self)
                return
        self._call(fn)

    def call_back(self) -> None:
        """Outside of any lock."""
        watch = self._watch
        while watch is not None and watch.callbacks:
            self._call(watch.callbacks.pop(0))

    def _call(self, fn: Callable[[Any], object]) -> None:
        try:
            fn(self)
        except Exception:
            log.exception("a callback of a future failed: %r", fn)

    def watch(self) -> Watch:
        """With the lock."""
        watch = self._watch
        if watch is None:
            watch = self._watch = Watch()
        return watch

    def __repr__(self) -> str:
        return f"<shmserve.Future {self._state.lower()}>"

    # ------------------------------------------------------------------------------------ for concurrent.futures

    @property
    def _condition(self) -> Any:  # type: ignore[override]
        """One for all futures of a client."""
        return self._reader.condition

    @property
    def _waiters(self) -> list[Any]:  # type: ignore[override]
        """Somebody is about to wait without asking us: a thread must read from now on."""
        with self._reader.lock:
            waiters = self.watch().waiters
            if self._state is PENDING:
                self._reader.need_reader(self)
            return waiters
