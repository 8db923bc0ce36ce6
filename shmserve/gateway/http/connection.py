"""One connection of HTTP. The rule of the file: no coroutine and no task; what comes moves the connection from one
phase to the next, and what it waits for calls it back.

    HEAD    waits for the first lines of a request
    FILL    the body is read straight to where it belongs: of an infer with binary data the JSON first, then each large
            tensor into shared memory
    CHUNKS  a chunked body is put together
    BUSY    the broker has been asked; what comes meanwhile are the next requests
    DRAIN   the last answer is sent; what the caller still sends is thrown away, so that he can read it
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from shmserve.errors import ServeError, Unsupported
from shmserve.gateway.http import bodies
from shmserve.gateway.http.heads import BadHead, Head
from shmserve.gateway.http.limits import AHEAD_BYTES, HEAD_BYTES
from shmserve.gateway.http.listener import Door
from shmserve.gateway.kserve.answers import Buffer
from shmserve.gateway.kserve.status import REASONS, http_of, http_text_of
from shmserve.gateway.limits.caller_shares import ConnectionShares, Payer
from shmserve.gateway.limits.turns import Job, Reader, Work
from shmserve.gateway.upstream.documents import error_body
from shmserve.gateway.upstream.receive import ReceiveBuffer
from shmserve.gateway.upstream.requests import Charge, not_passed_on, withdraw

T = TypeVar("T")
HEAD, FILL, CHUNKS, BUSY, DRAIN = range(5)
JSON = b"application/json"
BINARY = b"application/octet-stream"
JOINED_BYTES = 64 * 1024
"""Answers up to this size are sent as one piece."""
COMPRESSED_BYTES = 1024
"""Answers below this size are not worth compressing."""
_scratch = memoryview(bytearray(256 * 1024))
"""What every connection reads into, one after another: bytes are taken out before the next one reads."""


class Handler(Protocol):
    """What requests are given to. ServeError of either method is answered."""

    def prepare(self, connection: Connection, head: Head, first: bytes) -> None:
        """Calls `Connection.fill` with where the body is to be read to, of which only `first` is here."""

    def begin(self, connection: Connection, head: Head, body: Buffer) -> None:
        """The request is complete."""


class Connection(Reader, asyncio.BufferedProtocol):
    def __init__(self, door: Door, handler: Handler) -> None:
        super().__init__()
        self._door = door
        self._handler = handler
        self._phase = HEAD
        self._rest = b""
        self._head: Head | None = None
        self._keep_alive = True
        self._ticket: Charge | None = None
        self._shares: ConnectionShares | None = None
        self._job: Job | None = None
        self._resume: Callable[[], None] | None = None
        """For an answer in parts, while the caller did not read."""
        self._account = door.budget.account("")
        self._sink: ReceiveBuffer | None = None
        self._sinks: list[ReceiveBuffer] = []
        """Those to be filled after it, the last first."""
        self._then: Callable[[bytes], None] | None = None
        self._chunks: bodies.Chunks | None = None
        self._writable = True
        self.turn = door.turn
        """When something moved here last, on the door's slow clock."""
        self._idle_since = door.now()
        self._moved = 0
        self._unsent = 0

    # ------------------------------------------------------------------------------------ what the loop calls

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        peer = transport.get_extra_info("peername")
        address = peer[0] if isinstance(peer, tuple) else ""
        self._shares = self._door.shares.connect(address)
        self._account = self._door.budget.account(address)
        if not self._door.enter(self):
            self._refuse(503, "too many connections; --http-max-connections of the gateway is the limit")
            transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._door.leave(self)
        self._drop()
        self._account.sent()
        if self._shares is not None:
            self._shares.close()
        self._transport = None

    def eof_received(self) -> bool:
        """A caller who closes does not wait for his answer."""
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
        return _scratch if self._sink is None else self._door.reads.bounded(self._sink.space())

    def buffer_updated(self, count: int) -> None:
        if self._phase == FILL:
            self._moved += count
            self._fill(count)
            if self._phase == FILL:
                self._door.reads.count(self, count)
            return
        if self._phase == DRAIN:
            return
        if self._phase == CHUNKS:
            self._door.reads.count(self, count)
        data = bytes(_scratch[:count])
        if self._rest:
            data = self._rest + data
            self._rest = b""
        else:
            self.turn = self._door.turn  # of first lines that come in drops, the first drop counts
        self._moved += count
        self._take(data)

    @property
    def _may_read(self) -> bool:
        return self._phase != BUSY or len(self._rest) <= AHEAD_BYTES

    # ------------------------------------------------------------------------------------ what has come

    def _take(self, data: bytes) -> None:
        while data and self._writable:
            if self._phase == HEAD:
                left = self._begin(data)
            elif self._phase == CHUNKS:
                left = self._go_on_with_chunks(data)
            else:
                break
            if left is None:
                return
            data = left
        if self._phase == DRAIN:
            return
        self._rest = data
        if len(data) > AHEAD_BYTES and self._reading:
            self.pause()

    def _begin(self, data: bytes) -> bytes | None:
        """Takes the first lines, and of the body what is here. None: everything was taken."""
        if data.startswith(b"\r\n"):
            return data[2:]
        end = data.find(b"\r\n\r\n") + 4
        try:
            if end < 4 or end > HEAD_BYTES:
                if len(data) > HEAD_BYTES:
                    raise BadHead(431, f"the request headers exceed {HEAD_BYTES} bytes")
                self._rest = data
                return None
            head = self._door.heads.head(data[:end])
        except BadHead as error:
            self._refuse(error.status, str(error))
            return None
        self._head = head
        self._keep_alive = head.keep_alive and not self._door.stopping
        limit = self._door.limits.input_bytes
        if head.length > limit:
            self._refuse_for(bodies.too_large(head, self._door.limits))
            return None
        until = end + head.length
        if not head.chunked and len(data) >= until:
            self._phase = BUSY
            self.whole(data[end:until])
            return data[until:]
        if head.route.status != 200 or head.refusal is not None:
            self._refused(head)  # without reading its body first
            return None
        if head.expects and len(data) == end:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if head.chunked:
            self._phase = CHUNKS
            self._chunks = bodies.Chunks(limit)
            return data[end:]
        self._fill_body(head, data[end:])
        return None

    def _refused(self, head: Head) -> None:
        try:
            self._handler.begin(self, head, b"")
        except ServeError as error:
            self._refuse_for(error)

    def _go_on_with_chunks(self, data: bytes) -> bytes | None:
        chunks = self._chunks
        assert chunks is not None
        before = len(chunks.body)
        try:
            left = chunks.feed(data)
            self._hold(len(chunks.body) - before)
        except ServeError as error:
            self._refuse_for(error)
            return None
        if not chunks.done:
            self._rest = left
            return None
        self._chunks = None
        self._phase = BUSY
        self.whole(chunks.body)
        return left

    def _hold(self, size: int) -> None:
        self._account.take(size)  # counts bytes that have arrived and are kept; Unavailable where they are too many

    # ------------------------------------------------------------------------------------ bodies that are read in place

    def _fill_body(self, head: Head, first: bytes) -> None:
        try:
            self._hold(len(first))
            self._handler.prepare(self, head, first)
        except ServeError as error:
            self._refuse_for(error)

    def fill(self, sinks: Sequence[ReceiveBuffer], first: bytes, then: Callable[[bytes], None]) -> None:
        """Reads until all of these are full, beginning with `first`; `then` is given what is left of it."""
        self._phase = FILL
        self._sinks = list(reversed(sinks))
        self._then = then
        self._next_sink(first)

    def _fill(self, count: int) -> None:
        sink = self._sink
        if sink is None:
            return
        try:
            self._hold(count)
            sink.add(count)
            if sink.full:
                self._next_sink(b"")
        except ServeError as error:
            self._refuse_for(error)

    def _next_sink(self, first: bytes) -> None:
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

    def complete(self) -> None:
        """The body is here."""
        self._phase = BUSY

    # ------------------------------------------------------------------------------------ a whole request

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
            more = b"Accept-Encoding: gzip, deflate\r\n" if isinstance(error, Unsupported) else b""
            self.answer(http_of(error), [error_body(http_text_of(error))], more=more)

        begin, limits = self._handler.begin, self._door.limits
        limit, flag = limits.input_bytes, "--http-max-input-size"
        if head.route.action == "infer" and head.json_length is None and limits.json_bytes < limit:
            limit, flag = limits.json_bytes, "--http-max-json-size"
        self.work(
            bodies.inflating(head.encoding, body, limit, flag, self._hold),
            lambda found: begin(self, head, found),
            failed,
        )

    def work(
        self, work: Work[T], then: Callable[[T], None], failed: Callable[[ServeError], None] | None = None
    ) -> None:
        """Goes on with what `work` returns, in turns with that of other connections. What it raises is answered."""

        def stopped(error: Exception) -> None:
            (failed or self.fail)(error if isinstance(error, ServeError) else not_passed_on())

        self._ticket = None  # what was asked of the broker has been answered
        job = self._door.turns.run(work, then, stopped)
        if job.running:
            self._job = job

    def payer(self, token: str) -> Payer:
        """Who is charged for what is asked of the broker."""
        assert self._shares is not None
        return self._shares.payer(token)

    def wait_for(self, ticket: Charge, resume: Callable[[], None] | None = None) -> None:
        self._ticket = ticket
        self._resume = resume

    def _drop(self) -> None:
        """The caller is gone, or gets no answer any more."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            withdraw(self._door.link, ticket)
        job, self._job = self._job, None
        if job is not None:
            job.cancel()
        self._let_go()

    def _let_go(self) -> None:
        self._sink = self._then = self._head = self._chunks = self._resume = None
        self._sinks = []
        self._account.used()

    # ------------------------------------------------------------------------------------ answers

    def fail(self, error: ServeError, request_id: str = "") -> None:
        status = http_of(error)
        more = b"WWW-Authenticate: Bearer\r\n" if status == 401 else b""
        self.answer(status, [error_body(http_text_of(error, request_id))], more=more)

    def answer(
        self,
        status: int,
        parts: list[Buffer],
        kind: bytes = JSON,
        json_length: int | None = None,
        more: bytes = b"",
    ) -> None:
        """Sends an answer, and goes on with the next request."""
        head = self._head
        self._ticket = None
        if self._transport is None or self._phase == DRAIN:
            return
        size = sum([len(part) for part in parts])
        if head is not None and head.accepts and size >= COMPRESSED_BYTES and head.route.action == "infer":
            more += b"Content-Encoding: %b\r\n" % head.accepts.encode()
            self.work(
                bodies.deflating(head.accepts, parts),
                lambda data: self._send(status, [data], len(data), kind, json_length, more),
            )
        else:
            self._send(status, parts, size, kind, json_length, more)

    def _send(
        self, status: int, parts: list[Buffer], size: int, kind: bytes, json_length: int | None, more: bytes
    ) -> None:  # fmt: skip
        transport, head = self._transport, self._head
        if size > JOINED_BYTES:
            try:
                self._account.answer(size)
            except ServeError as error:
                self.fail(error)
                return
        unread = self._phase != BUSY
        if json_length is not None:
            more += b"Inference-Header-Content-Length: %d\r\n" % json_length
        if not self._keep_alive or unread:
            more += b"Connection: close\r\n"
        lines = b"HTTP/1.1 %d %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n%b\r\n" % (
            status, REASONS[status].encode(), kind, size, more,
        )  # fmt: skip
        if head is not None and head.is_head:
            parts = []  # the lines alone, as if they followed
        self._door.answered(status)
        self.turn = self._door.turn
        if size <= JOINED_BYTES:
            transport.write(b"".join([lines, *parts]))
        else:
            transport.writelines([lines, *parts])
        self._end(unread)

    def _end(self, unread: bool) -> None:
        """The answer is sent."""
        if self._writable:
            self._account.sent()
        self._let_go()
        if unread:
            self._drain()
        elif not self._keep_alive:
            self._phase = DRAIN
            self._transport.close()
        else:
            self._phase = HEAD
            self._idle_since = self._door.now()
            if self._rest or not self._reading:
                self._door.loop.call_soon(self._go_on)

    # ------------------------------------------------------------------------------------ answers in parts

    @property
    def writable(self) -> bool:
        """Whether the caller reads what he is sent, and is there at all."""
        return self._writable and self._transport is not None

    def begin_events(self, status: int = 200) -> None:
        self._door.answered(status)
        more = b"" if self._keep_alive else b"Connection: close\r\n"
        self._transport.write(
            b"HTTP/1.1 %d %b\r\nContent-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-cache\r\n"
            b"Transfer-Encoding: chunked\r\n%b\r\n" % (status, REASONS[status].encode(), more)
        )

    def send_event(self, data: bytes) -> None:
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def end_events(self) -> None:
        self._ticket = None
        self.turn = self._door.turn
        self._transport.write(b"0\r\n\r\n")
        self._end(unread=False)

    # ------------------------------------------------------------------------------------ the next request

    def _go_on(self) -> None:
        """With requests that came while one was answered, or while the caller did not read."""
        if self._transport is None or self._phase in (BUSY, FILL, DRAIN):
            return
        self.resume()
        data, self._rest = self._rest, b""
        self.turn = self._door.turn
        self._take(data)

    def _refuse_for(self, error: ServeError) -> None:
        self._phase = FILL
        self.fail(error)

    def _refuse(self, status: int, text: str) -> None:
        """Of a request that was not read to its end: the connection is of no more use."""
        self._phase = FILL
        self.answer(status, [error_body(text)])

    def _drain(self) -> None:
        self._phase = DRAIN
        self._rest = b""
        self.turn = self._door.turn
        if self._transport.can_write_eof():
            self._transport.write_eof()

    # ------------------------------------------------------------------------------------ time

    def look(self, waited: int) -> None:
        """Every turn of the slow clock. `waited`: so many turns are too many for one who keeps others waiting."""
        transport, door = self._transport, self._door
        if transport is None:
            return
        unsent = transport.get_write_buffer_size()
        taken = self._unsent - unsent
        if unsent and (taken < 0 or taken >= door.least_bytes):
            self.turn = door.turn
        if self._moved >= door.least_bytes and self._phase in (FILL, CHUNKS):
            self.turn = door.turn
        self._unsent, self._moved = unsent, 0
        quiet = door.turn - self.turn
        if self._phase == DRAIN or unsent:
            if quiet > waited:
                transport.abort()
        elif self._phase == FILL or self._phase == CHUNKS or (self._phase == HEAD and self._rest):
            if quiet > waited:
                self._refuse(408, "the request was not complete in time; --http-read-timeout is the limit")
        elif self._phase == HEAD and quiet > door.idle_turns:
            transport.close()

    def stop(self) -> None:
        """No more requests are taken after the one that is here."""
        self._keep_alive = False
        if self._phase in (HEAD, DRAIN) and self._transport is not None:
            self._transport.close()

    @property
    def idle_since(self) -> float | None:
        transport = self._transport
        if transport is None or self._phase == BUSY:
            return None
        idle = self._phase == HEAD and not self._rest and not transport.get_write_buffer_size()
        return self._idle_since if idle or self._door.turn - self.turn > 1 else None

    def evict(self) -> None:
        self.abort()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
