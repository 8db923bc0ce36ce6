"""An event loop that runs its callbacks when the test tells it to, and whose time the test advances."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

Callback = Callable[[], Any]


class Timer:
    def __init__(self, loop: ManualLoop, when: float, callback: Callback) -> None:
        self.loop, self.when, self.callback = loop, when, callback

    def cancel(self) -> None:
        self.loop.timers.remove(self)


class ManualLoop:
    def __init__(self) -> None:
        self.soon: deque[Callback] = deque()
        """Callbacks of the next iteration."""
        self.timers: list[Timer] = []
        self.now = 0.0

    def call_soon(self, callback: Callback) -> None:
        self.soon.append(callback)

    call_soon_threadsafe = call_soon

    def is_closed(self) -> bool:
        return False

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callback) -> Timer:
        self.timers.append(Timer(self, when, callback))
        return self.timers[-1]

    def call_later(self, delay: float, callback: Callback) -> Timer:
        return self.call_at(self.now + delay, callback)

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
            timer.cancel()
            self.now = max(self.now, timer.when)
            timer.callback()
            self.run()
        self.now = until
