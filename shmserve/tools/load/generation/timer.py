"""A timer with the kernel's precision: an event loop's own timers have a resolution of one millisecond."""

from __future__ import annotations

import asyncio
import ctypes
import os
import time

_MONOTONIC = 1
_ABSOLUTE = 1
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC
SECOND = 1_000_000_000


class _Times(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in ("interval_s", "interval_ns", "value_s", "value_ns")]


class Timer:
    """Waits for times of CLOCK_MONOTONIC, one at a time."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.timerfd_create(_MONOTONIC, _FLAGS)
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
