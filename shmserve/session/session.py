"""The client half of the protocol, without I/O: no sockets, no clock, no threads.

`infer`, `ask` and `cancel` queue messages; `take` returns the packets to send; `receive` processes an incoming packet
and settles tickets. Invariant: the owner of the session serialises all calls. The exceptions are `cancel_later` and
dropped arrays, which the garbage collector may cause in any thread at any time.

A request is kept until it is answered, so that it can be resent over a new connection. After a request was cancelled or
has expired, its inputs are kept until the server reports that it no longer reads them.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from shmserve.errors import (
    Cancelled,
    ConnectionLost,
    DeadlineExceeded,
    HandleLost,
    Internal,
    InvalidRequest,
    NotFound,
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
    Changed,
    Fail,
    FailBatch,
    FailHeld,
    Failure,
    Goodbye,
    Hello,
    Infer,
    Lease,
    LeaseEnd,
    Map,
    More,
    Part,
    Ping,
    Pong,
    Reclaim,
    Released,
    Reply,
    ReplyBatch,
    ReplyHeld,
    Tensor,
    TensorForm,
    Unmap,
    Welcome,
)
from shmserve.session.arguments import check_name, timeout_us_of, version_of
from shmserve.session.columns import RowReply, reply_of
from shmserve.session.decode import Result, result_of, return_handles
from shmserve.session.encode import UntypedInput, check_size, encode_inputs, options_of, wanted_of
from shmserve.session.leases import LeaseSockets, SessionLeases
from shmserve.session.memory import SessionMemory
from shmserve.session.outbox import Packet, SessionOutbox
from shmserve.session.queries import SessionQueries
from shmserve.session.resend import LOADED, Resume, renew, send_again
from shmserve.session.staging import place_device_tensors, restage
from shmserve.session.streams import StreamTicket
from shmserve.session.ticket import KeptInputs, Ticket
from shmserve.session.tickets import Tickets
from shmserve.session.typed import METADATA
from shmserve.session.uploads import Body

log = logging.getLogger("shmserve")

Encode = Callable[[Any, SessionMemory], tuple[tuple[Tensor, ...], KeptInputs | None, int]]
Shapes = tuple[tuple[int, ...], ...]
GRACE_S = 0.1
"""The server enforces the deadline of a request; the client itself gives up this much later."""
_decode_packet = codec.Codec(BrokerMessage).decode
_MODEL_CHANGED = (InvalidRequest.code, NotFound.code)
"""Error codes of a request after which the model may have different inputs than before."""


class Session:
    """`memory`: memfd, posix or frames (the `kind` of SessionMemory, which also explains `cold`). `on_full` is called,
    possibly inside the garbage collector, when returns of dropped arrays or cancellations should be sent soon.

    A gateway replaces the functions that convert inputs and outputs: `encode` returns the tensors, the objects to keep
    for them, and the number of inline bytes; `decode` returns the result of a reply or part. `on_limits` gets the
    server's limits, and `on_changed` the name of a model whose configuration may have changed, "" for any model.
    `explain_lost` may replace the failure of a request whose memory a worker could not open.

    `keeps`: the server may still read inputs in the session's own arena after the answer, as no other code writes to
    them.

    `trace_context` returns parameters that are added to requests, while the server wants them.
    """

    def __init__(
        self,
        memory: str = "memfd",
        *,
        memory_bytes: int = 8 << 30,
        frame_bytes: int = FRAME_BYTES,
        on_full: Callable[[], object] | None = None,
        cold: bool = False,
        encode: Encode = encode_inputs,
        decode: Callable[[Reply | Part, Sequence[Any], Mapping[str, Any], SessionMemory], Any] = result_of,
        row_reply: Callable[[int, int, tuple[TensorForm, ...], Shapes, tuple[bytes, ...]], Any] = RowReply,
        on_limits: Callable[[dict[str, int]], object] | None = None,
        on_changed: Callable[[str], object] | None = None,
        explain_lost: Callable[[Fail, Ticket, SessionMemory], Fail] | None = None,
        lease_sockets: LeaseSockets | None = None,
        trace_context: Callable[[], dict[str, str] | None] | None = None,
        keeps: bool = False,
    ) -> None:
        self.memory = SessionMemory(memory, memory_bytes, on_full, frame_bytes, cold)
        self._tickets = Tickets(self.memory)
        self.tickets = self._tickets.pending
        """Number -> unanswered ticket."""
        self.outbox = SessionOutbox(self.memory, self._tickets)
        """Queued messages, which `take` packs."""
        self.urgent = False
        """`take` is to be called soon, even if no user calls anything, as for a Pong, or for returns after Reclaim."""
        self.queries = SessionQueries(self.tickets, self.outbox)
        self._operations_to_send = self.queries.to_send
        self._leases = SessionLeases(self._tickets, self.queries, self.memory, lease_sockets)
        self._leased_models = self._leases.by_model
        self._encode = encode
        self._current_context = trace_context
        """None if the server does not want the trace context."""
        self._number = 0
        self._to_resend: list[int] = []
        """Requests to resend once the new server has loaded its models, and requests of sequences that follow them."""
        self._on_full = on_full
        self._to_cancel: deque[StreamTicket] = deque()
        """Streams whose caller was dropped; the next `take` cancels them."""
        self.connected = False
        self.server = ""
        self.goodbye: ServeError | None = None
        """The error with which the server ended the connection, if it sent one. `receive` raises it once."""
        self.wants_trace_context = True
        """The server traces requests with a sampled trace context, or has not said so yet."""
        self._trace_context = trace_context
        self._decode = decode
        """Not used for replies whose outputs are all inline: `receive` handles these itself."""
        self._row_reply = row_reply
        """Makes the reply to one request of a ReplyBatch."""
        self._on_limits = on_limits
        self._on_changed = on_changed
        self._explain_lost = explain_lost
        self._keeps = keeps

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
        """Queues a request. Raises InvalidRequest, without side effects, if it cannot be encoded. `now` is the time on
        the monotonic clock, used only with `timeout`. `window` is that of a StreamTicket, 0 for other tickets. For
        clients that serve several callers: `caller` is the one a sequence belongs to, `payer` the one who pays."""
        timeout_us = 0 if timeout is None else timeout_us_of(timeout)
        parameters = parameters if self._current_context is None else self._with_context(parameters)
        try:
            tensors, kept, size = self._encode(inputs, self.memory)
        except UntypedInput:
            again = partial(
                self.infer,
                ticket,
                model,
                inputs,
                now,
                outputs,
                version,
                timeout,
                priority,
                sequence,
                sequence_start,
                sequence_end,
                parameters,
                request_id,
                window,
                caller,
                payer,
            )
            if (arrays := self._typed(ticket, model, inputs, now, version, timeout, again)) is None:
                return
            tensors, kept, size = self._encode(arrays, self.memory)
        self._number = number = self._number + 1
        if (
            outputs is None
            and version is None
            and priority is None
            and sequence is None
            and parameters is None
            and request_id is None
            and not sequence_start
            and not sequence_end
            and not window
            and len(tensors) < 16
            and type(model) is str
            and len(model) <= NAME_LENGTH
        ):
            message = Infer(number, model, 0, tensors)
        else:
            kept = kept or (KeptInputs() if outputs is not None else None)
            try:
                check_name("model", model)
                options = options_of(
                    priority, sequence, sequence_start, sequence_end, parameters, request_id, window, caller
                )
                wanted = None if outputs is None or kept is None else wanted_of(outputs, kept, self.memory, not window)
                message = Infer(number, model, version_of(version), tensors, wanted, 0, options)
                check_size(message)
            except BaseException:
                if kept is not None:
                    self.memory.release_inputs(kept)
                raise
        if payer:
            message.payer = payer
        deadline = None
        if timeout_us:
            message.timeout_us = timeout_us
            deadline = now + timeout_us * 1e-6 + GRACE_S
            self._tickets.add_deadline(deadline, number)
        if kept is not None and kept.devices is not None:
            place_device_tensors(message, kept, self.memory)
        ticket.begin(number, message, kept, deadline)
        outbox = self.outbox
        if kept is not None and kept.frames:
            outbox.expect_frames()
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
        """Queues a question or an operation; the ticket is settled with the parsed JSON of the answer. `now` is used
        only with `timeout`.
        """
        check_name("model", model)
        version_number = version_of(version)
        self._number = number = self._number + 1
        message = Ask(number, what, model, version_number)
        deadline = None
        if timeout_us := timeout_us_of(timeout):
            deadline = now + timeout_us * 1e-6
            self._tickets.add_deadline(deadline, number)
        ticket.begin(number, message, None, deadline)
        self.tickets[number] = ticket
        self.queries.put(message, body)

    # ------------------------------------------------------------------------------------ ending

    def cancel(self, ticket: Ticket) -> bool:
        """Cancels a request, question or operation. False: it was already answered. The ticket is not notified."""
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
        """Cancels a stream whose caller was dropped, with the next `take`. May be called in any thread, inside the
        garbage collector.
        """
        self._to_cancel.append(ticket)
        if self._on_full is not None:
            self._on_full()

    def expire(self, ticket: Ticket) -> None:
        """Cancels a ticket whose deadline has passed, and fails it."""
        message = ticket.message
        if isinstance(message, Infer):
            what = "respond" if not isinstance(ticket, StreamTicket) else "complete its responses"
            text = f"model '{message.model}' did not {what} within the timeout of {message.timeout_us / 1e6:g} s"
        else:
            text = self.queries.timeout_text(ticket.number)
        if self.cancel(ticket):
            ticket.fail(DeadlineExceeded(text))

    def fail_all(self, error: ServeError) -> int:
        """Fails all tickets, as no answer will come."""
        count = len(self.tickets)
        for ticket in list(self.tickets.values()):
            self._fail(ticket, error)
        return count

    def _fail(self, ticket: Ticket, error: ServeError) -> None:
        self._remove(ticket)
        ticket.fail(type(error)(str(error)))  # one exception per ticket: raising an exception adds a traceback to it

    def _remove(self, ticket: Ticket) -> None:
        """Removes a ticket, and releases its inputs and its operation's body."""
        self._tickets.remove(ticket)
        self.urgent |= self.queries.withdraw(ticket.number)

    # ------------------------------------------------------------------------------------ deadlines

    def deadline(self) -> float | None:
        """When `tick` is next due."""
        return self._tickets.next_deadline()

    def tick(self, now: float) -> None:
        """Expires tickets whose deadline has passed."""
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
        if self._leased_models:
            leased = self._leases.packet(self.outbox, GRACE_S)
            if leased is not None:
                return [*self.outbox.take(), leased]
        if self._operations_to_send:
            return self.queries.packets(self._fail) + self.outbox.take()
        return self.outbox.take()

    # ------------------------------------------------------------------------------------ receiving

    def receive(self, data: Any, descriptors: Sequence[int] = (), frames: Sequence[Any] = ()) -> int:
        """Processes one packet; returns the number of settled tickets. After an error the connection is unusable."""
        settled = 0
        pop = self.tickets.pop
        if descriptors:
            self._take_descriptors(data, descriptors)
        for message in _decode_packet(data):
            if type(message) is Reply:
                ticket = pop(message.request, None)
                if ticket is None:
                    return_handles(message, self.memory)
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
            elif type(message) is ReplyBatch:
                settled += self._on_reply_batch(message)
            elif type(message) is Part:
                self._on_part(message, frames)
            else:
                settled += _HANDLERS[type(message)](self, message)
        return settled

    def _take_descriptors(self, data: Any, descriptors: Sequence[int]) -> None:
        """The n-th descriptor belongs to the n-th message that has one. All others are closed, even on errors."""
        remaining = list(descriptors)
        try:
            for message in _decode_packet(data):
                if not remaining:
                    return
                if type(message) is Map and message.name is None:
                    self.memory.mapped.add(message.segment, message.size, fd=remaining.pop(0))
                elif type(message) is Lease and not message.offer:
                    self._leases.add(message, remaining.pop(0))
        finally:
            for descriptor in remaining:
                os.close(descriptor)

    def _on_reply_batch(self, message: ReplyBatch) -> int:
        columns, version, row_reply = message.columns, message.version, self._row_reply
        if not columns.regular:
            raise ProtocolError(f"the server sent an irregular ReplyBatch of {len(columns.requests)} results")
        pop, forms = self.tickets.pop, columns.forms
        settled = last = 0
        shapes: Shapes = ()
        for number, rows, data in zip(columns.requests, columns.rows, columns.data, strict=True):
            ticket = pop(number, None)
            if ticket is None:
                continue
            settled += 1
            if rows != last or not shapes:
                shapes, last = tuple([(rows, *form.dims) for form in forms]), rows
            if ticket.kept is not None:
                self._settle_slowly(ticket, reply_of(number, version, forms, shapes, data), ())
                continue
            ticket.message = None
            ticket.settle(row_reply(number, version, forms, shapes, data))
        return settled

    def _settle_slowly(
        self, ticket: Ticket, reply: Reply, frames: Sequence[Any], held: KeptInputs | None = None
    ) -> None:
        """Settles a request that has kept inputs, or outputs that are not inline. Arrays are created at once, because
        dropping them is what returns the memory to the server. `held`: inputs that are released later."""
        kept, ticket.kept = ticket.kept, None
        ticket.message = None
        try:
            places = kept.places if kept is not None else held.places if held is not None else {}
            result = self._decode(reply, frames, places, self.memory)
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
            self._remove(ticket)
        if not isinstance(ticket, StreamTicket):
            return_handles(part, self.memory)
            return
        try:
            result = self._decode(part, frames, {}, self.memory) if part.outputs or not part.last else None
        except ServeError as error:
            self.cancel(ticket)
            ticket.fail(error.with_traceback(None))
            return
        ticket.part(result, part.last)

    def next_part(self, ticket: StreamTicket) -> Result:
        """Returns the next received part. Requests more parts from the server if half of the window is used."""
        part, more = ticket.hand_out()
        if more and self.connected:
            self.outbox.queue(More(ticket.number, more))
        return part

    # ------------------------------------------------------------------------------------ other messages

    def _on_fail(self, message: Fail) -> int:
        if message.request == 0:
            # It refers to no request: after a protocol error, the server refused a whole packet with unknown requests.
            log.error("the server rejected a message of this client: %s", message.text)
            if message.code != ProtocolError.code:
                return 0
            return self.fail_all(Internal(f"the server rejected a packet of this client: {message.text}"))
        ticket = self.tickets.get(message.request)
        if ticket is None:
            return 0
        if message.code == HandleLost.code:
            if restage(ticket, self.memory):
                self.outbox.queue(ticket.message)
                self.urgent = True
                return 0
            if self._explain_lost is not None:
                message = self._explain_lost(message, ticket, self.memory)
        elif message.code in _MODEL_CHANGED and isinstance(ticket.message, Infer):
            self.queries.typed.forget(ticket.message.model)
        self._remove(ticket)
        ticket.fail(from_wire(message.code, message.text))
        return 1

    def _on_fail_batch(self, message: FailBatch) -> int:
        return sum([self._on_fail(Fail(number, message.code, message.text)) for number in message.requests])

    def _on_answer(self, message: Answer) -> int:
        settled = self.queries.on_answer(message)
        self.urgent |= bool(self.outbox.messages)  # such as a request that waited for this answer
        return settled

    def _on_fail_held(self, message: FailHeld) -> int:
        ticket = self.tickets.get(message.request)
        if ticket is None:
            return 0
        self._tickets.hold(ticket)
        self._tickets.remove(ticket)
        ticket.fail(from_wire(message.code, message.text))
        return 1

    def _on_reply_held(self, message: ReplyHeld) -> int:
        ticket = self.tickets.pop(message.request, None)
        if ticket is None:
            return_handles(message, self.memory)
            return 0
        self._settle_slowly(ticket, message, (), self._tickets.hold(ticket))
        return 1

    def _on_released(self, message: Released) -> int:
        self._tickets.release(message.request)
        return 0

    def _on_lease(self, message: Lease) -> int:
        if message.offer:
            self._leases.add(message, None)
        elif (message.model, message.version) not in self._leased_models:
            raise ProtocolError(f"the server sent lease {message.lease} without a descriptor")
        self.urgent |= self._leases.waiting
        return 0

    def lease_answered(self) -> bool:
        """Called by the link when the worker of a lease has answered. Returns whether requests wait for the lease."""
        self._leases.answered()
        return self._leases.waiting

    def _on_lease_end(self, message: LeaseEnd) -> int:
        sent, waiting = self._leases.remove(message.lease)
        sockets = self._leases.sockets
        settled = sum(map(self.receive, sockets.close_lease(message.lease))) if sockets is not None else 0
        again: list[Infer | Ask] = []
        for number in sent:
            ticket = self.tickets.get(number)
            if ticket is None:
                continue
            if message.error is None and ticket.message is not None:
                again.append(ticket.message)
                continue
            error = message.error if message.error is not None else Failure("CANCELLED", "")
            self._remove(ticket)
            ticket.fail(from_wire(error.code, error.text))
            settled += 1
        again += waiting
        if again:
            self.outbox.put_first(again)
            self.urgent = True
        return settled

    def _on_reclaim(self, message: Reclaim) -> int:
        self.urgent = True
        return 0

    def _model_changed(self, message: Changed) -> int:
        if self._on_changed is not None:
            self._on_changed(message.model)
        return 0

    def _on_ping(self, message: Ping) -> int:
        self.outbox.queue(Pong(message.number))
        self.urgent = True
        return 0

    def _on_pong(self, message: Pong) -> int:
        self.urgent |= self.queries.on_pong()
        return 0

    def _on_refused(self, message: codec.Refused) -> int:
        """Handles an undecodable message of the server: fails its request, or the connection if the request is
        unknown."""
        if not message.request:
            raise ProtocolError(f"the server sent an invalid message: {message.text}")
        return self._on_fail(Fail(message.request, Internal.code, message.text))

    # ------------------------------------------------------------------------------------ connections

    def hello(self, pid: int, name: str) -> Packet:
        """The first packet of a connection. Send nothing else until `connected` is true."""
        self.connected = False
        self.goodbye = None
        sockets = self._leases.sockets
        leases, offers = sockets is not None, sockets is not None and sockets.offers
        return Packet(codec.encode([Hello(PROTOCOL, pid, name[:128], self.memory.kind, leases, self._keeps, offers)]))

    def _on_welcome(self, message: Welcome) -> int:
        if message.protocol != PROTOCOL:
            raise ProtocolError(f"the server speaks protocol {message.protocol}, this client {PROTOCOL}")
        first, self.server = not self.server, message.server
        if self._on_limits is not None:
            self._on_limits(message.limits)
        self.wants_trace_context = bool(message.limits.get("trace_context"))
        self._current_context = self._trace_context if self.wants_trace_context else None
        numbers = self.memory.connected(message.owner, message.limits)
        self.outbox.batch_requests = message.limits.get("batch_requests", 0)
        self.connected = True
        self.outbox.clear()
        for ticket in [self.tickets[number] for number in sorted(self.tickets)]:
            if ticket.message is None:
                self._remove(ticket)  # it was cancelled, and the new server does not know it
            elif isinstance(ticket.message, Ask):
                self.queries.put_again(ticket.message)
        self._to_resend, failed = renew(self.tickets, numbers, self.memory)
        for ticket, error in failed:
            self._fail(ticket, error)
        if self._to_resend and not first:
            self.ask(Resume(self._send_again), LOADED, 0.0)
        elif self._to_resend:
            self._send_again()
        return len(failed)

    def _send_again(self) -> None:
        self.urgent = True
        numbers, self._to_resend = self._to_resend, []
        for ticket in send_again(numbers, self.tickets, self.outbox):
            self._remove(ticket)

    def _on_goodbye(self, message: Goodbye) -> int:
        if message.code == ConnectionLost.code:  # a different server behind the same ZeroMQ socket
            raise ConnectionLost(message.text)
        self.goodbye = from_wire(message.code, message.text)
        raise from_wire(message.code, message.text)

    def disconnected(self) -> None:
        """Handles a disconnect. Queries, requests without a sequence, and operations that have not begun are kept for
        resending; requests of sequences, and operations and streams that have begun, fail.
        """
        self.connected = False
        self._model_changed(Changed(""))
        self.outbox.clear()
        self.queries.typed.forget_all()
        self._leases.clear()
        self.queries.disconnected()
        self.memory.disconnected()
        for number in sorted(self.tickets):
            ticket = self.tickets[number]
            message = ticket.message
            if message is None or isinstance(ticket, Resume):
                self._remove(ticket)
            elif isinstance(message, Ask):
                error = self.queries.lost_error(message, self.goodbye)
                if error is not None:
                    self._fail(ticket, error)
            elif message.options is not None and message.options.sequence:
                text = f"the connection ended in the middle of sequence {message.options.sequence}; start it again"
                self._fail(ticket, ConnectionLost(text))
            elif isinstance(ticket, StreamTicket) and ticket.begun:
                self._fail(ticket, ConnectionLost("the connection ended during the responses; send the request again"))
        self._tickets.release_all()

    def bye(self) -> Packet:
        """The last packet of a connection."""
        return Packet(codec.encode([Bye()]))

    def close(self) -> None:
        """Fails all unanswered tickets and closes the memory. Arrays that callers hold stay valid."""
        self.fail_all(Cancelled("the client was closed before the response arrived"))
        self.memory.close()


_HANDLERS: dict[type, Callable[[Session, Any], int]] = {
    Fail: Session._on_fail,
    FailBatch: Session._on_fail_batch,
    FailHeld: Session._on_fail_held,
    ReplyHeld: Session._on_reply_held,
    Released: Session._on_released,
    Lease: Session._on_lease,
    LeaseEnd: Session._on_lease_end,
    Answer: Session._on_answer,
    Map: lambda session, message: session.memory.on_map(message),
    Unmap: lambda session, message: session.memory.on_unmap(message),
    Reclaim: Session._on_reclaim,
    Changed: Session._model_changed,
    Ping: Session._on_ping,
    Pong: Session._on_pong,
    Welcome: Session._on_welcome,
    Goodbye: Session._on_goodbye,
    codec.Refused: Session._on_refused,
}
"""Message type -> handler, which returns the number of settled tickets."""
