"""Requests that are answered in parts.

Invariant: more parts are requested only after some were handed to the caller, so a slow reader slows the model down
(backpressure) and the number of buffered parts is bounded.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from typing import Any

from shmserve.errors import InvalidRequest, ServeError
from shmserve.protocol.messages import Reply
from shmserve.session.decode import Result, inline_result
from shmserve.session.ticket import Ticket

WINDOW = 16
"""Default number of parts in flight."""
_LARGEST = 1 << 20


class StreamTicket(Ticket):
    """A request with any number of responses."""

    __slots__ = ("begun", "ended", "error", "handed", "parts", "window")

    def __init__(self, window: int = WINDOW) -> None:
        if isinstance(window, bool) or not isinstance(window, int) or not 0 < window <= _LARGEST:
            raise InvalidRequest(f"window={window!r}: the number of responses in flight must be from 1 to {_LARGEST}")
        self.number = 0
        self.window = window
        """Maximum number of parts in flight, or received and not yet handed out."""
        self.parts: deque[Result] = deque()
        self.handed = 0
        """Number of parts handed out since more were last requested."""
        self.begun = False
        """Whether a part was received, in which case the request cannot be resent."""
        self.ended = False
        self.error: ServeError | None = None
        """The error that ended the stream, or None. Parts received before it are handed out first."""

    @abstractmethod
    def on_part(self) -> None:
        """Notifies the caller of a new part or the end."""

    def part(self, result: Result | None, last: bool) -> None:
        self.begun = True
        self.ended = last
        if result is not None:
            self.parts.append(result)
        self.on_part()

    def hand_out(self) -> tuple[Result, int]:
        """The next part, and the number of further parts to request."""
        part = self.parts.popleft()
        self.handed += 1
        more = 0
        if not self.ended and self.handed >= (self.window + 1) // 2:
            more, self.handed = self.handed, 0
        return part, more

    def close(self) -> None:
        """Closes the stream on behalf of the caller."""
        self.parts.clear()
        self.error = None
        self.ended = True
        self.on_part()

    def settle(self, answer: Any) -> None:
        """Handles a single Reply instead of parts."""
        try:
            self.part(inline_result(answer) if isinstance(answer, Reply) else answer, True)
        except ServeError as error:
            self.fail(error)

    def fail(self, error: ServeError) -> None:
        self.error = error
        self.ended = True
        self.on_part()
