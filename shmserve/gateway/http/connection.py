"""One HTTP/1.1 connection: a state machine without coroutines or tasks, driven by received bytes and by callbacks.

`HttpConnection` reads requests and processes one at a time, which is an `HttpExchange`: what the request waits for, and
its response, in one piece or as events.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from shmserve.errors import ServeError, Unsupported
from shmserve.gateway.auth.actions import ANTHROPIC, INFER
from shmserve.gateway.http import bodies
from shmserve.gateway.http.heads import NO_HEAD, BadHead, HttpHead, HttpHeads, work_of
from shmserve.gateway.http.limits import AHEAD_BYTES, HEAD_BYTES, HttpLimits
from shmserve.gateway.kserve.answers import Buffer, size_of
from shmserve.gateway.kserve.status import REASONS, http_of, http_text_of
from shmserve.gateway.limits.backlog import REQUEST_WORK, SENT_BYTES
from shmserve.gateway.limits.body_budget import Budget
from shmserve.gateway.limits.caller_shares import Payer
from shmserve.gateway.limits.turns import FairReader, SlicedJob, SlicedWork
from shmserve.gateway.listeners.callers import TURNS, EndpointListener, peer_address
from shmserve.gateway.openai import errors as openai_errors
from shmserve.gateway.openai.errors import KIND as OPENAI
from shmserve.gateway.page.feed import PageFeed
from shmserve.gateway.upstream.documents import error_body
from shmserve.gateway.upstream.exchange import JSON, Watcher
from shmserve.gateway.upstream.link import GatewayLink
from shmserve.gateway.upstream.receive import SCRATCH, SMALL_SCRATCH, TRUSTED_BYTES, ReceiveBuffer
from shmserve.gateway.upstream.requests import Charge, serve_error, withdraw
from shmserve.protocol.actions import Action


class HttpListener(EndpointListener):
    """`feed`: the streams of the web page, which end when access rules have changed; None: the listener serves no
    page. For the other arguments, see `EndpointListener`."""

    def __init__(
        self,
        link: GatewayLink,
        connect: Callable[[HttpListener, str], Any],
        limits: HttpLimits,
        heads: HttpHeads,
        budget: Budget,
        feed: PageFeed | None,
    ) -> None:
        super().__init__(link, connect, limits, limits.read_timeout_s / TURNS, budget)
        self.limits = limits
        self.heads = heads
        self._feed = feed

    async def open(self, address: str, port: int, share: bool, tls: ssl.SSLContext | None = None) -> int:
        bound_port = await super().open(address, port, share, tls)
        if self._feed is not None:
            self._feed.start()
        return bound_port

    async def close(self) -> None:
        if self._feed is not None:
            self._feed.stop()
        await super().close()

    async def renew(self, tls: ssl.SSLContext | None) -> None:
        self.heads.forget()
        if self._feed is not None:
            self._feed.end()
        await super().renew(tls)


T = TypeVar("T")
HEAD, FILL, CHUNKS, BUSY, DRAIN = range(5)
"""Phases of a connection:

    HEAD    waiting for the head of a request
    FILL    reading the body into its final place: for an infer request with binary data first the JSON, then each
            large tensor into shared memory
    CHUNKS  assembling a chunked body
    BUSY    the request is being processed; bytes received now belong to the next requests
    DRAIN   the last response is sent; further input is discarded, so that the client can read the response
"""
JOINED_BYTES = 64 * 1024
"""Responses up to this size are joined into one buffer."""
COMPRESSED_BYTES = 1024
"""Responses below this size are not compressed."""
_COMPRESSED = frozenset({INFER, Action.METRICS})
"""Actions whose responses are compressed for clients that accept it."""
LARGE_BYTES = 64 * 1024
"""After a body of at least this size, another large one is expected."""
_CR = ord("\r")
_VIEWED_BYTES = 16 * 1024
"""Bodies of at least this size are views of the received bytes, not copies."""


class RequestHandler(Protocol):
    """Receives requests from connections. An exception raised by either method becomes the response."""

    def prepare(self, exchange: HttpExchange, first: Buffer) -> None:
        """Calls `HttpExchange.fill` with the buffers for the body, of which only `first` has arrived."""

    def begin(self, exchange: HttpExchange, body: Buffer) -> None:
        """Handles a complete request."""


class HttpExchange:
    """One request of a connection, and its response. Once the request is over, nothing that is sent for it reaches the
    client."""

    __slots__ = ("_connection", "_jobs", "_ticket", "head", "resume", "watcher")

    def __init__(self, connection: HttpConnection, head: HttpHead) -> None:
        self._connection = connection
        self.head = head
        self._ticket: Charge | None = None
        self._jobs: Sequence[SlicedJob] = ()
        self.resume: Callable[[], None] | None = None
        """Called when the transport is writable again, for a response in parts."""
        self.watcher: Watcher | None = None

    @property
    def address(self) -> str:
        """The caller's address."""
        return self._connection.shares.address(self.head.caller)

    # ------------------------------------------------------------------------------------ the body

    def fill(self, sinks: Sequence[ReceiveBuffer], first: Buffer, then: Callable[[Buffer], None]) -> None:
        """Reads until all `sinks` are full, starting with `first`, then calls `then` with the rest of `first`."""
        self._connection.fill(sinks, first, then)

    @property
    def is_trusted(self) -> bool:
        """Whether memory for the body may be allocated before it arrives."""
        return self.head.length <= self._connection.trusted_bytes

    def complete(self) -> None:
        """The body is complete."""
        self._connection.complete(self.head.length)

    def whole(self, body: Buffer) -> None:
        """Handles the request, whose body is complete."""
        self._connection.whole(body)

    def abort(self) -> None:
        self._connection.abort()

    # ------------------------------------------------------------------------------------ what the request waits for

    def work(
        self, work: SlicedWork[T], then: Callable[[T], None], failed: Callable[[ServeError], None] | None = None
    ) -> None:
        """Runs `work` in slices that alternate with those of other connections, then calls `then` with its result.
        Exceptions of `work` go to `failed` if given, and otherwise become the response."""

        def stopped(error: Exception) -> None:
            (failed or self.fail)(serve_error(error))

        self._ticket = None  # the broker has answered: there is nothing to cancel
        job = self._connection.listener.turns.run(work, then, stopped)
        if job.running:
            self._jobs = [*[one for one in self._jobs if one.running], job]

    def payer(self) -> Payer:
        """The account charged for requests to the broker."""
        return self._connection.shares.payer(self.head.token, self.head.caller)

    def hold(self, size: int) -> None:
        """Counts bytes that the current request makes, until it has been answered. Raises Unavailable if a share would
        be exceeded."""
        self._connection.account.take(size)

    def wait_for(self, ticket: Charge, resume: Callable[[], None] | None = None) -> None:
        self._ticket = ticket
        self.resume = resume

    def watch(self, viewer: Watcher, resume: Callable[[], None] | None = None) -> None:
        self.watcher = viewer
        self.resume = resume

    def drop(self) -> None:
        """Cancels the request: the client has disconnected or will not get a response."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            withdraw(self._connection.listener.link, ticket)
        jobs, self._jobs = self._jobs, ()
        for job in jobs:
            job.cancel()
        watcher, self.watcher = self.watcher, None
        if watcher is not None:
            watcher.disconnected()
        self.resume = None

    def forget(self) -> None:
        """The request is over: what it waited for refers to it, and such a cycle would keep its memory alive."""
        self._ticket = self.resume = self.watcher = None
        self._jobs = ()

    @property
    def _is_openai(self) -> bool:
        return self.head.route.kind == OPENAI

    @property
    def _is_over(self) -> bool:
        return self._connection.exchange is not self

    # ------------------------------------------------------------------------------------ responses

    def fail(self, error: ServeError, request_id: str = "", more: bytes = b"") -> None:
        if self._is_openai:
            status, body = openai_errors.response(error)
        else:
            status, body = http_of(error), error_body(http_text_of(error, request_id))
        if status == 401:
            more += b"WWW-Authenticate: Bearer\r\n"
        self._answer_error(status, body, more)

    def fail_with(self, status: int, text: str, more: bytes = b"") -> None:
        """Answers with an error for which there is no class."""
        self._answer_error(status, openai_errors.body(status, text) if self._is_openai else error_body(text), more)

    def _answer_error(self, status: int, body: bytes, more: bytes) -> None:
        if self.head.route.action in ANTHROPIC:
            body = openai_errors.anthropic_body(body)
        self.answer(status, [body], more=more)

    def answer(
        self, status: int, parts: list[Buffer], kind: bytes = JSON, json_length: int | None = None, more: bytes = b""
    ) -> None:
        """Sends a response and continues with the next request."""
        head = self.head
        self._ticket = None
        if self._is_over:
            return
        size = sum([len(part) for part in parts])
        if head.accepts and size >= COMPRESSED_BYTES and head.route.action in _COMPRESSED:
            more += b"Content-Encoding: %b\r\n" % head.accepts.encode()
            self.work(
                bodies.deflate_body(head.accepts, parts),
                lambda data: self._send(status, [data], len(data), kind, json_length, more),
            )
        else:
            self._send(status, parts, size, kind, json_length, more)

    def _send(
        self, status: int, parts: list[Buffer], size: int, kind: bytes, json_length: int | None, more: bytes
    ) -> None:
        connection, head = self._connection, self.head
        if size > JOINED_BYTES:
            try:
                connection.account.answer(size)
            except ServeError as error:
                self.fail(error)
                return
        unread = connection.phase != BUSY
        if head.reader:
            more += _readable_by(head.reader)
        if json_length is not None:
            more += b"Inference-Header-Content-Length: %d\r\n" % json_length
        if not connection.keep_alive or unread:
            more += b"Connection: close\r\n"
        lines = b"HTTP/1.1 %d %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n%b\r\n" % (
            status,
            REASONS[status].encode(),
            kind,
            size,
            more,
        )
        if head.is_head:
            parts = []  # HEAD: the same headers, without the body
        connection.listener.answered(status)
        if size <= JOINED_BYTES:
            connection.transport.write(b"".join([lines, *parts]))
        else:
            connection.transport.writelines([lines, *parts])
        connection.end(unread, size // SENT_BYTES)

    # ------------------------------------------------------------------------------------ responses in parts

    @property
    def writable(self) -> bool:
        """Whether the client is connected and reads what is sent to it."""
        return self._connection.writable and not self._is_over

    def begin_events(self, status: int = 200, more: bytes = b"", first: bytes = b"") -> None:
        """`first`: events to send with the head."""
        connection = self._connection
        connection.listener.answered(status)
        if self.head.reader:
            more += _readable_by(self.head.reader)
        if not connection.keep_alive:
            more += b"Connection: close\r\n"
        connection.transport.write(
            b"HTTP/1.1 %d %b\r\nContent-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-cache\r\n"
            b"Transfer-Encoding: chunked\r\n%b\r\n%b" % (status, REASONS[status].encode(), more, _chunk(first))
        )

    def send_event(self, data: bytes) -> None:
        self._connection.transport.write(_chunk(data))

    def send_large_event(self, parts: list[Buffer]) -> None:
        """Sends an event whose bytes were counted by `hold`, which it frees when the client has read it."""
        connection = self._connection
        connection.account.keep_until_sent()
        connection.transport.writelines([b"%x\r\n" % size_of(parts), *parts, b"\r\n"])
        if connection.writable:
            connection.account.sent()

    def end_events(self, last: bytes = b"") -> None:
        """`last`: events to send before the end."""
        self._ticket = self.watcher = None
        self._connection.transport.write(_chunk(last) + b"0\r\n\r\n")
        self._connection.end(unread=False)


def _readable_by(origin: str) -> bytes:
    """The header by which a browser shows a response to a page of another origin."""
    return b"Access-Control-Allow-Origin: %b\r\nVary: Origin\r\n" % origin.encode()


def _chunk(data: bytes) -> bytes:
    """A chunk of a chunked body. Returns nothing for no data, as an empty chunk would end the body."""
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


class HttpConnection(FairReader, asyncio.BufferedProtocol):
    """`exchange`: the request whose head was read last, until its response is sent. `client`: the client's address, if
    a PROXY header named it."""

    def __init__(self, listener: HttpListener, handler: RequestHandler, client: str = "") -> None:
        super().__init__()
        self.listener = listener
        self.exchange: HttpExchange | None = None
        self.phase = HEAD
        self.keep_alive = True
        self.writable = True
        self.shares = listener.shares.connect("")
        self.account = listener.budget.account("")
        self.turn = listener.turn
        """Turn of the slow clock at which progress was last made."""
        self._work = 0
        """Work left for this connection in this iteration of the loop."""
        self._handler = handler
        self._backlog = listener.backlog
        self._rest = b""
        self.address = client
        """The client's address."""
        self._sink: ReceiveBuffer | None = None
        self._sinks: list[ReceiveBuffer] = []
        """Buffers to fill after `_sink`, in reverse order."""
        self._then: Callable[[Buffer], None] | None = None
        self.trusted_bytes = 0
        """Size of the last large body: the next one of this size gets its memory at once."""
        self._chunks: bodies.Chunks | None = None
        self._idle_since = listener.now()
        self.spent = 0
        """Set by the backlog."""
        self._taking = False
        """`_take` is running."""
        self._delayed = False
        """The backlog continues with `_rest`."""
        self._moved = 0
        self._unsent = 0

    # ------------------------------------------------------------------------------------ asyncio callbacks

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.address = self.address or peer_address(transport)
        self.shares = self.listener.shares.connect(self.address)
        self.account = self.listener.budget.account(self.address)
        if not self.listener.enter(self):
            self._refuse(503, "too many connections; the limit is --limit http_connections")
            transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.listener.leave(self)
        self._drop()
        self.account.sent()
        self.shares.close()
        self.transport = None

    def eof_received(self) -> bool:
        """Closing the connection cancels the request."""
        if self.phase == BUSY:
            self._drop()
        return False

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        self.writable = True
        self.account.sent()
        if self.exchange is not None and self.exchange.resume is not None:
            self.exchange.resume()
        else:
            self._go_on()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._sink is not None:
            return self.listener.reads.bounded(self, self._sink.space())
        return SMALL_SCRATCH if self.trusted_bytes and self.phase == HEAD else SCRATCH

    def buffer_updated(self, count: int) -> None:
        if self.phase == FILL:
            self._moved += count
            self._fill(count)
            if self.phase == FILL:
                self.listener.reads.count(self, count)
            return
        if self.phase == DRAIN:
            return
        if self.phase == CHUNKS:
            self.listener.reads.count(self, count)
        data = bytes(SCRATCH[:count])
        if self._rest:
            data = self._rest + data
            self._rest = b""
        else:
            self.turn = self.listener.turn  # the timeout of a head that arrives in pieces starts with the first
        self._moved += count
        if self._delayed:
            self._keep(data)
        elif self._take(data):
            self._backlog.put(self)

    @property
    def may_read(self) -> bool:
        return len(self._rest) <= AHEAD_BYTES

    # ------------------------------------------------------------------------------------ received bytes

    def _take(self, data: bytes) -> bool:
        """Processes requests up to the limits of this iteration of the loop. True: input is left that could be
        processed now."""
        backlog = self._backlog
        self._work = allowed = backlog.allowed
        self._taking = True
        at: int | None = 0
        size = len(data)
        while at is not None and at < size and self.writable and self._work > 0:
            if self.phase == HEAD:
                at = self._begin(data, at, size)
            elif self.phase == CHUNKS:
                at = self._go_on_with_chunks(data, at, size)
            else:
                break
        self._taking = False
        backlog.spend(self, allowed - self._work)
        if at is None or at == size or self.phase == DRAIN:
            self._delayed = False
            return False
        self._delayed = self.writable and self.phase in (HEAD, CHUNKS)
        self._keep(data[at:])
        return self._delayed

    def _keep(self, rest: bytes) -> None:
        """Keeps bytes until the requests before them have been processed."""
        self._rest = rest
        if len(rest) > AHEAD_BYTES and self._reading:
            self.pause()

    def _begin(self, data: bytes, at: int, size: int) -> int | None:
        """Parses the head at this offset and takes the part of the body that has arrived. Returns the offset of the
        next request; None: nothing is left to parse."""
        if data[at] == _CR and data.startswith(b"\r\n", at):
            self._work -= 1
            return at + 2
        end = data.find(b"\r\n\r\n", at) + 4
        try:
            if end < 4 or end - at > HEAD_BYTES:
                if size - at > HEAD_BYTES:
                    raise BadHead(431, f"the request headers exceed {HEAD_BYTES} bytes")
                self._rest = data[at:]
                self._work -= 1
                return None
            head = self.listener.heads.head(data[at:end])
        except BadHead as error:
            self._work -= work_of(data[at:end])
            self._refuse(error.status, str(error))
            return None
        self._work -= head.work
        self.exchange = HttpExchange(self, head)
        if self.shares.is_of_proxy:
            self.account.count_for(self.exchange.address)
        self.keep_alive = head.keep_alive and not self.listener.stopping
        limit = self.listener.limits.input_bytes
        if head.length > limit:
            self._refuse_for(bodies.content_length_error(head, self.listener.limits))
            return None
        until = end + head.length
        if not head.chunked and size >= until:
            self.phase = BUSY
            self._work -= head.body_work
            self.whole(data[end:until] if head.length < _VIEWED_BYTES else memoryview(data)[end:until])
            return until
        if head.refusal is not None:
            self._refused()  # without reading the body
            return None
        if head.expects and size == end:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if head.chunked:
            self.phase = CHUNKS
            self._chunks = bodies.Chunks(limit)
            return end
        self._fill_body(data[end:] if size - end < _VIEWED_BYTES else memoryview(data)[end:])
        return None

    def _refused(self) -> None:
        try:
            self._handler.begin(self._request, b"")
        except ServeError as error:
            self._refuse_for(error)

    def _go_on_with_chunks(self, data: bytes, at: int, size: int) -> int | None:
        chunks = self._chunks
        assert chunks is not None
        before, lines = len(chunks.body), chunks.lines
        try:
            unparsed = chunks.feed(data[at:] if at else data, self._work)
            self.account.take(len(chunks.body) - before)
        except ServeError as error:
            self._refuse_for(error)
            return None
        self._work -= chunks.lines - lines
        at = size - len(unparsed)
        if not chunks.done:
            if self._work > 0:
                self._rest = unparsed  # an incomplete line
                return None
            return at
        self._chunks = None
        self.phase = BUSY
        self.whole(chunks.body)
        return at

    # ------------------------------------------------------------------------------------ bodies read in place

    def _fill_body(self, first: Buffer) -> None:
        try:
            self.account.take(len(first))
            self._handler.prepare(self._request, first)
        except Exception as error:
            self._refuse_for(serve_error(error))

    def fill(self, sinks: Sequence[ReceiveBuffer], first: Buffer, then: Callable[[Buffer], None]) -> None:
        self.phase = FILL
        self._sinks = list(reversed(sinks))
        self._then = then
        self._next_sink(first)

    def _fill(self, count: int) -> None:
        sink = self._sink
        if sink is None:
            return
        try:
            self.account.take(count)
            sink.add(count)
            if sink.full:
                self._next_sink(b"")
        except ServeError as error:
            self._refuse_for(error)

    def _next_sink(self, first: Buffer) -> None:
        self._sink = None
        while self._sinks:
            sink = self._sinks.pop()
            first = first[sink.begin(first) :]
            if not sink.full:
                self._sink = sink
                return
        then, self._then = self._then, None
        assert then is not None
        try:
            then(first)
        except Exception as error:
            if self.phase == BUSY:
                self._request.fail(serve_error(error))
            else:
                self._refuse_for(serve_error(error))

    def complete(self, size: int) -> None:
        self.phase = BUSY
        self.trusted_bytes = min(size, TRUSTED_BYTES) if size >= LARGE_BYTES else 0

    # ------------------------------------------------------------------------------------ complete requests

    def whole(self, body: Buffer) -> None:
        exchange = self._request
        head = exchange.head
        if not head.encoding:
            try:
                self._handler.begin(exchange, body)
            except Exception as error:
                exchange.fail(serve_error(error))
            return

        def failed(error: ServeError) -> None:
            exchange.fail(error, more=b"Accept-Encoding: gzip, deflate\r\n" if isinstance(error, Unsupported) else b"")

        begin, limits = self._handler.begin, self.listener.limits
        limit, flag = limits.input_bytes, "--http-max-input-size"
        is_json = head.route.kind == OPENAI or (head.route.action is INFER and head.json_length is None)
        if is_json and limits.json_bytes < limit:
            limit, flag = limits.json_bytes, "--limit http_json_bytes"
        exchange.work(
            bodies.inflate_body(head.encoding, body, limit, flag, self.account.take),
            lambda inflated: begin(exchange, inflated),
            failed,
        )

    # ------------------------------------------------------------------------------------ the next request

    @property
    def _request(self) -> HttpExchange:
        """The current request. A client is also answered if the head of its request cannot be read."""
        if self.exchange is None:
            self.exchange = HttpExchange(self, NO_HEAD)
        return self.exchange

    def _drop(self) -> None:
        """Cancels the current request."""
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.drop()
        self._clear_request()

    def _clear_request(self) -> None:
        self._sink = self._then = self._chunks = None
        self._sinks = []
        self.account.used()

    def end(self, unread: bool, work: int = 0) -> None:
        """The response has been sent, which took this work. `unread`: the body was not read to its end."""
        self._work -= work
        self.turn = self.listener.turn
        if self.exchange is not None:
            self.exchange.forget()
            self.exchange = None
        if self.writable:
            self.account.sent()
        self._clear_request()
        if unread:
            self._drain()
        elif not self.keep_alive:
            self.phase = DRAIN
            self.transport.close()
        else:
            self.phase = HEAD
            self._idle_since = self.listener.now()
            if (self._rest or not self._reading) and not self._taking:
                self.listener.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        """Continues with bytes received while a request was processed or the transport was not writable."""
        if not self._delayed and self._go_on_with_rest():
            self._backlog.put(self)

    def proceed(self) -> bool:
        """Continues with input that was delayed. True: input is left."""
        self._delayed = False
        delayed = self._go_on_with_rest()
        if self.listener.stopping and not delayed:
            self.stop()
        return delayed

    def _go_on_with_rest(self) -> bool:
        if self.transport is None or self.phase in (BUSY, FILL, DRAIN):
            return False
        data, self._rest = self._rest, b""
        self.turn = self.listener.turn
        delayed = self._take(data)
        self.resume()
        return delayed

    @property
    def estimate(self) -> int:
        return REQUEST_WORK

    def _refuse_for(self, error: ServeError) -> None:
        self.phase = FILL
        self._request.fail(error)

    def _refuse(self, status: int, text: str) -> None:
        """Answers a request whose body was not read to its end; the connection cannot be used again."""
        self.phase = FILL
        self._request.fail_with(status, text)

    def _drain(self) -> None:
        self.phase = DRAIN
        self._rest = b""
        self.turn = self.listener.turn
        if self.transport.can_write_eof():
            self.transport.write_eof()

    # ------------------------------------------------------------------------------------ timeouts

    def check_timeouts(self, waited: int) -> None:
        """Called on every turn of the slow clock. `waited`: number of turns without enough progress after which a
        client times out."""
        transport, listener = self.transport, self.listener
        if transport is None:
            return
        unsent = transport.get_write_buffer_size()
        taken = self._unsent - unsent
        if unsent and (taken < 0 or taken >= listener.min_bytes):
            self.turn = listener.turn
        if self._moved >= listener.min_bytes and self.phase in (FILL, CHUNKS):
            self.turn = listener.turn
        self._unsent, self._moved = unsent, 0
        quiet = listener.turn - self.turn
        if self.phase == DRAIN or unsent:
            if quiet > waited:
                transport.abort()
        elif self.phase == FILL or self.phase == CHUNKS or (self.phase == HEAD and self._rest):
            if quiet > waited:
                self._refuse(408, "the request was not complete in time; the limit is --limit http_read_secs")
        elif self.phase == HEAD and quiet > listener.idle_turns:
            transport.close()

    def stop(self) -> None:
        """Accepts no more requests after the current one, or after one more if the connection is idle and may stay."""
        if self.phase == HEAD and self.listener.limits.keep_idle:
            return
        self.keep_alive = False
        if self.exchange is not None and self.exchange.watcher is not None:
            self.exchange.watcher.stop()
        if self.phase in (HEAD, DRAIN) and self.transport is not None and not self._delayed:
            self.transport.close()

    def give_up(self, error: ServeError) -> None:
        if self.phase in (FILL, CHUNKS):
            self._refuse_for(error)
        elif self.phase == HEAD and self.transport is not None:
            self.transport.close()

    @property
    def idle_since(self) -> float | None:
        transport = self.transport
        if transport is None or self.phase == BUSY:
            return None
        idle = self.phase == HEAD and not self._rest and not transport.get_write_buffer_size()
        return self._idle_since if idle or self.listener.turn - self.turn > 1 else None

    def evict(self) -> None:
        self.abort()
