"""One HTTP/1.1 connection: a state machine without coroutines or tasks, driven by received bytes and by callbacks.

It reads requests and processes one at a time; `exchange` has the current request and its response.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from shmserve.errors import ServeError, Unsupported
from shmserve.gateway.auth.actions import INFER
from shmserve.gateway.http import bodies
from shmserve.gateway.http.exchange import BUSY, CHUNKS, DRAIN, FILL, HEAD, HttpExchange
from shmserve.gateway.http.heads import BadHead, HttpHead, work_of
from shmserve.gateway.http.limits import AHEAD_BYTES, HEAD_BYTES
from shmserve.gateway.http.listener import HttpListener
from shmserve.gateway.kserve.answers import Buffer
from shmserve.gateway.limits.backlog import REQUEST_WORK
from shmserve.gateway.listeners.callers import peer_address
from shmserve.gateway.upstream.receive import TRUSTED_BYTES, ReceiveBuffer

_scratch = memoryview(bytearray(256 * 1024))
"""Receive buffer shared by all connections: each copies its bytes out before the next one reads."""
_little = _scratch[: 4 * 1024]
"""Receive buffer when a large body is expected: only its start is read here, the rest directly into its final
buffer."""
LARGE_BYTES = 64 * 1024
"""After a body of at least this size, another large one is expected."""
_CR = ord("\r")
_VIEWED_BYTES = 16 * 1024
"""Bodies of at least this size are views of the received bytes, not copies."""


class RequestHandler(Protocol):
    """Receives requests from connections. A ServeError raised by either method becomes the response."""

    def prepare(self, connection: HttpConnection, head: HttpHead, first: Buffer) -> None:
        """Calls `HttpConnection.fill` with the buffers for the body, of which only `first` has arrived."""

    def begin(self, connection: HttpConnection, head: HttpHead, body: Buffer) -> None:
        """Handles a complete request."""


class HttpConnection(HttpExchange, asyncio.BufferedProtocol):
    def __init__(self, listener: HttpListener, handler: RequestHandler) -> None:
        super().__init__(listener)
        self._handler = handler
        self._backlog = listener.backlog
        self._rest = b""
        self.address = ""
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
        self._transport = transport
        address = peer_address(transport)
        self.address = address
        self._shares = self._listener.shares.connect(address)
        self._account = self._listener.budget.account(address)
        if not self._listener.enter(self):
            self._refuse(503, "too many connections; --http-max-connections of the gateway is the limit")
            transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._listener.leave(self)
        self._drop()
        self._account.sent()
        if self._shares is not None:
            self._shares.close()
        self._transport = None

    def eof_received(self) -> bool:
        """Closing the connection cancels the request."""
        if self._phase == BUSY:
            self._drop()
        return False

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        self._account.sent()
        if self._resume is not None:
            self._resume()
        else:
            self._go_on()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._sink is not None:
            return self._listener.reads.bounded(self, self._sink.space())
        return _little if self.trusted_bytes and self._phase == HEAD else _scratch

    def buffer_updated(self, count: int) -> None:
        if self._phase == FILL:
            self._moved += count
            self._fill(count)
            if self._phase == FILL:
                self._listener.reads.count(self, count)
            return
        if self._phase == DRAIN:
            return
        if self._phase == CHUNKS:
            self._listener.reads.count(self, count)
        data = bytes(_scratch[:count])
        if self._rest:
            data = self._rest + data
            self._rest = b""
        else:
            self.turn = self._listener.turn  # the timeout of a head that arrives in pieces starts with the first
        self._moved += count
        if self._delayed:
            self._keep(data)
        elif self._take(data):
            self._backlog.put(self)

    @property
    def _may_read(self) -> bool:
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
        while at is not None and at < size and self._writable and self._work > 0:
            if self._phase == HEAD:
                at = self._begin(data, at, size)
            elif self._phase == CHUNKS:
                at = self._go_on_with_chunks(data, at, size)
            else:
                break
        self._taking = False
        backlog.spend(self, allowed - self._work)
        if at is None or at == size or self._phase == DRAIN:
            self._delayed = False
            return False
        self._delayed = self._writable and self._phase in (HEAD, CHUNKS)
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
            head = self._listener.heads.head(data[at:end])
        except BadHead as error:
            self._work -= work_of(data[at:end])
            self._refuse(error.status, str(error))
            return None
        self._work -= head.work
        self._head = head
        self._keep_alive = head.keep_alive and not self._listener.stopping
        limit = self._listener.limits.input_bytes
        if head.length > limit:
            self._refuse_for(bodies.content_length_error(head, self._listener.limits))
            return None
        until = end + head.length
        if not head.chunked and size >= until:
            self._phase = BUSY
            self._work -= head.body_work
            self.whole(data[end:until] if head.length < _VIEWED_BYTES else memoryview(data)[end:until])
            return until
        if head.refusal is not None:
            self._refused(head)  # without reading the body
            return None
        if head.expects and size == end:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if head.chunked:
            self._phase = CHUNKS
            self._chunks = bodies.Chunks(limit)
            return end
        self._fill_body(head, data[end:] if size - end < _VIEWED_BYTES else memoryview(data)[end:])
        return None

    def _refused(self, head: HttpHead) -> None:
        try:
            self._handler.begin(self, head, b"")
        except ServeError as error:
            self._refuse_for(error)

    def _go_on_with_chunks(self, data: bytes, at: int, size: int) -> int | None:
        chunks = self._chunks
        assert chunks is not None
        before, lines = len(chunks.body), chunks.lines
        try:
            left = chunks.feed(data[at:] if at else data, self._work)
            self._account.take(len(chunks.body) - before)
        except ServeError as error:
            self._refuse_for(error)
            return None
        self._work -= chunks.lines - lines
        at = size - len(left)
        if not chunks.done:
            if self._work > 0:
                self._rest = left  # an incomplete line
                return None
            return at
        self._chunks = None
        self._phase = BUSY
        self.whole(chunks.body)
        return at

    # ------------------------------------------------------------------------------------ bodies read in place

    def _fill_body(self, head: HttpHead, first: Buffer) -> None:
        try:
            self._account.take(len(first))
            self._handler.prepare(self, head, first)
        except ServeError as error:
            self._refuse_for(error)

    def fill(self, sinks: Sequence[ReceiveBuffer], first: Buffer, then: Callable[[Buffer], None]) -> None:
        """Reads until all `sinks` are full, starting with `first`, then calls `then` with the rest of `first`."""
        self._phase = FILL
        self._sinks = list(reversed(sinks))
        self._then = then
        self._next_sink(first)

    def _fill(self, count: int) -> None:
        sink = self._sink
        if sink is None:
            return
        try:
            self._account.take(count)
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
        except ServeError as error:
            if self._phase == BUSY:
                self.fail(error)
            else:
                self._refuse_for(error)

    def trusts(self, head: HttpHead) -> bool:
        """Whether memory for the body may be allocated before it arrives."""
        return head.length <= self.trusted_bytes

    def complete(self) -> None:
        """The body is complete."""
        self._phase = BUSY
        size = self._head.length if self._head is not None else 0
        self.trusted_bytes = min(size, TRUSTED_BYTES) if size >= LARGE_BYTES else 0

    # ------------------------------------------------------------------------------------ complete requests

    def whole(self, body: Buffer) -> None:
        head = self._head
        assert head is not None
        if not head.encoding:
            try:
                self._handler.begin(self, head, body)
            except ServeError as error:
                self.fail(error)
            return

        def failed(error: ServeError) -> None:
            self.fail(error, more=b"Accept-Encoding: gzip, deflate\r\n" if isinstance(error, Unsupported) else b"")

        begin, limits = self._handler.begin, self._listener.limits
        limit, flag = limits.input_bytes, "--http-max-input-size"
        is_json = self._is_openai or (head.route.action is INFER and head.json_length is None)
        if is_json and limits.json_bytes < limit:
            limit, flag = limits.json_bytes, "--http-max-json-size"
        self.work(
            bodies.inflate_body(head.encoding, body, limit, flag, self._account.take),
            lambda found: begin(self, head, found),
            failed,
        )

    # ------------------------------------------------------------------------------------ the next request

    def _clear_request(self) -> None:
        self._sink = self._then = self._head = self._chunks = self._resume = self._viewer = None
        self._sinks = []
        self._account.used()

    def _end(self, unread: bool) -> None:
        if self._writable:
            self._account.sent()
        self._clear_request()
        if unread:
            self._drain()
        elif not self._keep_alive:
            self._phase = DRAIN
            self._transport.close()
        else:
            self._phase = HEAD
            self._idle_since = self._listener.now()
            if (self._rest or not self._reading) and not self._taking:
                self._listener.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        """Continues with bytes received while a request was processed or the transport was not writable."""
        if not self._delayed and self._go_on_with_rest():
            self._backlog.put(self)

    def go_on(self) -> bool:
        """Continues with input that was delayed. True: input is left."""
        self._delayed = False
        delayed = self._go_on_with_rest()
        if self._listener.stopping and not delayed:
            self.stop()
        return delayed

    def _go_on_with_rest(self) -> bool:
        if self._transport is None or self._phase in (BUSY, FILL, DRAIN):
            return False
        data, self._rest = self._rest, b""
        self.turn = self._listener.turn
        delayed = self._take(data)
        self.resume()
        return delayed

    @property
    def estimate(self) -> int:
        return REQUEST_WORK

    def _refuse_for(self, error: ServeError) -> None:
        self._phase = FILL
        self.fail(error)

    def _refuse(self, status: int, text: str) -> None:
        """Answers a request whose body was not read to its end; the connection cannot be used again."""
        self._phase = FILL
        self.fail_with(status, text)

    def _drain(self) -> None:
        self._phase = DRAIN
        self._rest = b""
        self.turn = self._listener.turn
        if self._transport.can_write_eof():
            self._transport.write_eof()

    # ------------------------------------------------------------------------------------ timeouts

    def check_timeouts(self, waited: int) -> None:
        """Called on every turn of the slow clock. `waited`: number of turns without enough progress after which a
        client times out."""
        transport, listener = self._transport, self._listener
        if transport is None:
            return
        unsent = transport.get_write_buffer_size()
        taken = self._unsent - unsent
        if unsent and (taken < 0 or taken >= listener.least_bytes):
            self.turn = listener.turn
        if self._moved >= listener.least_bytes and self._phase in (FILL, CHUNKS):
            self.turn = listener.turn
        self._unsent, self._moved = unsent, 0
        quiet = listener.turn - self.turn
        if self._phase == DRAIN or unsent:
            if quiet > waited:
                transport.abort()
        elif self._phase == FILL or self._phase == CHUNKS or (self._phase == HEAD and self._rest):
            if quiet > waited:
                self._refuse(408, "the request was not complete in time; --http-read-timeout is the limit")
        elif self._phase == HEAD and quiet > listener.idle_turns:
            transport.close()

    def stop(self) -> None:
        """Accepts no more requests after the current one."""
        self._keep_alive = False
        if self._viewer is not None:
            self._viewer.stop()
        if self._phase in (HEAD, DRAIN) and self._transport is not None and not self._delayed:
            self._transport.close()

    def give_up(self, error: ServeError) -> None:
        if self._phase in (FILL, CHUNKS):
            self._refuse_for(error)

    @property
    def idle_since(self) -> float | None:
        transport = self._transport
        if transport is None or self._phase == BUSY:
            return None
        idle = self._phase == HEAD and not self._rest and not transport.get_write_buffer_size()
        return self._idle_since if idle or self._listener.turn - self.turn > 1 else None

    def evict(self) -> None:
        self.abort()
