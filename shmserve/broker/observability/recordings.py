"""The operation `record`: an operator records all requests and batches for some time, and reads the records while they
are made.

Invariant: at most one recording exists, and it ends if it is not read for EXPIRES_S.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from shmserve.broker.observability.logs import log_record
from shmserve.core.owners.recording import Recording
from shmserve.core.state import State
from shmserve.errors import InvalidRequest, NotFound, Unavailable
from shmserve.protocol.bodies import decode_body

UNREAD = 100_000
"""Maximum number of unread requests in a recording, about 40 MB."""
PAGE = 2000
"""Approximate maximum number of requests in one answer."""
EXPIRES_S = 10.0


class _Order(Struct, forbid_unknown_fields=True):
    """The body of the operation. `do`: start, read or stop. `recording`: number of the recording to read or stop."""

    do: str
    models: list[str] = []
    recording: int = 0


class Recordings:
    def __init__(self, loop: Any, state: State, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._loop = loop
        self._state = state
        self._clock = clock
        self._number = 0
        self._timer: Any = None
        self._recording: Recording | None = None
        """The current recording. After stopping it, its client still reads the remaining records."""

    def change(self, body: bytes) -> dict[str, Any]:
        """Carries out the order in `body`. Returns the answer."""
        order: _Order = decode_body(body, _Order, "'record'")
        if order.do == "start":
            return self._start(order.models)
        if order.do not in ("read", "stop"):
            raise InvalidRequest(
                f"unknown value of 'do' in the body of 'record': '{order.do[:80]}'; expected start, read or stop"
            )
        recording = self._recording
        if recording is None or order.recording != self._number:
            raise NotFound(
                f"recording {order.recording} has ended: it was not read for {EXPIRES_S:g} s, or was stopped; start "
                "another"
            )
        if order.do == "stop":
            self._state.observers.stop_recording()
        answer = recording.take(PAGE)
        if order.do == "stop" and not answer["more"]:
            self._end()
        else:
            self._expect_reader()
        return self._about() | answer

    def _start(self, models: list[str]) -> dict[str, Any]:
        if self._recording is not None:
            raise Unavailable(
                f"another recording is running; it ends when its client stops it, or {EXPIRES_S:g} s after its client "
                "has last read it. Try again then"
            )
        for name in models:
            if name not in self._state.models:
                raise NotFound(f"Request for unknown model: '{name}' is not found")
        self._number += 1
        self._recording = self._state.observers.record(models, UNREAD)
        self._expect_reader()
        log_record("info", f"recording {self._number} of requests and batches has started")
        return self._about()

    def _about(self) -> dict[str, Any]:
        return {"recording": self._number, "time_ns": self._clock()}

    def _expect_reader(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(EXPIRES_S, self._end)

    def _end(self) -> None:
        self._timer.cancel()
        self._timer = self._recording = None
        self._state.observers.stop_recording()
        log_record("info", f"recording {self._number} of requests and batches has ended")
