"""The sending half of a session: queues requests, queries and operations, and cancels or expires them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from shmserve.errors import DeadlineExceeded, ServeError
from shmserve.protocol.messages import NAME_LENGTH, Ask, Cancel, Infer, Tensor
from shmserve.session.arguments import check_name, timeout_us_of, version_of
from shmserve.session.encode import UntypedInput, check_size, options_of, wanted_of
from shmserve.session.leases import LeaseSockets, SessionLeases
from shmserve.session.memory import SessionMemory
from shmserve.session.outbox import Packet, SessionOutbox
from shmserve.session.queries import Queries
from shmserve.session.staging import place_device_tensors
from shmserve.session.streams import StreamTicket
from shmserve.session.ticket import KeptInputs, Ticket
from shmserve.session.tickets import Tickets
from shmserve.session.typed import METADATA
from shmserve.session.uploads import Body

Encode = Callable[[Any, SessionMemory], tuple[tuple[Tensor, ...], KeptInputs | None, int]]
GRACE_S = 0.1
"""The server enforces the deadline of a request; the client itself gives up this much later."""


class SessionRequests:
    """The unanswered requests of a session, and the packets to send. `Session` explains the arguments."""

    def __init__(
        self,
        memory: SessionMemory,
        encode: Encode,
        on_full: Callable[[], object] | None,
        lease_sockets: LeaseSockets | None,
        trace_context: Callable[[], dict[str, str] | None] | None,
    ) -> None:
        self.memory = memory
        self._tickets = Tickets(memory)
        self.tickets = self._tickets.pending
        """Number -> unanswered ticket."""
        self.outbox = SessionOutbox(memory, self._tickets)
        """Queued messages, which `take` packs."""
        self.urgent = False
        """Call `take` soon, even if no user calls anything: for example for a Pong, or for returns after Reclaim."""
        self.queries = Queries(self.tickets, self.outbox)
        self._operations_to_send = self.queries.to_send
        self._leases = SessionLeases(self._tickets, memory, lease_sockets)
        self._leased_models = self._leases.by_model
        self._encode = encode
        self._current_context = trace_context
        """None if the server does not want the trace context."""
        self._number = 0
        self._to_resend: list[int] = []
        """Requests to resend once the new server has loaded its models, and requests of sequences that follow them."""
        self._on_full = on_full
        self._to_cancel: deque[Ticket] = deque()
        """Streams whose caller was dropped; the next `take` cancels them."""

    # ------------------------------------------------------------------------------------ queueing

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
        payer: str = "",
    ) -> None:
        """Queue a request. Raises InvalidRequest, without side effects, if it cannot be encoded. `now` is the time on
        the monotonic clock, used only with `timeout`. `window` is that of a StreamTicket, 0 for other tickets. For
        clients that serve several callers: `caller` is the one a sequence belongs to, `payer` the one who pays."""
        timeout_us = 0 if timeout is None else timeout_us_of(timeout)
        parameters = parameters if self._current_context is None else self._with_context(parameters)
        try:
            tensors, kept, size = self._encode(inputs, self.memory)
        except UntypedInput:
            again = partial(self.infer, ticket, model, inputs, now, outputs, version, timeout, priority, sequence,
                            sequence_start, sequence_end, parameters, request_id, window, caller, payer)  # fmt: skip
            if (arrays := self._typed(ticket, model, inputs, now, version, timeout, again)) is None:
                return
            tensors, kept, size = self._encode(arrays, self.memory)
        self._number = number = self._number + 1
        if (
            outputs is None and version is None and priority is None and sequence is None and parameters is None
            and request_id is None and not sequence_start and not sequence_end and not window and len(tensors) < 16
            and type(model) is str and len(model) <= NAME_LENGTH
        ):  # fmt: skip
            message = Infer(number, model, 0, tensors)
        else:
            kept = kept or (KeptInputs() if outputs is not None else None)
            try:
                check_name("model", model)
                options = options_of(priority, sequence, sequence_start, sequence_end, parameters, request_id, window,
                                     caller)  # fmt: skip
                wanted = None if outputs is None or kept is None else wanted_of(outputs, kept, self.memory, not window)
                message = Infer(number, model, version_of(version), tensors, wanted, 0, options)
                check_size(message)
            except BaseException:
                if kept is not None:
                    self.memory.release_inputs(kept)
                raise
        if payer:
            message.payer = payer
        ticket.deadline = None
        if timeout_us:
            message.timeout_us = timeout_us
            ticket.deadline = now + timeout_us * 1e-6 + GRACE_S
            self._tickets.add_deadline(ticket.deadline, number)
        if kept is not None and kept.devices is not None:
            place_device_tensors(message, kept, self.memory)
        ticket.number = number
        ticket.kept = kept
        ticket.message = message
        outbox = self.outbox
        if kept is not None and kept.frames:
            outbox.framed = True
        self.tickets[number] = ticket
        if self._to_resend and message.options is not None and message.options.sequence:
            self._to_resend.append(number)  # after the earlier requests of its sequence, which are not resent yet
            return
        outbox.messages.append(message)
        outbox.size += size + 64

    def _typed(
        self,
        ticket: Ticket,
        model: str,
        inputs: Mapping[str, Any],
        now: float,
        version: int | str | None,
        timeout: float | None,
        again: Callable[[], None],
    ) -> dict[str, Any] | None:
        """Converts Python values in inputs to arrays. None: the model's inputs are queried first, then `again` is
        called."""
        arrays = self.queries.typed.typed(model, version_of(version), inputs)
        if arrays is None:
            self.ask(ticket, METADATA, now, model, version, timeout)
            question = ticket.message
            assert isinstance(question, Ask)
            self.queries.typed.wait(question, again)
        return arrays

    def _with_context(self, parameters: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Adds the trace context of the calling code."""
        context = self._current_context() if self._current_context is not None else None
        if context is None or not isinstance(parameters, Mapping | None):
            return parameters  # `options_of` raises the error
        return context if parameters is None else context | dict(parameters)

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
        """Queue a question or an operation; the ticket is settled with the parsed JSON of the answer. `now` is used
        only with `timeout`.
        """
        check_name("model", model)
        version_number = version_of(version)
        self._number = number = self._number + 1
        message = Ask(number, what, model, version_number)
        ticket.number = number
        ticket.kept = None
        ticket.message = message
        ticket.deadline = None
        if timeout is not None:
            ticket.deadline = now + timeout_us_of(timeout) * 1e-6
            self._tickets.add_deadline(ticket.deadline, number)
        self.tickets[number] = ticket
        self.queries.put(message, body)

    # ------------------------------------------------------------------------------------ ending

    def cancel(self, ticket: Ticket) -> bool:
        """Cancel a request, question or operation. False: it was already answered. The ticket is not notified."""
        if self.tickets.get(ticket.number) is not ticket:
            return False
        if isinstance(ticket.message, Infer):
            self.outbox.queue(Cancel(ticket.number))
        elif self.queries.withdraw(ticket.number):
            self._tickets.remove(ticket)
            return True
        elif isinstance(ticket.message, Ask) and ticket.message.body:  # it may wait for long
            self.outbox.queue(Cancel(ticket.number))
        self._tickets.abandon(ticket)
        return True

    def cancel_later(self, ticket: StreamTicket) -> None:
        """Cancel a stream whose caller was dropped, with the next `take`. May be called in any thread, inside the
        garbage collector.
        """
        self._to_cancel.append(ticket)
        if self._on_full is not None:
            self._on_full()

    def expire(self, ticket: Ticket) -> None:
        """Cancel a ticket whose deadline has passed, and fail it."""
        message = ticket.message
        if isinstance(message, Infer):
            what = "respond" if not isinstance(ticket, StreamTicket) else "complete its responses"
            text = f"model '{message.model}' did not {what} within the timeout of {message.timeout_us / 1e6:g} s"
        else:
            text = self.queries.timeout_text(ticket.number)
        if self.cancel(ticket):
            ticket.fail(DeadlineExceeded(text))

    def fail_all(self, error: ServeError) -> int:
        """Fail all tickets, as no answer will come."""
        count = len(self.tickets)
        for ticket in list(self.tickets.values()):
            self._fail(ticket, error)
        return count

    def _fail(self, ticket: Ticket, error: ServeError) -> None:
        self._remove(ticket)
        ticket.fail(type(error)(str(error)))  # one exception per ticket: raising an exception adds a traceback to it

    def _remove(self, ticket: Ticket) -> None:
        """Remove a ticket, and release its inputs and its operation's body."""
        self._tickets.remove(ticket)
        self.urgent |= self.queries.withdraw(ticket.number)

    # ------------------------------------------------------------------------------------ deadlines

    def deadline(self) -> float | None:
        """When `tick` is next due."""
        return self._tickets.next_deadline()

    def tick(self, now: float) -> None:
        """Expire tickets whose deadline has passed."""
        while (ticket := self._tickets.due(now)) is not None:
            self.expire(ticket)

    # ------------------------------------------------------------------------------------ sending

    @property
    def has_returns(self) -> bool:
        return bool(self.memory.drops or self._to_cancel)

    def take(self) -> list[Packet]:
        """The packets to send now, in order. They include returns of outputs whose arrays were dropped."""
        self.urgent = False
        while self._to_cancel:
            self.cancel(self._to_cancel.popleft())
        if self._leased_models and len(self.tickets) == 1:
            leased = self._leases.packet(self.outbox, GRACE_S)
            if leased is not None:
                return [*self.outbox.take(), leased]
        if self._operations_to_send:
            return self.queries.packets(self._fail) + self.outbox.take()
        return self.outbox.take()
