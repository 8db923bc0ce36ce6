"""An event loop that runs its callbacks when the test tells it to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any


class ManualLoop:
    def __init__(self) -> None:
        self.soon: deque[Callable[[], Any]] = deque()
        """Callbacks of the next iteration."""

    def call_soon(self, callback: Callable[[], Any]) -> None:
        self.soon.append(callback)

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
