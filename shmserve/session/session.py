"""The client half of the protocol, without I/O: no sockets, no clock, no threads.

`infer`, `ask` and `cancel` queue messages; `take` returns the packets to send; `receive` processes an incoming packet
and settles tickets. Invariant: the owner of the session serialises all calls. The exceptions are `forget` and dropped
arrays, which the garbage collector may cause in any thread at any time.

A request is kept until it is answered, so that it can be resent over a new connection. After it was cancelled or has
expired, its inputs are kept until the server reports that it no longer reads them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shmserve.errors import (
    Cancelled,
    ConnectionLost,
    DeadlineExceeded,
    HandleLost,
    Internal,
    ProtocolError,
    ServeError,
    from_wire,
)
from shmserve.protocol import codec
from shmserve.protocol.messages import (
    FRAME_BYTES,
    NAME_LENGTH,
    PROTOCOL,
    Answer,
    Ask,
    BrokerMessage,
    Bye,
    Cancel,
    Fail,
    FailHeld,
    Goodbye,
    Hello,
    Infer,
    Map,
    More,
    Part,
    Ping,
    Pong,
    Reclaim,
    Released,
    Reply,
    Unmap,
    Welcome,
)
from shmserve.session.deadlines import Deadlines
from shmserve.session.decode import Result, give_back, result_of
from shmserve.session.encode import (
    Encoder,
    check_name,
    check_size,
    options_of,
    timeout_us_of,
    version_of,
    wanted_of,
)
from shmserve.session.memory import SessionMemory
from shmserve.session.outbox import Packet, SessionOutbox
from shmserve.session.queries import Queries
from shmserve.session.resend import LOADED, Resume, renew, send_again
from shmserve.session.staging import once_more, settle
from shmserve.session.streams import StreamTicket
from shmserve.session.ticket import Abandoned, KeptInputs, Ticket
from shmserve.session.uploads import Body

log = logging.getLogger("shmserve")

GRACE_S = 0.1
"""The server enforces the deadline of a request; the client itself gives up this much later."""


class Session:
    """`memory`: memfd, posix or frames (the `kind` of SessionMemory, which also explains `cold`). `on_full` is called,
    possibly inside the garbage collector, when returns of dropped arrays or cancellations should be sent soon.
    """

    def __init__(
        self,
        memory: str = "memfd",
        *,
        memory_bytes: int = 8 << 30,
        frame_bytes: int = FRAME_BYTES,
        on_full: Callable[[], object] | None = None,
        cold: bool = False,
    ) -> None:
        self.memory = SessionMemory(memory, memory_bytes, on_full, frame_bytes, cold)
        self.tickets: dict[int, Ticket] = {}
        self.connected = False
        self.server = ""
        self.limits: dict[str, int] = {}
        self.goodbye: ServeError | None = None
        """The error with which the server ended the connection, if it sent one. `receive` raises it once."""
        self.outbox = SessionOutbox(self.memory, self.tickets)
        """Queued messages, which `take` packs."""
        self.urgent = False
        """Call `take` soon, even if no user calls anything: for a Pong, for returns after Reclaim, and the like."""
        self._encoder = Encoder(self.memory)
        self._tensors = self._encoder.tensors
        self._result_of = result_of
        """Converts a reply or part to the caller's result. `receive` handles simple replies without it."""
        self._decode = codec.Codec(BrokerMessage).decode
        self._number = 0
        self._held: dict[int, KeptInputs] = {}
        """Number of a failed request -> its inputs, which the server still reads (FailHeld to Released)."""
        self._behind: list[int] = []
        """Requests to resend once the new server has loaded its models, and requests of sequences that follow them."""
        self.questions = Queries(self.tickets, self.outbox)
        self._operations = self.questions.to_send
        self._nudge = on_full
        self._deadlines = Deadlines(self.tickets)
        self.forgotten: deque[Ticket] = deque()
        """Streams whose caller was dropped; the next `take` cancels them."""

    # ------------------------------------------------------------------------------------ questions

    def infer(
        self,
        ticket: Ticket,
        model: str,
        inputs: Mapping[str, Any],
        now: float,
        outputs: Any = None,
        version: int | str | None = None,
        timeout: float | None = None,
        priority: int | None = None,
        sequence: int | str | None = None,
        sequence_start: bool = False,
        sequence_end: bool = False,
        parameters: Mapping[str, Any] | None = None,
        request_id: str | None = None,
        window: int = 0,
        caller: str = "",
    ) -> None:
        """Queue a request. Raises InvalidRequest, without side effects, if it cannot be encoded.

        `now` is the time of the monotonic clock, used only with `timeout`. `window` is that of a StreamTicket, 0 for
        other tickets. `caller` is for clients that serve several users: a sequence belongs to one of them.
        """
        timeout_us = 0 if timeout is None else timeout_us_of(timeout)
        tensors, kept, size = self._tensors(inputs)
        self._number = number = self._number + 1
        if (
            outputs is None and version is None and priority is None and sequence is None and parameters is None
            and request_id is None and not sequence_start and not sequence_end and not window and len(tensors) < 16
            and type(model) is str and len(model) <= NAME_LENGTH
        ):  # fmt: skip
            message = Infer(number, model, 0, tensors)
        else:
            if outputs is not None and kept is None:
                kept = KeptInputs()
            try:
                check_name("model", model)
                options = options_of(
                    priority, sequence, sequence_start, sequence_end, parameters, request_id, window, caller
                )
                wanted = (
                    None if outputs is None or kept is None else wanted_of(outputs, kept, self._encoder, not window)
                )
                message = Infer(number, model, version_of(version), tensors, wanted, 0, options)
                check_size(message)
            except BaseException:
                if kept is not None:
                    self.memory.release_inputs(kept)
                raise
        ticket.deadline = None
        if timeout_us:
            message.timeout_us = timeout_us
            ticket.deadline = now + timeout_us * 1e-6 + GRACE_S
            self._deadlines.add(ticket.deadline, number)
        if kept is not None and kept.devices is not None:
            settle(message, kept, self.memory)
        ticket.number = number
        ticket.kept = kept
        ticket.message = message
        outbox = self.outbox
        if kept is not None and kept.frames:
            outbox.framed = True
        self.tickets[number] = ticket
        if self._behind and message.options is not None and message.options.sequence:
            self._behind.append(number)  # after the earlier requests of its sequence, which are not resent yet
            return
        outbox.messages.append(message)
        outbox.size += size + 64

    def ask(
        self,
        ticket: Ticket,
        what: str,
        now: float,
        model: str = "",
        version: int | str | None = None,
        timeout: float | None = None,
        body: Body | None = None,
    ) -> None:
        """Queue a question or an operation; the ticket is settled with the parsed JSON of the answer."""
        check_name("model", model)
        number_of_version = version_of(version)
        self._number = number = self._number + 1
        message = Ask(number, what, model, number_of_version)
        ticket.number = number
        ticket.kept = None
        ticket.message = message
        ticket.deadline = None
        if timeout is not None:
            ticket.deadline = now + timeout_us_of(timeout) * 1e-6
            self._deadlines.add(ticket.deadline, number)
        self.tickets[number] = ticket
        self.questions.put(message, body)

    def cancel(self, ticket: Ticket) -> bool:
        """Cancel a request, question or operation. False: it was already answered. The ticket is not notified."""
        if self.tickets.get(ticket.number) is not ticket:
            return False
        if isinstance(ticket.message, Infer):
            self.outbox.queue(Cancel(ticket.number))
        elif self.questions.ended(ticket.number):
            del self.tickets[ticket.number]
            ticket.message = None
            return True
        self.tickets[ticket.number] = Abandoned(ticket.number, ticket.kept)
        ticket.message = None
        ticket.kept = None
        return True

    def expire(self, ticket: Ticket) -> None:
        """Cancel a ticket whose deadline has passed, and fail it."""
        message = ticket.message
        if isinstance(message, Infer):
            what = "respond" if not isinstance(ticket, StreamTicket) else "complete its responses"
            text = f"model '{message.model}' did not {what} within the timeout of {message.timeout_us / 1e6:g} s"
        else:
            text = self.questions.late(ticket.number)
        if self.cancel(ticket):
            ticket.fail(DeadlineExceeded(text))

    # ------------------------------------------------------------------------------------ deadlines

    def deadline(self) -> float | None:
        """When `tick` is next due."""
        return self._deadlines.next()

    def tick(self, now: float) -> None:
        """Expire tickets whose deadline has passed."""
        while (ticket := self._deadlines.due(now)) is not None:
            self.expire(ticket)

    # ------------------------------------------------------------------------------------ sending

    @property
    def has_returns(self) -> bool:
        return bool(self.memory.drops or self.forgotten)

    def take(self) -> list[Packet]:
        """The packets to send now, in order. They include returns of outputs whose arrays were dropped."""
        self.urgent = False
        while self.forgotten:
            self.cancel(self.forgotten.popleft())
        if self._operations:
            return self.questions.packets(self._end) + self.outbox.take()
        return self.outbox.take()

    # ------------------------------------------------------------------------------------ receiving

    def receive(self, data: Any, descriptors: Sequence[int] = (), frames: Sequence[Any] = ()) -> int:
        """Process one packet; returns the number of settled tickets. After an error the connection is unusable."""
        settled = 0
        pop = self.tickets.pop
        if descriptors:
            self.memory.map_all(self._decode, data, descriptors)
        for message in self._decode(data):
            if type(message) is Reply:
                ticket = pop(message.request, None)
                if ticket is None:
                    give_back(message, self.memory)
                    continue
                settled += 1
                if ticket.kept is not None:
                    self._settle_slowly(ticket, message, frames)
                    continue
                for tensor in message.outputs:
                    if type(tensor.data) is not bytes:
                        self._settle_slowly(ticket, message, frames)
                        break
                else:
                    ticket.message = None
                    ticket.settle(message)
            elif type(message) is Part:
                self._on_part(message, frames)
            else:
                settled += _HANDLERS[type(message)](self, message)
        return settled

    def _settle_slowly(self, ticket: Ticket, reply: Reply, frames: Sequence[Any]) -> None:
        """Settle a request that has kept inputs, or outputs that are not inline. Arrays are created at once, because
        dropping them is what returns the memory to the server."""
        kept, ticket.kept = ticket.kept, None
        ticket.message = None
        try:
            result = self._result_of(reply, frames, kept.places if kept is not None else {}, self.memory)
        except ServeError as error:
            ticket.fail(error.with_traceback(None))  # the traceback would keep the ticket and the caller's arrays alive
        else:
            ticket.settle(result)
        finally:
            if kept is not None:
                self.memory.release_inputs(kept)

    # ------------------------------------------------------------------------------------ streams

    def _on_part(self, part: Part, frames: Sequence[Any]) -> None:
        ticket = self.tickets.get(part.request)
        if part.last and ticket is not None:
            self._forget(ticket)
        if not isinstance(ticket, StreamTicket):
            give_back(part, self.memory)
            return
        try:
            result = self._result_of(part, frames, {}, self.memory) if part.outputs or not part.last else None
        except ServeError as error:
            self.cancel(ticket)
            ticket.fail(error.with_traceback(None))
            return
        ticket.part(result, part.last)

    def forget(self, ticket: StreamTicket) -> None:
        """Cancel a stream whose caller was dropped, with the next `take`. May be called in any thread, inside the
        garbage collector.
        """
        self.forgotten.append(ticket)
        if self._nudge is not None:
            self._nudge()

    def next_part(self, ticket: StreamTicket) -> Result:
        """Return the next received part. Requests more parts from the server if half of the window is used."""
        part, more = ticket.hand_out()
        if more and self.connected:
            self.outbox.queue(More(ticket.number, more))
        return part

    def _on_fail(self, message: Fail) -> int:
        if message.request == 0:
            # It refers to no request. After a protocol error, a whole packet with unknown requests was refused.
            log.error("the server rejected a message of this client: %s", message.text)
            if message.code != ProtocolError.code:
                return 0
            return self.fail_all(Internal(f"the server rejected a packet of this client: {message.text}"))
        ticket = self.tickets.get(message.request)
        if ticket is None:
            return 0
        if message.code == HandleLost.code and once_more(ticket, self.memory):
            self.outbox.queue(ticket.message)
            self.urgent = True
            return 0
        self._forget(ticket)
        ticket.fail(from_wire(message.code, message.text))
        return 1

    def _on_fail_held(self, message: FailHeld) -> int:
        ticket = self.tickets.pop(message.request, None)
        if ticket is None:
            return 0
        if ticket.kept is not None:
            self._held[message.request] = ticket.kept
            ticket.kept = None
        ticket.message = None
        ticket.fail(from_wire(message.code, message.text))
        return 1

    def _on_released(self, message: Released) -> int:
        kept = self._held.pop(message.request, None)
        if kept is not None:
            self.memory.release_inputs(kept)
        return 0

    def _on_reclaim(self, message: Reclaim) -> int:
        self.urgent = True
        return 0

    def _on_ping(self, message: Ping) -> int:
        self.outbox.queue(Pong(message.number))
        self.urgent = True
        return 0

    def _on_pong(self, message: Pong) -> int:
        self.urgent |= self.questions.on_pong()
        return 0

    def _on_refused(self, message: codec.Refused) -> int:
        """Handle an undecodable message of the server: fail its request, or the connection if the request is
        unknown."""
        if not message.request:
            raise ProtocolError(f"the server sent an invalid message: {message.text}")
        return self._on_fail(Fail(message.request, Internal.code, message.text))

    # ------------------------------------------------------------------------------------ connections

    def hello(self, pid: int, name: str) -> Packet:
        """The first packet of a connection. Send nothing else until `connected` is true."""
        self.connected = False
        self.goodbye = None
        return Packet(codec.encode([Hello(PROTOCOL, pid, name[:128], self.memory.kind)]))

    def _on_welcome(self, message: Welcome) -> int:
        if message.protocol != PROTOCOL:
            raise ProtocolError(f"the server speaks protocol {message.protocol}, this client {PROTOCOL}")
        first, self.server = not self.server, message.server
        self.limits = message.limits
        numbers = self.memory.connected(message.owner, message.limits)
        self.connected = True
        self.outbox.clear()
        for ticket in [self.tickets[number] for number in sorted(self.tickets)]:
            if ticket.message is None:
                self._forget(ticket)  # cancelled, and unknown to the new server
            elif isinstance(ticket.message, Ask):
                self.questions.put_again(ticket.message)
        self._behind = renew(self.tickets, numbers, self.memory)
        if self._behind and not first:
            self.ask(Resume(self._send_again), LOADED, 0.0)
        elif self._behind:
            self._send_again()
        return 0

    def _send_again(self) -> None:
        self.urgent = True
        numbers, self._behind = self._behind, []
        for ticket in send_again(numbers, self.tickets, self.outbox):
            self._forget(ticket)

    def _on_goodbye(self, message: Goodbye) -> int:
        if message.code == ConnectionLost.code:  # a different server behind the same ZeroMQ socket
            raise ConnectionLost(message.text)
        self.goodbye = from_wire(message.code, message.text)
        raise from_wire(message.code, message.text)

    def disconnected(self) -> None:
        """Handle a disconnect. Questions, requests without a sequence, and operations that were not begun are kept for
        resending; requests of sequences, begun operations and begun streams fail.
        """
        self.connected = False
        self.outbox.clear()
        self.questions.disconnected()
        self.memory.disconnected()
        for number in sorted(self.tickets):
            ticket = self.tickets[number]
            message = ticket.message
            if message is None or isinstance(ticket, Resume):
                self._forget(ticket)
            elif isinstance(message, Ask):
                lost = self.questions.lost(message, self.goodbye)
                if lost is not None:
                    self._end(ticket, lost)
            elif message.options is not None and message.options.sequence:
                text = f"the connection ended in the middle of sequence {message.options.sequence}; start it again"
                self._end(ticket, ConnectionLost(text))
            elif isinstance(ticket, StreamTicket) and ticket.begun:
                self._end(ticket, ConnectionLost("the connection ended during the responses; send the request again"))
        for kept in self._held.values():
            self.memory.release_inputs(kept)
        self._held.clear()

    def fail_all(self, error: ServeError) -> int:
        """Fail all tickets, as no answer will come."""
        count = len(self.tickets)
        for ticket in list(self.tickets.values()):
            self._end(ticket, error)
        return count

    def _end(self, ticket: Ticket, error: ServeError) -> None:
        self._forget(ticket)
        ticket.fail(type(error)(str(error)))  # an exception of its own: raising one adds a traceback to it

    def _forget(self, ticket: Ticket) -> None:
        """Remove a ticket, and release its inputs and its operation's body."""
        self.tickets.pop(ticket.number, None)
        self.urgent |= self.questions.ended(ticket.number)
        if ticket.kept is not None:
            self.memory.release_inputs(ticket.kept)
            ticket.kept = None
        ticket.message = None

    def bye(self) -> Packet:
        """The last packet of a connection."""
        return Packet(codec.encode([Bye()]))

    def close(self) -> None:
        """Fail all unanswered tickets and close the memory. Arrays that callers have stay valid."""
        self.fail_all(Cancelled("the client was closed before the response arrived"))
        self.memory.close()


_HANDLERS: dict[type, Callable[[Session, Any], int]] = {
    Fail: lambda session, message: session._on_fail(message),
    FailHeld: Session._on_fail_held,
    Released: Session._on_released,
    Answer: lambda session, message: session.questions.on_answer(message),
    Map: lambda session, message: session.memory.on_map(message),
    Unmap: lambda session, message: session.memory.on_unmap(message),
    Reclaim: Session._on_reclaim,
    Ping: Session._on_ping,
    Pong: Session._on_pong,
    Welcome: lambda session, message: session._on_welcome(message),
    Goodbye: Session._on_goodbye,
    codec.Refused: Session._on_refused,
}
"""Message type -> handler, which returns the number of settled tickets. Lambdas look the method up when called, so that
GatewaySession can override it."""
