"""Unary calls: inference, queries, operations and health. Invariant: an error of a call ends that call only, with a
status code and a text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from shmserve.errors import InvalidRequest, NotFound, ServeError
from shmserve.gateway.grpc.plans import RpcPlan
from shmserve.gateway.grpc.rpcs import Rpc
from shmserve.gateway.grpc.services import STOPPING, Services, code_of, rpc_error
from shmserve.gateway.grpc.wire import ResponseEncoder, parameters_of, take_apart
from shmserve.gateway.http2.interface import Awaits, TransportStream
from shmserve.gateway.kserve.answers import Buffer, Held, Targets, write_output
from shmserve.gateway.kserve.status import grpc_text_of
from shmserve.gateway.limits.caller_shares import Payer
from shmserve.gateway.limits.turns import SLICE_BYTES, SlicedJob
from shmserve.gateway.upstream.documents import BrokerQuery, FixedDocument, query_of
from shmserve.gateway.upstream.link import Piece
from shmserve.gateway.upstream.receive import Room
from shmserve.gateway.upstream.requests import PendingCall, PendingInference, PendingQuery, ask, serve_error, withdraw
from shmserve.protocol.actions import Action
from shmserve.protocol.grpc.codes import Code, RpcError
from shmserve.protocol.grpc.messages import filled, message_class, read
from shmserve.protocol.messages import Reply

MAX_QUERY_BYTES = 64 * 1024
"""Maximum size of a message, except for loads. A decoded message takes many times as much memory."""


def answer_of(
    answers: ResponseEncoder,
    plan: RpcPlan,
    request_id: str,
    answer: Reply | Held,
    targets: Targets | None,
    more: bytes = b"",
) -> list[Buffer]:
    """A ModelInferResponse in pieces. `more`: encoded fields to add. Outputs with a target region are written there
    instead."""
    buffers: list[list[Buffer]] | None
    if isinstance(answer, Held):
        reply, buffers = answer.reply, answer.buffers
    else:
        reply, buffers = answer, None
    if targets is not None:
        following: list[list[Buffer]] = []
        for index, tensor in enumerate(reply.outputs):
            parts: Any = [tensor.data] if buffers is None else buffers[index]
            if tensor.name in targets:
                write_output(plan.plan, targets, tensor.name, parts)
                parts = []
            following.append(parts)
        buffers = following
    if reply.parameters:
        more = parameters_of(reply.parameters) + more
    return answers.infer(plan.model, reply.version, request_id, more, reply.outputs, buffers)


class _InferTicket(PendingInference):
    """An inference whose reply ends the call."""

    __slots__ = ("_answers", "_plan", "_request_id", "_stream", "_targets")

    def __init__(
        self, stream: TransportStream, answers: ResponseEncoder, plan: RpcPlan, request_id: str, targets: Targets | None
    ) -> None:
        self._stream = stream
        self._answers = answers
        self._plan = plan
        self._request_id = request_id
        self._targets = targets

    def take(self, answer: Any) -> None:
        stream = self._stream
        stream.send(answer_of(self._answers, self._plan, self._request_id, answer, self._targets))
        stream.finish(0)

    def failed(self, error: ServeError) -> None:
        self._stream.finish(code_of(error), grpc_text_of(error, self._request_id))


class Unary(ABC):
    """A call with one message in each direction."""

    __slots__ = ("_begun", "_payer", "_services", "_stream", "_ticket")

    def __init__(self, services: Services, stream: TransportStream, payer: Payer) -> None:
        self._services = services
        self._stream = stream
        self._payer = payer
        self._ticket: PendingCall | None = None
        self._begun = False

    @property
    def awaits(self) -> Awaits:
        return Awaits.NOTHING if self._begun else Awaits.REQUEST

    def message(self, data: Buffer) -> None:
        if self._begun:
            self.cancelled()
            raise RpcError(Code.UNIMPLEMENTED, "this call takes one message, but received another")
        self._begun = True
        try:
            self.begin(data)
        except ServeError as error:
            raise rpc_error(error) from error

    @abstractmethod
    def begin(self, data: Buffer) -> None:
        """Answers the message. A ServeError ends the call."""

    def half_closed(self) -> None:
        if not self._begun:
            raise RpcError(Code.UNIMPLEMENTED, "this call takes one message, but received none")

    def room(self, size: int, first: Buffer) -> Room | None:
        return None

    def cancelled(self) -> None:
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            withdraw(self._services.link, ticket)

    def resume(self) -> None:
        return  # the single response is queued whether or not the client reads


class InferCall(Unary):
    """ModelInfer."""

    __slots__ = ("_job", "_room")

    def __init__(self, services: Services, stream: TransportStream, payer: Payer) -> None:
        super().__init__(services, stream, payer)
        self._room: memoryview | None = None
        self._job: SlicedJob | None = None

    def room(self, size: int, first: Buffer) -> Room | None:
        room = self._services.room(size, first)
        self._room = None if room is None else room.memory
        return room

    def begin(self, data: Buffer) -> None:
        services, stream = self._services, self._stream
        request_id = ""
        try:
            taken = take_apart(data)
            request_id = taken.id
            raw = services.in_room(taken.raw) if data is self._room else taken.raw
            self._room = None
            if len(taken.head) <= SLICE_BYTES:
                self._ask(services.plan(taken.head), raw, request_id)
                return
        except ServeError as error:
            raise rpc_error(error, request_id) from error

        def failed(error: Exception) -> None:
            refusal = rpc_error(serve_error(error), request_id)
            stream.finish(refusal.code, refusal.text)

        work = services.plan_in_slices(taken.head)
        self._job = services.turns.run(work, lambda plan: self._ask(plan, raw, request_id), failed)

    def _ask(self, plan: RpcPlan, raw: list[Piece], request_id: str) -> None:
        services = self._services
        targets = services.sender.output_regions(plan.plan)
        ticket = _InferTicket(self._stream, services.answers, plan, request_id, targets)
        services.sender.infer(ticket, services.request(self._stream, self._payer, plan, raw, request_id))
        self._ticket = ticket

    def cancelled(self) -> None:
        super().cancelled()
        if self._job is not None:
            self._job.cancel()


class AskCall(Unary):
    """A call whose response is a document."""

    __slots__ = ("_rpc",)

    def __init__(self, services: Services, stream: TransportStream, payer: Payer, rpc: Rpc) -> None:
        super().__init__(services, stream, payer)
        self._rpc = rpc

    def begin(self, data: Buffer) -> None:
        services, rpc = self._services, self._rpc
        if len(data) > MAX_QUERY_BYTES and rpc.action is not Action.LOAD:
            raise InvalidRequest(f"{rpc.request.DESCRIPTOR.name} has {len(data)} bytes; the limit is {MAX_QUERY_BYTES}")
        route, arguments = rpc.query(read(rpc.request, bytes(data)))
        if route.action is not rpc.action:
            services.access.check(route.action, self._stream.metadata.get)  # the action depends on the message
        question = query_of(route, arguments, services.sender.regions, self._payer.caller)
        if isinstance(question, FixedDocument):
            self._answer(question.document)
        else:
            ticket = PendingQuery(question, self._answer, self._fail)
            ask(services.link, self._payer, ticket, question)
            self._ticket = ticket

    def _answer(self, document: Any) -> None:
        self._stream.send([filled(self._rpc.response, self._rpc.shown(document))])
        self._stream.finish(0)

    def _fail(self, error: ServeError) -> None:
        self._stream.finish(code_of(error), grpc_text_of(error))


# ---------------------------------------------------------------------------------------- grpc.health.v1

_HEALTH_REQUEST = message_class("grpc.health.v1.HealthCheckRequest")
_HEALTH = message_class("grpc.health.v1.HealthCheckResponse")
SERVING, NOT_SERVING, SERVICE_UNKNOWN = (
    filled(_HEALTH, {"status": name}) for name in ("SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")
)


class CheckCall(Unary):
    """Health: Check."""

    __slots__ = ()

    def begin(self, data: Buffer) -> None:
        service = read(_HEALTH_REQUEST, bytes(data)).service
        if service not in self._services.names:
            raise NotFound(f"unknown service '{service[:80]}'")
        query = BrokerQuery("ready")
        ticket = PendingQuery(query, self._answer, lambda error: self._answer({"ready": False}))
        ask(self._services.link, self._payer, ticket, query)
        self._ticket = ticket

    def _answer(self, document: Any) -> None:
        self._stream.send([SERVING if document["ready"] else NOT_SERVING])
        self._stream.finish(0)


class WatchCall(Unary):
    """Health: Watch. Sends the status at once, and again when it changes."""

    __slots__ = ("_sent_status",)

    def __init__(self, services: Services, stream: TransportStream, payer: Payer) -> None:
        super().__init__(services, stream, payer)
        self._sent_status = b""

    def begin(self, data: Buffer) -> None:
        service = read(_HEALTH_REQUEST, bytes(data)).service
        self._services.enter(self)
        if service in self._services.names:
            self._services.health.add(self)
        else:
            self._send_status(SERVICE_UNKNOWN)  # the protocol lets services appear later; here none does

    def show(self, ready: bool) -> None:
        self._send_status(SERVING if ready else NOT_SERVING)

    def _send_status(self, health: bytes) -> None:
        if health != self._sent_status and self._stream.writable:
            self._sent_status = health
            self._stream.send([health])

    def cancelled(self) -> None:
        super().cancelled()
        self._services.long_calls.discard(self)
        self._services.health.remove(self)

    def stop(self) -> None:
        """The gateway is stopping."""
        self.cancelled()
        self._send_status(NOT_SERVING)
        self._stream.finish(Code.UNAVAILABLE, STOPPING)
