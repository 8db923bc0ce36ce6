"""Progress and interruption of a build. The library calls back for both, from any thread.

Invariant: the display never blocks the build; it is one line on a terminal, and otherwise a line for each phase.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

TICK_S = 0.1
_CLEAR = "\r\x1b[K"


class Interrupted(Exception):
    """SIGINT or SIGTERM was received, and the build has ended."""


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Yields a function that returns whether SIGINT or SIGTERM was received. A build is one long call in which no
    Python handler runs, so the signal is detected through the wakeup descriptor, a pipe."""
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    came = False

    def look() -> bool:
        nonlocal came
        try:
            came = bool(os.read(reading, 64)) or came
        except BlockingIOError:
            return came
        return came

    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = [signal.signal(number, lambda *_: None) for number in numbers]  # the descriptor has recorded it
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield look
    finally:
        signal.set_wakeup_fd(before)
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)
        os.close(reading)
        os.close(writing)


class Progress:
    def __init__(self, trt: Any, interrupted: Callable[[], bool], quiet: bool = False) -> None:
        self._terminal = sys.stderr.isatty()
        self._quiet = quiet
        self._steps: dict[str, tuple[int, int]] = {}
        """By running phase: completed steps and all steps."""
        self._shown = 0.0
        self.monitor = _monitor(trt, self, interrupted)

    def begin(self, phase: str, parent: str | None, steps: int) -> None:
        self._steps[phase] = (0, steps)
        if not self._quiet and not self._terminal and not parent:
            print(f"{phase} ({steps} steps)", file=sys.stderr, flush=True)

    def step(self, phase: str, done: int) -> None:
        self._steps[phase] = (done, self._steps.get(phase, (0, done))[1])
        now = time.monotonic()
        if self._terminal and not self._quiet and now - self._shown >= TICK_S:
            self._shown = now
            line = "  ".join(f"{name} {part}/{whole}" for name, (part, whole) in list(self._steps.items())[:3])
            print(f"{_CLEAR}{line[:100]}", end="", file=sys.stderr, flush=True)

    def finish(self, phase: str) -> None:
        self._steps.pop(phase, None)

    def end(self) -> None:
        if self._terminal and not self._quiet:
            print(_CLEAR, end="", file=sys.stderr, flush=True)


def _monitor(trt: Any, progress: Progress, interrupted: Callable[[], bool]) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            progress.begin(phase_name, parent_phase, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            progress.step(phase_name, step + 1)
            return not interrupted()

        def phase_finish(self, phase_name: str) -> None:
            progress.finish(phase_name)

    return Monitor()
