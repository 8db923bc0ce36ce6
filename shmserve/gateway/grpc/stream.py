"""ModelStreamInfer: a stream of requests and their responses. Invariant: an error ends its request, not the stream,
unless the client asks for the latter (metadata triton_grpc_error).

As in Triton, responses of decoupled models are sent as they arrive; all others are sent in the order of the requests.
The type of the broker's answer tells them apart: Parts from a decoupled model, otherwise a Reply.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from shmserve.errors import ServeError, Unavailable
from shmserve.gateway.auth.header_forwarding import STREAM_ERROR
from shmserve.gateway.grpc.calls import answer_of
from shmserve.gateway.grpc.plans import RpcPlan
from shmserve.gateway.grpc.services import STOPPING, Services, code_of
from shmserve.gateway.grpc.wire import IS_FINAL, NOT_FINAL, stream_error, streamed, take_apart
from shmserve.gateway.http2.interface import Awaits, TransportStream
from shmserve.gateway.kserve.answers import Buffer, Held, Targets
from shmserve.gateway.kserve.status import text_of
from shmserve.gateway.limits.caller_shares import Payer
from shmserve.gateway.limits.turns import SLICE_BYTES, SlicedJob
from shmserve.gateway.upstream.link import Piece
from shmserve.gateway.upstream.receive import Room
from shmserve.gateway.upstream.requests import PendingStream, serve_error, withdraw
from shmserve.protocol.grpc.codes import Code
from shmserve.protocol.messages import Reply
from shmserve.session import WINDOW

LIVE_REQUESTS = 256
"""Maximum number of unanswered requests of one stream. Flow control holds back further ones."""
NO_NEW_REQUESTS = "Server is stopping, scheduler for model has stopped accepting new inference requests"
_MODELS = 1024
"""Maximum number of remembered decoupled models."""


class _StreamRequest(PendingStream):
    """One request of a stream."""

    __slots__ = ("call", "final", "in_order", "plan", "replied", "request_id", "targets", "version")

    def __init__(self, call: StreamCall) -> None:
        super().__init__(WINDOW)
        self.call = call
        self.plan: RpcPlan | None = None
        self.request_id = ""
        self.targets: Targets | None = None
        self.version = 0
        self.final = False
        """The final response was sent, and had outputs."""
        self.replied = False
        """The answer was a Reply: the model is not decoupled."""
        self.in_order = True
        """Its responses wait for those of earlier requests: the model is not known to be decoupled."""

    def settle(self, answer: Any) -> None:
        self.replied = True
        super().settle(answer)

    def on_part(self) -> None:
        self.call.on_part(self)


class StreamCall:
    """One ModelStreamInfer."""

    def __init__(self, services: Services, stream: TransportStream, payer: Payer) -> None:
        self._services = services
        self._payer = payer
        self._stream = stream
        self._live: dict[_StreamRequest, None] = {}
        self._in_order: deque[_StreamRequest] = deque()
        """Requests of models that are not known to be decoupled, in order."""
        self._half_closed = False
        """The client sends no more requests."""
        self._paused = False
        self._ends_with_error = stream.metadata.get(STREAM_ERROR) == "true"
        self._over = False
        self._room: memoryview | None = None
        """Memory into which the next message is read."""
        self._job: SlicedJob | None = None
        services.enter(self)

    # ------------------------------------------------------------------------------------ requests

    @property
    def awaits(self) -> Awaits:
        return Awaits.NOTHING if self._live else Awaits.NEXT_REQUEST

    def message(self, data: Buffer) -> None:
        services = self._services
        room, self._room = self._room, None
        ticket = _StreamRequest(self)
        self._live[ticket] = None
        try:
            taken = take_apart(data)
            ticket.request_id = taken.id
            if services.stopping:
                raise Unavailable(NO_NEW_REQUESTS)
            raw = services.in_room(taken.raw) if data is room else taken.raw
            if len(taken.head) > SLICE_BYTES:
                self._begin_in_slices(ticket, taken.head, raw)
                return
            self._ask(ticket, services.plan(taken.head), raw)
        except ServeError as error:
            self._refuse(ticket, error)
        if len(self._live) >= LIVE_REQUESTS and not self._paused:
            self._paused = True
            self._stream.pause()

    def _begin_in_slices(self, ticket: _StreamRequest, head: bytes, raw: list[Piece]) -> None:
        """Pauses the stream until the work is done, because requests are started in order."""
        self._stream.pause()

        def proceed() -> None:
            self._paused = not self._over and len(self._live) >= LIVE_REQUESTS
            if not self._paused:
                self._stream.unpause()

        def then(plan: RpcPlan) -> None:
            self._ask(ticket, plan, raw)
            proceed()

        def failed(error: Exception) -> None:
            self._refuse(ticket, serve_error(error))
            proceed()

        self._job = self._services.turns.run(self._services.plan_in_slices(head), then, failed)

    def _ask(self, ticket: _StreamRequest, plan: RpcPlan, raw: list[Piece]) -> None:
        services, sender = self._services, self._services.sender
        ticket.plan = plan
        if plan.model in services.decoupled:
            ticket.in_order = False
        else:
            self._in_order.append(ticket)
        ticket.targets = sender.output_regions(plan.plan)
        sender.infer(ticket, services.request(self._stream, self._payer, plan, raw, ticket.request_id), WINDOW)

    def _refuse(self, ticket: _StreamRequest, error: ServeError) -> None:
        if ticket.plan is None:
            self._in_order.append(ticket)
        ticket.fail(error)

    def room(self, size: int, first: Buffer) -> Room | None:
        room = self._services.room(size, first)
        self._room = None if room is None else room.memory
        return room

    def half_closed(self) -> None:
        self._half_closed = True
        if not self._live:
            self._finish(0)

    def cancelled(self) -> None:
        self._over = True
        self._services.long_calls.discard(self)
        link = self._services.link
        live, self._live = list(self._live), {}
        self._in_order.clear()
        if self._job is not None:
            self._job.cancel()
        for ticket in live:
            ticket.parts.clear()
            if not ticket.ended:
                ticket.ended = True
                withdraw(link, ticket)

    def stop(self) -> None:
        """Called when the gateway stops: requests in flight are answered, then the stream ends."""
        if not self._live:
            self._finish(Code.UNAVAILABLE, STOPPING)

    # ------------------------------------------------------------------------------------ responses

    def on_part(self, ticket: _StreamRequest) -> None:
        if self._over:
            return
        if ticket.in_order and not ticket.replied and ticket.error is None:
            self._is_decoupled(ticket)
        if ticket.in_order:
            self._send_in_order()
        else:
            self._send(ticket)
        self._send_returns()

    def resume(self) -> None:
        if self._over:
            return
        for ticket in [ticket for ticket in self._live if not ticket.in_order]:
            if not self._over:
                self._send(ticket)
        self._send_in_order()
        self._send_returns()

    def _is_decoupled(self, ticket: _StreamRequest) -> None:
        """Removes the requests of its model from the ordered queue."""
        assert ticket.plan is not None
        model, known = ticket.plan.model, self._services.decoupled
        if len(known) >= _MODELS:
            known.clear()
        known.add(model)
        waiting, self._in_order = self._in_order, deque()
        for one in waiting:
            if one.plan is not None and one.plan.model == model:
                one.in_order = False
                self._send(one)
            else:
                self._in_order.append(one)
        self._send_in_order()

    def _send_in_order(self) -> None:
        waiting = self._in_order
        while waiting and waiting[0].ended and self._stream.writable and not self._over:
            ticket = waiting.popleft()
            ticket.in_order = False  # later requests need not wait for the remaining responses
            self._send(ticket)

    def _send_returns(self) -> None:
        link = self._services.link
        if link.session.outbox.messages:
            link.send_soon()

    def _send(self, ticket: _StreamRequest) -> None:
        """Sends the responses that have arrived, as far as the client reads."""
        stream, session = self._stream, self._services.link.session
        try:
            while ticket.parts and stream.writable:
                part: Any = session.next_part(ticket)
                self._send_part(ticket, part)
        except Exception as error:
            self._give_up(ticket, serve_error(error))
        if ticket.ended and not ticket.parts and stream.writable and ticket in self._live:
            self._end(ticket)

    def _send_part(self, ticket: _StreamRequest, part: Held) -> None:
        plan, reply = ticket.plan, part.reply
        assert plan is not None
        ticket.version = reply.version
        ticket.final = isinstance(reply, Reply) or reply.last
        more = IS_FINAL if ticket.final else NOT_FINAL
        answers = self._services.answers
        self._stream.send(streamed(answer_of(answers, plan, ticket.request_id, part, ticket.targets, more)))

    def _give_up(self, ticket: _StreamRequest, error: ServeError) -> None:
        """Ends the request with an error and drops its remaining responses."""
        if not ticket.ended:
            withdraw(self._services.link, ticket)
        ticket.parts.clear()
        ticket.ended = True
        ticket.error = error

    def _end(self, ticket: _StreamRequest) -> None:
        """All responses of the request have been sent, and no more will arrive."""
        del self._live[ticket]
        error, plan, stream = ticket.error, ticket.plan, self._stream
        if error is not None:
            text = text_of(error, ticket.request_id)
            if self._ends_with_error:
                self._finish(code_of(error), text)
                self.cancelled()
                return
            stream.send([stream_error(text, ticket.request_id)])
        elif plan is not None and plan.empty_final and not ticket.final:
            stream.send(
                streamed(
                    self._services.answers.infer(plan.model, ticket.version, ticket.request_id, IS_FINAL, (), None)
                )
            )
        if self._paused and len(self._live) <= LIVE_REQUESTS // 2:
            self._paused = False
            stream.unpause()
        if not self._live and not self._over:
            if self._half_closed:
                self._finish(0)
            elif self._services.stopping:
                self.stop()

    def _finish(self, code: int, text: str = "") -> None:
        self._over = True
        self._services.long_calls.discard(self)
        self._stream.finish(code, text)
