"""Notifies the service manager that started the gateway: ready, reloading, stopping, and heartbeats.

Invariant: a timer of the gateway's own event loop sends WATCHDOG=1, so that a hung loop sends none.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from shmserve.system.service_manager import ServiceManager


class Service:
    def __init__(self, loop: asyncio.AbstractEventLoop, manager: ServiceManager) -> None:
        self._loop = loop
        self._manager = manager
        self._timer: asyncio.TimerHandle | None = None
        if manager.watchdog_s:
            self._beat()

    def ready(self, ports: Mapping[str, int]) -> None:
        """All listeners are open."""
        text = ", ".join(f"{endpoint} on port {port}" for endpoint, port in ports.items())
        self._manager.notify("READY=1", f"STATUS=listening: {text or 'no endpoints'}", once=True)

    def reloading(self) -> None:
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._manager.notify("RELOADING=1", f"MONOTONIC_USEC={now}", once=True)

    def stopping(self) -> None:
        self._manager.notify("STOPPING=1", "STATUS=finishing requests in flight", once=True)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._manager.close()

    def _beat(self) -> None:
        self._timer = self._loop.call_later(self._manager.watchdog_s / 2, self._beat)
        self._manager.notify("WATCHDOG=1")
