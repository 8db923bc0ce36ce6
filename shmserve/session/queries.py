"""Queries, which change nothing, and operations, which do. Both are answered with JSON.

Invariant: a question may be resent over a new connection; an operation is never resent once any part of it was sent.

A body may be hundreds of megabytes. It is read as it is sent, with backpressure: a Ping follows every WINDOW_BYTES, and
at most WINDOWS pings may be unanswered.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from shmserve.errors import ConnectionLost, Internal, ServeError
from shmserve.protocol import codec
from shmserve.protocol.messages import FIELD_BYTES, Answer, Ask, Cancel, Ping
from shmserve.protocol.roles import OPERATIONS
from shmserve.session.outbox import Packet, SessionOutbox
from shmserve.session.ticket import Ticket
from shmserve.session.typed import TypedModels
from shmserve.session.uploads import Body

WINDOW_BYTES = 8 * FIELD_BYTES
WINDOWS = 2
TOGETHER = 2
"""Number of pieces of FIELD_BYTES that fit in one packet."""


class _Operation(Struct, eq=False):
    """`begun` and `complete`: whether a part of it, and all of it, was sent."""

    ask: Ask
    body: Body
    begun: bool = False
    complete: bool = False


class SessionQueries:
    """Pending queries and operations. `tickets` and `outbox` are the session's."""

    def __init__(self, tickets: dict[int, Ticket], outbox: SessionOutbox) -> None:
        self._tickets = tickets
        self._outbox = outbox
        self._answers: dict[int, list[bytes]] = {}
        """Request number -> the parts of its answer received so far."""
        self._operations: dict[int, _Operation] = {}
        self.to_send: deque[_Operation] = deque()
        self.typed = TypedModels()
        self._window = WINDOW_BYTES
        """Bytes of bodies that may still be sent before the next Ping."""
        self._unanswered = 0
        """Number of unanswered pings."""

    @property
    def operating(self) -> bool:
        """Whether an operation is in flight."""
        return bool(self._operations)

    # ------------------------------------------------------------------------------------ sending

    def put(self, ask: Ask, body: Body | None) -> None:
        if ask.what in OPERATIONS:
            operation = self._operations[ask.request] = _Operation(ask, body or Body())
            self.to_send.append(operation)
        else:
            if body is not None:  # the arguments of a question are short
                ask.body = bytes(body.take())
            self._outbox.queue(ask)

    def put_again(self, ask: Ask) -> None:
        """Resends a question on a new connection. Operations are still queued."""
        if ask.request not in self._operations:
            self._outbox.queue(ask)

    def packets(self, fail: Callable[[Ticket, ServeError], None]) -> list[Packet]:
        """The packets of operations that may be sent now. `fail` fails an operation whose body cannot be read."""
        packets: list[Packet] = []
        while self.to_send and self._unanswered < WINDOWS:
            operation = self.to_send[0]
            try:
                messages = self._pieces(operation)
            except ServeError as error:
                fail(self._tickets[operation.ask.request], error)
                continue
            if operation.complete:
                self.to_send.popleft()
            if self._window <= 0:
                self._window = WINDOW_BYTES
                self._unanswered += 1
                messages.append(Ping(self._unanswered))
            packets.append(Packet(codec.encode(messages)))
        return packets

    def _pieces(self, operation: _Operation) -> list[Any]:
        """The messages of one packet. They count as sent once they are returned."""
        messages: list[Any] = []
        ask = operation.ask
        while len(messages) < TOGETHER and not operation.complete:
            piece = operation.body.take()
            more = operation.body.remaining > 0
            self._window -= len(piece)
            if operation.begun:
                messages.append(Ask(ask.request, "", "", 0, piece, more))
            else:
                messages.append(Ask(ask.request, ask.what, ask.model, ask.version, piece, more))
            operation.begun = True
            operation.complete = not more
        return messages

    # ------------------------------------------------------------------------------------ receiving

    def on_answer(self, message: Answer) -> int:
        """Returns the number of settled tickets."""
        number = message.request
        parts = self._answers.setdefault(number, [])
        parts.append(message.body)
        if message.more:
            return 0
        waiting = self.typed.take(number)
        self.withdraw(number)
        ticket = self._tickets.pop(number, None)
        if ticket is None:
            return 0
        ticket.message = None
        try:
            answer = json.loads(b"".join(parts))
        except ValueError as error:
            ticket.fail(Internal(f"the server's response is not JSON: {error}"))
        else:
            if waiting is not None:
                return self.typed.answered(waiting, ticket, answer)
            ticket.settle(answer)
        return 1

    def on_pong(self) -> bool:
        """Whether an operation can now continue."""
        self._unanswered = max(0, self._unanswered - 1)
        return bool(self.to_send)

    # ------------------------------------------------------------------------------------ ending

    def withdraw(self, number: int) -> bool:
        """Forgets a question or operation. True: it was an operation that had not been sent completely, so no answer
        will come.
        """
        self._answers.pop(number, None)
        self.typed.take(number)
        operation = self._operations.pop(number, None)
        if operation is None or operation.complete:
            return False
        operation.body.close()
        self.to_send.remove(operation)
        if operation.begun:
            self._outbox.queue(Cancel(number))
        return True

    def timeout_text(self, number: int) -> str:
        """Error text for a passed deadline."""
        operation = self._operations.get(number)
        if operation is None:
            return "the server did not respond within the timeout"
        what = f"'{operation.ask.what}' of model '{operation.ask.model}'"
        if operation.complete:
            return f"{what} did not finish within its timeout; the server continues it"
        return f"{what} could not be sent within its timeout; nothing was changed"

    def disconnected(self) -> None:
        self._answers.clear()
        self._window = WINDOW_BYTES
        self._unanswered = 0

    def lost_error(self, ask: Ask, why: ServeError | None) -> ConnectionLost | None:
        """The error for an operation when the connection ends. None: it is resent over the next one."""
        operation = self._operations.get(ask.request)
        if operation is None or not operation.begun:
            return None
        ended = f"the connection ended{f' ({why})' if why is not None else ''} before"
        what = f"'{ask.what}' of model '{ask.model}'"
        if operation.complete:
            return ConnectionLost(f"{ended} {what} completed; it may have taken effect: check the models")
        return ConnectionLost(f"{ended} {what} was sent completely; nothing was changed")

    def close(self) -> None:
        """Closes all bodies in a forked child; the parent sends them."""
        for operation in self._operations.values():
            operation.body.close()
