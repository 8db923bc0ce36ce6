"""Asks a model whether it is ready."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from shmserve.workers.process.log import log_message

PENDING_PROBES = 1024
"""Limit of probes that wait for the result of `is_ready`. Beyond it, the oldest are dropped; they have timed out."""


class ReadinessCalls:
    """Calls `is_ready`, the model's own check, in a separate thread, because the main thread may be running the model.
    Only one call runs at a time; its result answers all probes that arrived during the call."""

    def __init__(self, is_ready: Callable[[], bool]) -> None:
        self._is_ready = is_ready
        self._lock = threading.Lock()
        self._pending: deque[Callable[[bool], None]] = deque(maxlen=PENDING_PROBES)

    def add(self, report: Callable[[bool], None]) -> None:
        with self._lock:
            if not self._pending:
                try:
                    threading.Thread(target=self._run, name="is_ready", daemon=True).start()
                except RuntimeError as error:  # at the limit of threads
                    log_message(f"is_ready cannot be called: {error}")
                    return
            self._pending.append(report)

    def _run(self) -> None:
        ready = self._is_ready()
        with self._lock:
            pending = list(self._pending)
            self._pending.clear()
        for report in pending:
            report(ready)
