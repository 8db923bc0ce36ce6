"""What a complete request makes happen: the broker is asked, and its answer goes to the connection that waits. The rule
of the file: whatever goes wrong with one request is answered to it, and to nobody else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shmserve.clients.gateway.device_regions import DeviceRegion
from shmserve.clients.gateway.http import openapi
from shmserve.clients.gateway.http.connection import BINARY, JSON, Connection
from shmserve.clients.gateway.http.heads import Head
from shmserve.clients.gateway.http.limits import Limits
from shmserve.clients.gateway.kserve.answers import Buffer, Held, response
from shmserve.clients.gateway.kserve.asking import Asker, InParts, Waiting, not_passed_on
from shmserve.clients.gateway.kserve.documents import (
    Question,
    Route,
    arguments_of,
    error_body,
    http_answer,
    question_of,
)
from shmserve.clients.gateway.kserve.generate import ONE, event, generate_plan, generated
from shmserve.clients.gateway.kserve.plans import Plan, Plans, raw_plan
from shmserve.clients.gateway.kserve.status import http_text_of
from shmserve.clients.gateway.link import GatewayLink, Piece, space
from shmserve.clients.gateway.regions import Region, Regions
from shmserve.errors import InvalidRequest, ServeError, Unsupported
from shmserve.messages import INLINE_BYTES, Reply
from shmserve.session import WINDOW

if TYPE_CHECKING:
    from shmserve.session.ticket import Array

TEXT = b"text/plain; version=0.0.4; charset=utf-8"


class _Waiting(Waiting):
    """A question whose answer a connection waits for."""

    __slots__ = ("_connection",)

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def fail(self, error: ServeError) -> None:
        self._connection.fail(error)


class _Inference(_Waiting):
    __slots__ = ("_model", "_plan", "_targets")

    def __init__(
        self, connection: Connection, model: str, plan: Plan, targets: dict[str, Region | DeviceRegion] | None
    ) -> None:
        self._connection = connection
        self._model = model
        self._plan = plan
        self._targets = targets
        """The regions that outputs go to."""

    def _write(self, output: str, parts: list[Buffer]) -> None:
        assert self._targets is not None
        self._targets[output].write(self._plan.places[output], parts)

    def take(self, answer: Reply | Held) -> None:
        write = None if self._targets is None else self._write
        length, parts = response(self._model, self._plan, answer, write)
        self._connection.answer(200, parts, JSON if length is None else BINARY, length)

    def fail(self, error: ServeError) -> None:
        self._connection.fail(error, self._plan.options.id)


class _Asked(_Waiting):
    __slots__ = ("_question",)

    def __init__(self, connection: Connection, question: Question) -> None:
        self._connection = connection
        self._question = question

    def take(self, answer: Any) -> None:
        status, body = http_answer(self._question.show(answer))
        self._connection.answer(status, [body])

    def fail(self, error: ServeError) -> None:
        try:
            status, body = http_answer(self._question.failed(error))
        except ServeError as failure:
            self._connection.fail(failure)
        else:
            self._connection.answer(status, [body])


class _Then(_Waiting):
    """The answer is for us: it says how to go on."""

    __slots__ = ("_go_on",)

    def __init__(self, connection: Connection, go_on: Callable[[Any], None]) -> None:
        self._connection = connection
        self._go_on = go_on

    def take(self, answer: Any) -> None:
        self._go_on(answer)


class _Generation(InParts):
    """One answer as the body, or all of them as events."""

    __slots__ = ("_as_events", "_connection", "_link", "_model", "_plan", "_sent")

    def __init__(self, connection: Connection, link: GatewayLink, model: str, plan: Plan, as_events: bool) -> None:
        super().__init__()
        self._connection = connection
        self._link = link
        self._model = model
        self._plan = plan
        self._as_events = as_events
        self._sent = False

    def news(self) -> None:
        try:
            if self._as_events:
                self._send_on()
            else:
                self._answer_once()
        except ServeError as error:
            self._fail(error)
        except Exception:
            self._fail(not_passed_on())

    def _answer_once(self) -> None:
        if self.error is not None:
            raise self.error
        if len(self.parts) > 1 or (self.ended and not self.parts):
            raise InvalidRequest(ONE)
        if self.ended:
            part: Any = self.parts.popleft()
            self._connection.answer(200, [generated(self._model, self._plan, part)])

    def _send_on(self) -> None:
        """What has come, as far as the caller reads it."""
        connection, session = self._connection, self._link.session
        while self.parts and connection.writable:
            part: Any = session.next_part(self)
            text = generated(self._model, self._plan, part)
            if not self._sent:
                self._sent = True
                connection.begin_events()
            connection.send_event(event(text))
        if session.outbox.messages:
            self._link.send_soon()
        if self.ended and not self.parts:
            if self.error is not None:
                raise self.error
            if not self._sent:
                connection.begin_events()
            connection.end_events()

    def _fail(self, error: ServeError) -> None:
        """Nothing more of it is wanted."""
        if not self.ended:
            self._link.cancel(self)
        self.ended = True
        self.parts.clear()
        if self._sent:
            self._connection.send_event(event(error_body(http_text_of(error, self._plan.options.id))))
            self._connection.end_events()
        else:
            self._connection.fail(error, self._plan.options.id)


class Requests:
    """What callers may do is said by their heads. The broker has its own word on what the gateway may."""

    def __init__(self, link: GatewayLink, limits: Limits, extra: Callable[[], str], regions: Regions) -> None:
        self._link = link
        self._asker = Asker(link, regions)
        self._limits = limits
        self._plan = Plans().plan
        self._extra = extra

    # ------------------------------------------------------------------------------------ bodies in place

    def prepare(self, connection: Connection, head: Head, first: bytes) -> None:
        """Says where the body is to be read to, of which only `first` is here."""
        infer = head.route.action == "infer" and not head.encoding
        if infer and head.json_length is None and head.length > self._limits.json_bytes:
            raise self._json_too_large(head.length)
        if not infer or head.json_length is None:
            self._gather(connection, head, bytearray(head.length), first)
        elif head.json_length:
            size = self._json_length(head, head.length)
            if size > self._limits.json_bytes:
                raise self._json_too_large(size)
            text = bytearray(size)
            connection.fill([memoryview(text)], first, lambda left: self._tensors(connection, head, bytes(text), left))
        elif head.length > INLINE_BYTES:
            place = space(self._link.session.memory, head.length)

            def whole(left: bytes) -> None:
                connection.complete()
                self._infer_raw(connection, head, place)

            connection.fill([place.data], first, whole)
        else:
            self._gather(connection, head, bytearray(head.length), first)

    def _gather(self, connection: Connection, head: Head, body: bytearray, first: bytes) -> None:
        def whole(left: bytes) -> None:
            connection.complete()
            connection.whole(bytes(body))

        connection.fill([memoryview(body)], first, whole)

    def _tensors(self, connection: Connection, head: Head, text: bytes, first: bytes) -> None:
        """The JSON is here: now it is known how large each tensor is, and so where it goes."""
        plan = self._plan(text)
        self._check_size(plan, head.length - len(text), head.route.model)
        pieces: list[Piece] = []
        sinks: list[memoryview] = []
        for spec in plan.inputs:
            if not spec.follows:
                pieces.append(self._asker.given(spec))
            elif spec.size > INLINE_BYTES:
                place: Array = space(self._link.session.memory, spec.size)
                pieces.append(place)
                sinks.append(place.data)
            else:
                small = bytearray(spec.size)
                pieces.append(small)
                sinks.append(memoryview(small))

        def whole(left: bytes) -> None:
            connection.complete()
            self._infer(connection, head, plan, pieces)

        connection.fill(sinks, first, whole)

    # ------------------------------------------------------------------------------------ complete ones

    def begin(self, connection: Connection, head: Head, body: bytes) -> None:
        """Answers, or asks the broker. Raises what the caller is told."""
        route = head.route
        if route.status != 200:
            more = b"Allow: %b\r\n" % route.allow.encode() if route.allow else b""
            connection.answer(route.status, [error_body(route.text)], more=more)
            return
        if head.refusal is not None:
            connection.fail(head.refusal)
            return
        if route.action == "infer":
            self._begin_infer(connection, head, body)
        elif route.action in ("generate", "generate_stream"):
            self._begin_generate(connection, head, body)
        elif route.action == "metrics":
            self._ask_metrics(connection)
        elif route.action == "openapi":
            connection.answer(200, [openapi.text()])
        else:
            self._begin_question(connection, route, body)

    def _begin_question(self, connection: Connection, route: Route, body: bytes) -> None:
        found = question_of(route, arguments_of(route, body), self._asker.regions)
        if isinstance(found, Question):
            ticket = _Asked(connection, found)
            self._asker.ask(ticket, found)
            connection.wait_for(ticket)
        else:
            status, text = http_answer(found.document)
            connection.answer(status, [text])

    def _ask_metrics(self, connection: Connection) -> None:
        def show(answer: Any) -> None:
            connection.answer(200, [str(answer).encode(), self._extra().encode()], TEXT)

        self._ask_first(connection, Question("metrics"), show)

    def _ask_first(self, connection: Connection, question: Question, go_on: Callable[[Any], None]) -> None:
        ticket = _Then(connection, go_on)
        self._asker.ask(ticket, question)
        connection.wait_for(ticket)

    # ------------------------------------------------------------------------------------ inference

    def _begin_infer(self, connection: Connection, head: Head, body: bytes) -> None:
        length = head.json_length
        if length is None:
            length = len(body)
        elif length == 0:
            self._infer_raw(connection, head, body)
            return
        else:
            length = self._json_length(head, len(body))
        if length > self._limits.json_bytes:
            raise self._json_too_large(length)
        plan = self._plan(body[:length])
        self._check_size(plan, len(body) - length, head.route.model)
        at = length
        pieces: list[Piece] = []
        for spec in plan.inputs:
            if not spec.follows:
                pieces.append(self._asker.given(spec))
            else:
                pieces.append(body[at : at + spec.size])
                at += spec.size
        self._infer(connection, head, plan, pieces)

    def _json_length(self, head: Head, size: int) -> int:
        length = head.json_length or 0
        if length > size:
            raise InvalidRequest(f"Inference-Header-Content-Length is {length}, and the body has {size} bytes")
        return length

    def _json_too_large(self, size: int) -> InvalidRequest:
        return InvalidRequest(
            f"{size} bytes of JSON are over the limit of {self._limits.json_bytes}: send tensors as binary data, or "
            "raise --http-max-json-size of the gateway"
        )

    def _check_size(self, plan: Plan, size: int, model: str) -> None:
        if plan.binary_bytes > size:
            text = f"unexpected size for input data of model '{model}'"
            raise InvalidRequest(f"{text}: {plan.binary_bytes} bytes should follow the JSON, and {size} do")
        if plan.binary_bytes < size:
            text = f"unexpected additional input data for model '{model}'"
            raise InvalidRequest(f"{text}: {plan.binary_bytes} bytes should follow the JSON, and {size} do")

    def _infer(self, connection: Connection, head: Head, plan: Plan, pieces: list[Piece]) -> None:
        asker, route, request_id = self._asker, head.route, plan.options.id
        ticket = _Inference(connection, route.model, plan, asker.targets(plan))
        try:
            asker.infer(ticket, route.model, route.version, plan, pieces, request_id, head.forwarded)
        except ServeError as error:
            connection.fail(error, request_id)
            return
        connection.wait_for(ticket)

    def _begin_generate(self, connection: Connection, head: Head, body: bytes) -> None:
        route, link = head.route, self._link
        as_events = route.action == "generate_stream"
        if head.encoding:
            raise Unsupported(f"Unsupported compression type '{head.encoding[:40]}': generate takes none")
        if as_events and head.old:
            raise Unsupported("generate_stream needs HTTP/1.1")
        if len(body) > self._limits.json_bytes:
            raise self._json_too_large(len(body))

        def go_on(config: Any) -> None:
            plan = generate_plan(body, config)
            ticket = _Generation(connection, link, route.model, plan, as_events)
            pieces = [spec.data or b"" for spec in plan.inputs]
            self._asker.infer(
                ticket, route.model, route.version, plan, pieces, plan.options.id, head.forwarded, WINDOW
            )  # fmt: skip
            connection.wait_for(ticket, ticket.news)

        self._ask_first(connection, Question("config", model=route.model, version=route.version), go_on)

    def _infer_raw(self, connection: Connection, head: Head, body: Piece) -> None:
        """A body without JSON: the model's configuration says what it is."""
        route = head.route

        def go_on(config: Any) -> None:
            plan, prefix = raw_plan(route.model, config, len(body))
            piece = body if not prefix else prefix + bytes(body)
            self._infer(connection, head, plan, [piece])

        self._ask_first(connection, Question("config", model=route.model, version=route.version), go_on)
