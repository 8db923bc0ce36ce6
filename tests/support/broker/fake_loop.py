"""The part of an event loop that the broker uses. Nothing happens before a test calls it."""

from __future__ import annotations

import queue
from collections.abc import Callable
from functools import partial
from typing import Any


class Timer:
    def __init__(self, after: float, call: Callable[[], None]) -> None:
        self.after = after
        self.call = call
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Loop:
    """A loop whose time advances only when a test fires a timer."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[Timer] = []
        self.readers: dict[int, Any] = {}

    def time(self) -> float:
        return self.now

    def call_later(self, after: float, call: Callable[..., None], *more: Any) -> Timer:
        self.timers.append(Timer(after, partial(call, *more)))
        return self.timers[-1]

    def add_reader(self, number: int, call: Any) -> None:
        self.readers[number] = call

    def remove_reader(self, number: int) -> None:
        self.readers.pop(number, None)

    def fire(self) -> float:
        """Runs the only timer, and returns its delay."""
        timer = self.timers.pop()
        assert not self.timers
        assert not timer.cancelled
        self.now += timer.after
        timer.call()
        return timer.after


class ThreadedLoop(Loop):
    """Takes the callbacks of other threads, and runs them when a test says so."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def call_soon_threadsafe(self, call: Callable[..., None], *arguments: Any) -> None:
        self._calls.put(partial(call, *arguments))

    def next_call(self) -> Callable[[], None]:
        return self._calls.get(timeout=60)

    def run_one(self) -> None:
        self.next_call()()
