"""Requests that are answered in parts. The rule of the file: more parts are asked for only when some were handed to the
user, so that a slow reader slows the model down, and nobody keeps what nobody reads.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from shmserve.errors import InvalidRequest, ServeError
from shmserve.protocol.messages import Reply
from shmserve.session.decode import Result, inline_result
from shmserve.session.ticket import Ticket

WINDOW = 16
_LARGEST = 1 << 20


class StreamTicket(Ticket):
    """Subclasses say in `news` how their asker is told that there is a part, or the end."""

    __slots__ = ("begun", "ended", "error", "handed", "parts", "window")

    def __init__(self, window: int = WINDOW) -> None:
        if isinstance(window, bool) or not isinstance(window, int) or not 0 < window <= _LARGEST:
            raise InvalidRequest(f"window={window!r}: the number of parts on their way is from 1 to {_LARGEST}")
        self.number = 0
        self.window = window
        """So many parts may be on their way, or here and not handed out."""
        self.parts: deque[Result] = deque()
        self.handed = 0
        """Parts handed out since more were asked for."""
        self.begun = False
        """A part has come: the request cannot be sent again."""
        self.ended = False
        self.error: ServeError | None = None
        """Why it has ended, if not well. Parts that came before it are handed out first."""

    def news(self) -> None:
        raise NotImplementedError

    def part(self, result: Result | None, last: bool) -> None:
        self.begun = True
        self.ended = last
        if result is not None:
            self.parts.append(result)
        self.news()

    def hand_out(self) -> tuple[Result, int]:
        """The next part, and how many more are to be asked for."""
        part = self.parts.popleft()
        self.handed += 1
        more = 0
        if not self.ended and self.handed >= (self.window + 1) // 2:
            more, self.handed = self.handed, 0
        return part, more

    def give_up(self) -> None:
        """The asker has closed it."""
        self.parts.clear()
        self.error = None
        self.ended = True
        self.news()

    def settle(self, answer: Any) -> None:
        """From a server that answers once."""
        try:
            self.part(inline_result(answer) if type(answer) is Reply else answer, True)
        except ServeError as error:
            self.fail(error)

    def fail(self, error: ServeError) -> None:
        self.error = error
        self.ended = True
        self.news()
