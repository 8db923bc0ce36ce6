"""An event loop that runs its callbacks when the test tells it to, and whose time the test advances."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from tests.support.patience import PATIENCE_S

Callback = Callable[[], Any]


class Timer:
    def __init__(self, loop: ManualLoop, when: float, delay: float, callback: Callback) -> None:
        self.loop, self.when, self.delay, self.callback = loop, when, delay, callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True
        if self in self.loop.timers:
            self.loop.timers.remove(self)


class ManualLoop:
    def __init__(self) -> None:
        self.soon: deque[Callback] = deque()
        """Callbacks of the next iteration."""
        self.timers: list[Timer] = []
        self.readers: dict[int, Any] = {}
        self.now = 0.0

    def call_soon(self, callback: Callback) -> None:
        self.soon.append(callback)

    def call_soon_threadsafe(self, callback: Callable[..., Any], *arguments: Any) -> None:
        self.soon.append(partial(callback, *arguments))

    def is_closed(self) -> bool:
        return False

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callback) -> Timer:
        self.timers.append(Timer(self, when, when - self.now, callback))
        return self.timers[-1]

    def call_later(self, delay: float, callback: Callable[..., Any], *arguments: Any) -> Timer:
        self.timers.append(Timer(self, self.now + delay, delay, partial(callback, *arguments)))
        return self.timers[-1]

    def add_reader(self, number: int, callback: Any) -> None:
        self.readers[number] = callback

    def remove_reader(self, number: int) -> None:
        self.readers.pop(number, None)

    def iterate(self) -> None:
        """Runs the callbacks that are ready now, as one iteration of an event loop does."""
        for _ in range(len(self.soon)):
            self.soon.popleft()()

    def run(self) -> int:
        """Iterates until no callback is left. Returns the number of iterations."""
        iterations = 0
        while self.soon:
            self.iterate()
            iterations += 1
        return iterations

    def advance(self, seconds: float) -> None:
        """Runs the timers that expire in this time, each with the callbacks that it adds."""
        until = self.now + seconds
        while due := [timer for timer in self.timers if timer.when <= until]:
            timer = min(due, key=lambda timer: timer.when)
            self.timers.remove(timer)
            self.now = max(self.now, timer.when)
            timer.callback()
            self.run()
        self.now = until

    def fire(self) -> float:
        """Runs the only timer, and returns its delay."""
        (timer,) = self.timers
        self.timers.clear()
        self.now = timer.when
        timer.callback()
        return timer.delay


class ThreadedLoop(ManualLoop):
    """Takes the callbacks of other threads, and runs them when a test says so."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: queue.SimpleQueue[Callback] = queue.SimpleQueue()

    def call_soon_threadsafe(self, callback: Callable[..., Any], *arguments: Any) -> None:
        self._calls.put(partial(callback, *arguments))

    def next_call(self) -> Callback:
        return self._calls.get(timeout=PATIENCE_S)

    def run_one(self) -> None:
        self.next_call()()
