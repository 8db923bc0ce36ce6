"""Handles complete HTTP requests: queries the broker and passes its reply to the waiting exchange. Invariant: an
error in one request affects the response to that request only."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np

from shmserve.errors import (
    DeadlineExceeded,
    InvalidRequest,
    ModelFailed,
    NotFound,
    QueueTimeout,
    ServeError,
    Unsupported,
)
from shmserve.gateway.auth.access import EndpointAccess
from shmserve.gateway.auth.actions import GENERATE, GENERATE_STREAM, INFER, PAGE, TO_MODELS
from shmserve.gateway.auth.gate import Guard
from shmserve.gateway.auth.header_forwarding import HeaderParameters
from shmserve.gateway.http import model_openapi, openapi
from shmserve.gateway.http.bodies import content_length_error
from shmserve.gateway.http.connection import HttpConnection, HttpExchange, HttpListener
from shmserve.gateway.http.heads import HttpHead, HttpHeads
from shmserve.gateway.http.limits import HttpLimits
from shmserve.gateway.http.routes import API_ROUTES, KSERVE_ROUTES, METRICS_ROUTES, QUERY, NoRoute
from shmserve.gateway.kserve.answers import (
    Buffer,
    Held,
    JsonPieces,
    Targets,
    large_as_json,
    pieces_in_slices,
    response,
)
from shmserve.gateway.kserve.forms import form_of
from shmserve.gateway.kserve.generate import (
    ONE,
    GenerateForm,
    GenerateRequest,
    advice,
    event,
    generated,
    generated_in_slices,
    is_large,
    large_request,
)
from shmserve.gateway.kserve.plans import RequestPlan, RequestPlans, plan_in_slices, raw_plan
from shmserve.gateway.kserve.status import http_of, http_text_of
from shmserve.gateway.limits.body_budget import Budget
from shmserve.gateway.limits.turns import COPY_BYTES, SLICE_BYTES, SlicedWork
from shmserve.gateway.openai.errors import KIND as OPENAI
from shmserve.gateway.openai.requests import OpenAiRequests
from shmserve.gateway.page.feed import PageFeed
from shmserve.gateway.page.requests import PageRequests
from shmserve.gateway.upstream.documents import BrokerQuery, arguments_of, error_body, http_answer, query_of
from shmserve.gateway.upstream.exchange import JSON, ask_for, ask_for_config, model_request
from shmserve.gateway.upstream.link import GatewayLink, Piece, partial_room
from shmserve.gateway.upstream.receive import ReceiveBuffer
from shmserve.gateway.upstream.regions import Regions
from shmserve.gateway.upstream.requests import (
    PendingCall,
    PendingInference,
    PendingQuery,
    PendingStream,
    RequestSender,
    ask,
    serve_error,
    withdraw,
)
from shmserve.protocol.actions import Action
from shmserve.protocol.messages import INLINE_BYTES, Reply
from shmserve.protocol.roles import is_operator, remove_private
from shmserve.session import WINDOW
from shmserve.session.uploads import of_bytes

SCRAPES = 20
"""Maximum number of metrics pages built per second; further requests get the last one."""
_LATE_ERRORS = (ModelFailed, QueueTimeout, DeadlineExceeded)
"""Errors of accepted requests. If generate_stream fails with one before any response, it is sent as an event, with its
status."""
_BINARY = b"application/octet-stream"
_METRICS = b"text/plain; version=0.0.4; charset=utf-8"
_encode = msgspec.json.Encoder().encode


class _Inference(PendingInference):
    __slots__ = ("_exchange", "_model", "_plan", "_targets")

    def __init__(self, exchange: HttpExchange, model: str, plan: RequestPlan, targets: Targets | None) -> None:
        self._exchange = exchange
        self._model = model
        self._plan = plan
        self._targets = targets

    def take(self, answer: Reply | Held) -> None:
        outputs = large_as_json(self._plan, answer) if type(answer) is Held else []
        if outputs:
            work = pieces_in_slices(outputs, self._exchange.hold)
            self._exchange.work(work, lambda pieces: self._send(answer, pieces), self.failed)
        else:
            self._send(answer)

    def _send(self, answer: Reply | Held, pieces: JsonPieces | None = None) -> None:
        length, parts = response(self._model, self._plan, answer, self._targets, pieces)
        self._exchange.answer(200, parts, JSON if length is None else _BINARY, length)

    def failed(self, error: ServeError) -> None:
        self._exchange.fail(error, self._plan.options.id)


class _Scrape(PendingCall):
    """One rendering of the metrics page, shared by all connections that request it while it is built. It is charged to
    one exchange, but not cancelled when that one disconnects, as others may be waiting for it."""

    __slots__ = ("_error", "_extra", "_page", "_waiting")

    def __init__(self, extra: Callable[[], str]) -> None:
        self._extra = extra
        self._waiting: list[HttpExchange] = []
        self._page: list[Buffer] = []
        self._error: ServeError | None = None

    @property
    def pending(self) -> bool:
        return self._error is None and not self._page

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    def show(self, exchange: HttpExchange) -> None:
        if self._error is not None:
            exchange.fail(self._error)
        elif self._page:
            exchange.answer(200, self._page, _METRICS)
        else:
            self._waiting.append(exchange)

    def take(self, answer: Any) -> None:
        self._page = [str(answer).encode(), self._extra().encode()]
        self._show_all()

    def failed(self, error: ServeError) -> None:
        self._error = error
        self._show_all()

    def _show_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for exchange in waiting:
            self.show(exchange)


class _Generation(PendingStream):
    """generate: one response as the body. generate_stream: each response as a server-sent event."""

    __slots__ = ("_as_events", "_config", "_encoding", "_exchange", "_link", "_model", "_plan", "_sent")

    def __init__(
        self, exchange: HttpExchange, link: GatewayLink, model: str, plan: RequestPlan, config: Any, as_events: bool
    ) -> None:
        super().__init__()
        self._config = config
        self._exchange = exchange
        self._link = link
        self._model = model
        self._plan = plan
        self._as_events = as_events
        self._sent = False
        self._encoding = False
        """A response is being encoded in slices: the next ones wait for it."""

    def on_part(self) -> None:
        try:
            if self._as_events:
                self._send_on()
            else:
                self._answer_once()
        except Exception as error:
            self._fail(serve_error(error))

    def _answer_once(self) -> None:
        if self.error is not None:
            raise self.error
        if len(self.parts) > 1 or (self.ended and not self.parts):
            raise InvalidRequest(ONE)
        if self.ended:
            part: Any = self.parts.popleft()
            exchange = self._exchange
            if is_large(part):
                work = generated_in_slices(self._model, self._plan, self._config, part, exchange.hold)
                exchange.work(work, lambda parts: exchange.answer(200, parts), self._fail)
            else:
                exchange.answer(200, [generated(self._model, self._plan, self._config, part)])

    def _send_on(self) -> None:
        """Sends the responses that have arrived, as far as the client reads them."""
        exchange, session = self._exchange, self._link.session
        large: Held | None = None
        while large is None and self.parts and exchange.writable and not self._encoding:
            part: Any = session.next_part(self)
            if is_large(part):
                large = part
            else:
                self._begin_events()
                exchange.send_event(event(generated(self._model, self._plan, self._config, part)))
        if session.outbox.messages:
            self._link.send_soon()
        if large is not None:
            self._encode(large)
        elif self.ended and not self.parts and not self._encoding:
            if self.error is not None:
                raise self.error
            self._begin_events()
            exchange.end_events()

    def _encode(self, part: Held) -> None:
        exchange = self._exchange
        self._encoding = True
        exchange.work(
            generated_in_slices(self._model, self._plan, self._config, part, exchange.hold),
            self._send_large,
            self._fail,
        )
        if self._encoding and not self.ended:
            exchange.wait_for(self, self.on_part)  # a client that disconnects also cancels the request

    def _send_large(self, parts: list[Buffer]) -> None:
        self._encoding = False
        self._begin_events()
        self._exchange.send_large_event([b"data: ", *parts, b"\n\n"])
        self.on_part()

    def _begin_events(self) -> None:
        if not self._sent:
            self._sent = True
            self._exchange.begin_events()

    def _fail(self, error: ServeError) -> None:
        """Ends the request with an error and drops its remaining responses."""
        if not self.ended:
            withdraw(self._link, self)
        self.ended = True
        self._encoding = False
        self.parts.clear()
        if self._as_events and (self._sent or isinstance(error, _LATE_ERRORS)):
            if not self._sent:
                self._exchange.begin_events(http_of(error))
            self._exchange.send_event(event(error_body(http_text_of(error, self._plan.options.id))))
            self._exchange.end_events()
        else:
            if type(error) is InvalidRequest and (more := advice(self._plan, self._config)):
                error = InvalidRequest(f"{error} {more}")
            self._exchange.fail(error, self._plan.options.id)


def _piece(buffer: ReceiveBuffer) -> Piece:
    """Shared memory is passed as an array, so that the session can find its block."""
    return np.frombuffer(buffer.memory, np.uint8) if buffer.placed else buffer.memory


class Requests:
    """The handler of all connections. `HttpHeads` has checked the client's access; the broker checks the gateway's.
    `page`: None if the listener has no routes for the web page. `openai`: the listener has the OpenAI-compatible
    endpoints."""

    def __init__(
        self,
        link: GatewayLink,
        limits: HttpLimits,
        extra: Callable[[], str],
        regions: Regions,
        page: PageRequests | None,
        openai: bool,
    ) -> None:
        self._link = link
        self._page = page
        self._sender = RequestSender(link, regions)
        self._openai = OpenAiRequests(self._sender) if openai else None
        self._limits = limits
        self._plan = RequestPlans().plan
        self._extra = extra
        self._now = link.bind().time
        self._scrape: _Scrape | None = None
        self._scrapes = 0
        """Pages built since `_scrapes_since`."""
        self._scrapes_since = -math.inf

    # ------------------------------------------------------------------------------------ bodies read in place

    def prepare(self, exchange: HttpExchange, first: Buffer) -> None:
        """Chooses the buffers for the body, of which only `first` has arrived."""
        head, action = exchange.head, exchange.head.route.action
        is_json = action in TO_MODELS and not head.has_form and head.json_length is None and not head.encoding
        if is_json and head.length > self._limits.json_bytes:
            raise content_length_error(head, self._limits)
        if action is not INFER or head.json_length is None or head.encoding:
            self._gather(exchange, first)
        elif head.json_length:
            size = self._json_length(head, head.length)
            if size > self._limits.json_bytes:
                raise self._limits.json_size_error(size)
            if size > SLICE_BYTES:
                self._gather(exchange, first)
                return
            if len(first) >= size:
                self._tensors(exchange, bytes(first[:size]), first[size:])
                return
            text = ReceiveBuffer(size)
            exchange.fill([text], first, lambda rest: self._tensors(exchange, bytes(text.memory), rest))
        else:
            tensor = self._sink(exchange.head.length, exchange.is_trusted)

            def whole(rest: Buffer) -> None:
                exchange.complete()
                self._infer_raw(exchange, _piece(tensor))

            exchange.fill([tensor], first, whole)

    def _gather(self, exchange: HttpExchange, first: Buffer) -> None:
        body = ReceiveBuffer(exchange.head.length, trusted=exchange.is_trusted)

        def whole(rest: Buffer) -> None:
            exchange.complete()
            exchange.whole(body.memory)

        exchange.fill([body], first, whole)

    def _sink(self, size: int, trusted: bool) -> ReceiveBuffer:
        """A buffer for a tensor, in shared memory if it is too large to be sent inline."""
        allocate = (lambda _: partial_room(self._link.session.memory, size)) if size > INLINE_BYTES else None
        return ReceiveBuffer(size, allocate, trusted)

    def _tensors(self, exchange: HttpExchange, text: bytes, first: Buffer) -> None:
        """Called when the JSON is complete: reads each tensor into a buffer of the size that the JSON gives."""
        plan = self._plan(text)
        self._check_size(plan, exchange.head.length - len(text), exchange.head.route.model)
        trusted = exchange.is_trusted
        sinks = [self._sink(spec.size, trusted) for spec in plan.inputs if spec.follows]

        def whole(rest: Buffer) -> None:
            exchange.complete()
            received = map(_piece, sinks)
            pieces = [next(received) if spec.follows else self._sender.local_input(spec) for spec in plan.inputs]
            self._infer(exchange, plan, pieces)

        exchange.fill(sinks, first, whole)

    # ------------------------------------------------------------------------------------ complete requests

    def begin(self, exchange: HttpExchange, body: Buffer) -> None:
        """Answers locally or queries the broker. Raises the errors that the client receives."""
        route, refusal = exchange.head.route, exchange.head.refusal
        if isinstance(refusal, NoRoute):
            more = b"Allow: %b\r\n" % refusal.allow.encode() if refusal.allow else b""
            exchange.fail_with(refusal.status, refusal.text, more)
            return
        if refusal is not None:
            exchange.fail(refusal)
            return
        if route.action is INFER:
            try:
                self._begin_infer(exchange, body)
            except InvalidRequest as error:
                self._refuse_infer(exchange, error)
        elif route.action is GENERATE or route.action is GENERATE_STREAM:
            self._begin_generate(exchange, body)
        elif route.kind == OPENAI:
            self._begin_openai(exchange, body)
        elif route.kind == QUERY:
            self._begin_client_query(exchange, bytes(body))
        elif route.action is Action.METRICS:
            self._ask_metrics(exchange)
        elif route.action in PAGE:
            assert self._page is not None
            self._page.begin(exchange)
        elif route.action is Action.OPENAPI:
            exchange.answer(200, [openapi.text(self._openai is not None)])
        elif route.action is Action.MODEL_OPENAPI:
            self._ask_config(
                exchange, lambda config: exchange.answer(200, [_encode(model_openapi.document(route, config))])
            )
        else:
            self._begin_query(exchange, bytes(body))

    def _begin_openai(self, exchange: HttpExchange, body: Buffer) -> None:
        if len(body) > self._limits.json_bytes and not exchange.head.has_form:
            raise self._limits.json_size_error(len(body), "")
        assert self._openai is not None
        self._openai.begin(exchange, body)

    def _begin_query(self, exchange: HttpExchange, body: bytes) -> None:
        def show(document: Any) -> None:
            status, text = http_answer(document)
            exchange.answer(status, [text])

        caller = exchange.payer().caller
        question = query_of(exchange.head.route, arguments_of(exchange.head.route, body), self._sender.regions, caller)
        if isinstance(question, BrokerQuery):
            ask_for(exchange, self._link, question, show)
        else:
            show(question.document)

    def _begin_client_query(self, exchange: HttpExchange, body: bytes) -> None:
        """Passes on a query as over the lane; the client also needs the code of an error."""
        route = exchange.head.route
        what = route.action.row.query

        def show(answer: Any) -> None:
            if not is_operator(exchange.head.roles):
                remove_private(what, answer)
            exchange.answer(200, [_encode(answer)])

        def fail(error: ServeError) -> None:
            exchange.answer(http_of(error), [_encode({"error": str(error), "code": error.code})])

        passed_on = of_bytes(body) if route.action.row.changes else None
        query = BrokerQuery(what, model=route.model, version=route.version, body=passed_on)
        ticket = PendingQuery(query, show, fail)
        ask(self._link, exchange.payer(), ticket, query)
        exchange.wait_for(ticket)

    def _ask_metrics(self, exchange: HttpExchange) -> None:
        """Requests that arrive while a page is built share it. Beyond SCRAPES pages per second the last page is sent
        again."""
        scrape = self._scrape
        if scrape is None or scrape.has_failed or (not scrape.pending and self._may_scrape()):
            scrape = _Scrape(self._extra)
            ask(self._link, exchange.payer(), scrape, BrokerQuery("metrics"))
            self._scrape = scrape
        scrape.show(exchange)

    def _may_scrape(self) -> bool:
        now = self._now()
        if now >= self._scrapes_since + 1:
            self._scrapes, self._scrapes_since = 0, now
        self._scrapes += 1
        return self._scrapes <= SCRAPES

    def _ask_config(self, exchange: HttpExchange, then: Callable[[Any], None]) -> None:
        route = exchange.head.route
        ask_for_config(exchange, self._link, route.model, route.version, then)

    # ------------------------------------------------------------------------------------ inference

    def _begin_infer(self, exchange: HttpExchange, body: Buffer) -> None:
        head = exchange.head
        if head.json_length == 0:
            self._infer_raw(exchange, body)
            return
        length = len(body) if head.json_length is None else self._json_length(head, len(body))
        if length > self._limits.json_bytes:
            raise self._limits.json_size_error(length)
        if length <= SLICE_BYTES:
            self._begin_planned(exchange, body, length, self._plan(bytes(body[:length])))
            return
        exchange.work(
            plan_in_slices(memoryview(body)[:length], self._limits.input_bytes),
            lambda plan: self._begin_planned(exchange, body, length, plan),
            lambda error: self._refuse_infer(exchange, error),
        )

    def _refuse_infer(self, exchange: HttpExchange, error: ServeError) -> None:
        """Refuses a body. As in Triton, an unknown model is reported first."""

        def refuse(answer: Any) -> None:
            exchange.fail(answer if isinstance(answer, NotFound) else error)

        if not isinstance(error, InvalidRequest):
            exchange.fail(error)
            return
        query = BrokerQuery("config", model=exchange.head.route.model, version=exchange.head.route.version)
        ticket = PendingQuery(query, refuse, refuse)
        try:
            ask(self._link, exchange.payer(), ticket, query)
        except ServeError:  # whether the model exists remains unknown
            exchange.fail(error)
            return
        exchange.wait_for(ticket)

    def _begin_planned(self, exchange: HttpExchange, body: Buffer, at: int, plan: RequestPlan) -> None:
        """`at`: offset of the binary data in `body`."""
        self._check_size(plan, len(body) - at, exchange.head.route.model)
        if len(body) > SLICE_BYTES:
            body = memoryview(body)  # slicing a view does not copy
        pieces: list[Piece] = []
        for spec in plan.inputs:
            if not spec.follows:
                pieces.append(self._sender.local_input(spec))
            else:
                pieces.append(body[at : at + spec.size])
                at += spec.size
        if len(body) > COPY_BYTES:
            work = self._sender.placed(pieces)
            exchange.work(work, lambda placed: self._infer(exchange, plan, placed))
        else:
            self._infer(exchange, plan, pieces)

    def _json_length(self, head: HttpHead, size: int) -> int:
        length = head.json_length or 0
        if length > size:
            raise InvalidRequest(f"Inference-Header-Content-Length is {length}, but the body has {size} bytes")
        return length

    def _check_size(self, plan: RequestPlan, size: int, model: str) -> None:
        if plan.binary_bytes != size:
            too_few = plan.binary_bytes > size
            text = "unexpected size for input data of" if too_few else "unexpected additional input data for"
            raise InvalidRequest(
                f"{text} model '{model}': {plan.binary_bytes} bytes should follow the JSON, but {size} do"
            )

    def _infer(self, exchange: HttpExchange, plan: RequestPlan, pieces: list[Piece]) -> None:
        sender, route, request_id = self._sender, exchange.head.route, plan.options.id
        ticket = _Inference(exchange, route.model, plan, sender.output_regions(plan))
        try:
            sender.infer(ticket, model_request(exchange, route.model, route.version, plan, pieces))
        except ServeError as error:
            exchange.fail(error, request_id)
            return
        exchange.wait_for(ticket)

    def _begin_generate(self, exchange: HttpExchange, body: Buffer) -> None:
        route, link = exchange.head.route, self._link
        as_events = route.action is GENERATE_STREAM
        if exchange.head.encoding:
            raise Unsupported(f"Unsupported compression type '{exchange.head.encoding[:40]}': generate supports none")
        if as_events and exchange.head.old:
            raise Unsupported("generate_stream requires HTTP/1.1")
        if len(body) > self._limits.json_bytes and not exchange.head.has_form:
            raise self._limits.json_size_error(len(body))

        def send(config: Any, planned: tuple[RequestPlan, list[Piece]]) -> None:
            plan, pieces = planned
            ticket = _Generation(exchange, link, route.model, plan, config, as_events)
            self._sender.infer(ticket, model_request(exchange, route.model, route.version, plan, pieces), WINDOW)
            exchange.wait_for(ticket, ticket.on_part)

        def proceed(request: GenerateRequest | GenerateForm) -> None:
            self._ask_config(
                exchange,
                lambda config: exchange.work(self._generate_plan(exchange, request, config), partial(send, config)),
            )

        if exchange.head.has_form:
            exchange.work(form_of(body), lambda form: proceed(GenerateForm(form)))
            return
        if len(body) > SLICE_BYTES:
            exchange.work(large_request(bytes(body)), proceed)
        else:
            proceed(GenerateRequest(bytes(body)))

    def _generate_plan(
        self, exchange: HttpExchange, request: GenerateRequest | GenerateForm, config: Any
    ) -> SlicedWork[tuple[RequestPlan, list[Piece]]]:
        plan = yield from request.plan(config, exchange.hold)
        pieces = yield from self._sender.placed([b"" if spec.data is None else spec.data for spec in plan.inputs])
        return plan, pieces

    def _infer_raw(self, exchange: HttpExchange, body: Piece) -> None:
        """An infer request without JSON: the model's configuration gives the tensor's name, type and shape."""
        route = exchange.head.route

        def proceed(config: Any) -> None:
            plan, prefix = raw_plan(route.model, config, len(body))
            piece = body if not prefix else prefix + bytes(body)
            self._infer(exchange, plan, [piece])

        self._ask_config(exchange, proceed)


def make_listener(
    link: GatewayLink, limits: HttpLimits, guard: Guard, regions: Regions, budget: Budget, openai: bool
) -> HttpListener:
    """The listener of the API and of the web page. `openai`: with the OpenAI-compatible endpoints."""
    access = guard.access
    servers = access.browsers.servers
    feed = PageFeed(link, servers)
    requests = Requests(link, limits, lambda: "", regions, PageRequests(link, feed, servers), openai)
    routes = API_ROUTES if openai else KSERVE_ROUTES
    heads = HttpHeads(access, routes, HeaderParameters(guard.forward, lambda: link.session.wants_trace_context))
    return _listener(link, limits, heads, requests, budget, feed)


def make_metrics_listener(
    link: GatewayLink, limits: HttpLimits, access: EndpointAccess, extra: Callable[[], str]
) -> HttpListener:
    """The listener of the Prometheus endpoint. `extra`: text appended to the broker's metrics."""
    requests = Requests(link, limits, extra, Regions(False), None, openai=False)
    return _listener(link, limits, HttpHeads(access, METRICS_ROUTES), requests, Budget(), None)


def _listener(
    link: GatewayLink, limits: HttpLimits, heads: HttpHeads, requests: Requests, budget: Budget, feed: PageFeed | None
) -> HttpListener:
    def connect(listener: HttpListener, client: str) -> HttpConnection:
        return HttpConnection(listener, requests, client)

    return HttpListener(link, connect, limits, heads, budget, feed)
