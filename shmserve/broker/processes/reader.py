"""Reads values in a thread, from time to time, and hands them to the event loop."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class PeriodicReader(Generic[T]):
    """`begin` returns what the thread runs, or None if there is nothing to read. `handle` gets the result. `pause`
    returns the seconds until the next reading."""

    def __init__(
        self,
        loop: Any,
        name: str,
        begin: Callable[[], Callable[[], T] | None],
        handle: Callable[[T], None],
        pause: Callable[[], float],
    ) -> None:
        self._loop = loop
        self._begin = begin
        self._handle = handle
        self._pause = pause
        self._thread = ThreadPoolExecutor(1, name)
        self._reading = self._read_again = self._closed = False
        self._timer = loop.call_later(pause(), self.read)

    def read(self) -> None:
        """Reads now, or once more after the reading in progress."""
        self._timer.cancel()
        if self._closed:
            return
        if self._reading:
            self._read_again = True
            return
        work = self._begin()
        if work is None:
            self.read_later(self._pause())
            return
        self._reading = True
        reading = self._thread.submit(work)
        reading.add_done_callback(partial(self._loop.call_soon_threadsafe, self._has_read))

    def read_later(self, seconds: float) -> None:
        """Reads after this time, unless a reading is in progress."""
        if not self._reading:
            self._timer.cancel()
            self._timer = self._loop.call_later(seconds, self.read)

    def close(self) -> None:
        self._closed = True
        self._timer.cancel()
        self._thread.shutdown()

    def _has_read(self, reading: Future[T]) -> None:
        self._reading = False
        if self._closed:
            return
        try:
            self._handle(reading.result())
        finally:  # read again even after a failure
            if self._read_again:
                self._read_again = False
                self.read()
            else:
                self.read_later(self._pause())
