"""A fake of the connection and the link to the broker, as far as the OpenAI-compatible endpoints use them."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from shmserve.errors import ServeError, Unavailable
from shmserve.gateway.limits.turns import JobTurns
from shmserve.gateway.upstream.exchange import JSON
from tests.support.manual_loop import ManualLoop


class OpenAiCaller:
    """`room`: the number of requests that may be in flight. `sending`: called after each that was sent."""

    sending: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, room: int = 1000) -> None:
        self.room = room
        self.sending: Callable[[], None] = lambda: None
        """Called after each request that was sent."""
        self.head = SimpleNamespace(token="", forwarded=None)
        self.writable = True
        self.sent: list[bytes] = []
        self.begun = self.ended = False
        self.error: ServeError | None = None
        self.answered: Any = None
        self.tickets: list[Any] = []
        self.cancelled: list[Any] = []
        self.handed = 0
        self.viewer: Any = None
        self.resume: Any = None
        self.held: list[int] = []
        self.share = 1 << 30
        self.loop = ManualLoop()
        loop: Any = self.loop
        self.jobs = JobTurns(loop)
        self.link = SimpleNamespace(session=self, send_soon=lambda: None, cancel=self.cancelled.append)
        self.outbox = SimpleNamespace(messages=[])

    def payer(self) -> None: ...

    def watch(self, viewer: Any, resume: Any = None) -> None:
        self.viewer, self.resume = viewer, resume

    def begin_events(self, first: bytes) -> None:
        assert not self.begun
        self.begun = True
        if first:
            self.sent.append(first)

    def send_event(self, data: bytes) -> None:
        self.sent.append(data)

    def end_events(self, last: bytes) -> None:
        self.ended = True
        self.sent.append(last)

    def work(self, work: Any, then: Any, failed: Any = None) -> None:
        self.jobs.run(work, then, failed or self.fail)

    def hold(self, size: int) -> None:
        self.held.append(size)
        if sum(self.held) > self.share:
            raise Unavailable("over the share")

    def fail(self, error: Any) -> None:
        assert self.error is None, "it has been answered"
        self.error = error

    def answer(self, status: int, parts: list[bytes], kind: bytes = JSON) -> None:
        self.answered = json.loads(b"".join(parts))

    def infer(self, ticket: Any, *rest: Any) -> None:
        if sum(not getattr(one, "ended", False) for one in self.tickets) >= self.room:
            raise Unavailable("full")
        ticket.payer = None
        if not hasattr(ticket, "ended"):  # it expects one response
            ticket.check_reply_with(None)
        self.tickets.append(ticket)
        self.sending()

    def next_part(self, ticket: Any) -> Any:
        self.handed += 1
        return ticket.hand_out()[0]
