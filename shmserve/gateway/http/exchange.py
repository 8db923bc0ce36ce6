"""The current request of an HTTP/1.1 connection, once its head has been read: what the request waits for, and its
response, in one piece or as events.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from shmserve.errors import ServeError
from shmserve.gateway.auth.actions import INFER
from shmserve.gateway.http import bodies
from shmserve.gateway.http.heads import HttpHead
from shmserve.gateway.http.listener import HttpListener
from shmserve.gateway.kserve.answers import Buffer, size_of
from shmserve.gateway.kserve.status import REASONS, http_of, http_text_of
from shmserve.gateway.limits.backlog import SENT_BYTES
from shmserve.gateway.limits.caller_shares import ConnectionShares, Payer
from shmserve.gateway.limits.turns import FairReader, Job, SlicedWork
from shmserve.gateway.openai import errors as openai_errors
from shmserve.gateway.openai.errors import KIND as OPENAI
from shmserve.gateway.upstream.documents import error_body
from shmserve.gateway.upstream.requests import Charge, serve_error, withdraw
from shmserve.protocol.actions import Action

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
JSON = b"application/json"
BINARY = b"application/octet-stream"
JOINED_BYTES = 64 * 1024
"""Responses up to this size are joined into one buffer."""
COMPRESSED_BYTES = 1024
"""Responses below this size are not compressed."""
_COMPRESSED = frozenset({INFER, Action.METRICS})
"""Actions whose responses are compressed for clients that accept it."""


class EventViewer(Protocol):
    """Notified when the client of the current request disconnects."""

    def disconnected(self) -> None: ...

    def stop(self) -> None:
        """Called when the gateway stops: ends the stream, which would otherwise not end."""


class HttpExchange(FairReader):
    """A request and its response, one at a time. `HttpConnection` implements the methods that raise NotImplementedError
    here."""

    def __init__(self, listener: HttpListener) -> None:
        super().__init__()
        self._listener = listener
        self._phase = HEAD
        self._head: HttpHead | None = None
        self._keep_alive = True
        self._ticket: Charge | None = None
        self._shares: ConnectionShares | None = None
        self._job: Job | None = None
        self._resume: Callable[[], None] | None = None
        """Called when the transport is writable again, for a response in parts."""
        self._viewer: EventViewer | None = None
        self._account = listener.budget.account("")
        self._writable = True
        self._work = 0
        """Work left for this connection in this iteration of the loop."""
        self.turn = listener.turn
        """Turn of the slow clock at which progress was last made."""

    def work(
        self, work: SlicedWork[T], then: Callable[[T], None], failed: Callable[[ServeError], None] | None = None,
        party: object = None,
    ) -> None:  # fmt: skip
        """Runs `work` in slices that alternate with those of other connections, then calls `then` with its result.
        Exceptions of `work` go to `failed` if given, and otherwise become the response. `party`: as for
        `JobTurns.run`."""

        def stopped(error: Exception) -> None:
            (failed or self.fail)(serve_error(error))

        self._ticket = None  # the broker has answered: there is nothing to cancel
        job = self._listener.turns.run(work, then, stopped, party)
        if job.running:
            self._job = job

    def payer(self, token: str) -> Payer:
        """The account charged for requests to the broker."""
        assert self._shares is not None
        return self._shares.payer(token, self._head.caller if self._head is not None else "")

    def hold(self, size: int) -> None:
        """Counts bytes that the current request makes, until it has been answered. Raises Unavailable if a share would
        be exceeded."""
        self._account.take(size)

    def wait_for(self, ticket: Charge, resume: Callable[[], None] | None = None) -> None:
        self._ticket = ticket
        self._resume = resume

    def watch(self, viewer: EventViewer, resume: Callable[[], None] | None = None) -> None:
        self._viewer = viewer
        self._resume = resume

    def _drop(self) -> None:
        """Cancels the current request: the client has disconnected or will not get a response."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            withdraw(self._listener.link, ticket)
        job, self._job = self._job, None
        if job is not None:
            job.cancel()
        viewer, self._viewer = self._viewer, None
        if viewer is not None:
            viewer.disconnected()
        self._clear_request()

    def _clear_request(self) -> None:
        raise NotImplementedError

    def _end(self, unread: bool) -> None:
        """The response has been sent. `unread`: the body of the request was not read to its end."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------ responses

    def fail(self, error: ServeError, request_id: str = "", more: bytes = b"") -> None:
        if self._is_openai:
            status, body = openai_errors.response(error)
        else:
            status, body = http_of(error), error_body(http_text_of(error, request_id))
        if status == 401:
            more += b"WWW-Authenticate: Bearer\r\n"
        self.answer(status, [body], more=more)

    def fail_with(self, status: int, text: str, more: bytes = b"") -> None:
        """Answers with an error for which there is no class."""
        self.answer(status, [openai_errors.body(status, text) if self._is_openai else error_body(text)], more=more)

    @property
    def _is_openai(self) -> bool:
        return self._head is not None and self._head.route.kind == OPENAI

    def answer(
        self,
        status: int,
        parts: list[Buffer],
        kind: bytes = JSON,
        json_length: int | None = None,
        more: bytes = b"",
    ) -> None:
        """Sends a response and continues with the next request."""
        head = self._head
        self._ticket = None
        if self._transport is None or self._phase == DRAIN:
            return
        size = sum([len(part) for part in parts])
        if head is not None and head.accepts and size >= COMPRESSED_BYTES and head.route.action in _COMPRESSED:
            more += b"Content-Encoding: %b\r\n" % head.accepts.encode()
            self.work(
                bodies.deflate_body(head.accepts, parts),
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
        self._work -= size // SENT_BYTES
        unread = self._phase != BUSY
        if head is not None and head.reader:
            more += _readable_by(head.reader)
        if json_length is not None:
            more += b"Inference-Header-Content-Length: %d\r\n" % json_length
        if not self._keep_alive or unread:
            more += b"Connection: close\r\n"
        lines = b"HTTP/1.1 %d %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n%b\r\n" % (
            status, REASONS[status].encode(), kind, size, more,
        )  # fmt: skip
        if head is not None and head.is_head:
            parts = []  # HEAD: the same headers, without the body
        self._listener.answered(status)
        self.turn = self._listener.turn
        if size <= JOINED_BYTES:
            transport.write(b"".join([lines, *parts]))
        else:
            transport.writelines([lines, *parts])
        self._end(unread)

    # ------------------------------------------------------------------------------------ responses in parts

    @property
    def writable(self) -> bool:
        """Whether the client is connected and reads what is sent to it."""
        return self._writable and self._transport is not None

    def begin_events(self, status: int = 200, more: bytes = b"", first: bytes = b"") -> None:
        """`first`: events to send with the head."""
        self._listener.answered(status)
        if self._head is not None and self._head.reader:
            more += _readable_by(self._head.reader)
        if not self._keep_alive:
            more += b"Connection: close\r\n"
        self._transport.write(
            b"HTTP/1.1 %d %b\r\nContent-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-cache\r\n"
            b"Transfer-Encoding: chunked\r\n%b\r\n%b" % (status, REASONS[status].encode(), more, _chunk(first))
        )

    def send_event(self, data: bytes) -> None:
        self._transport.write(_chunk(data))

    def send_large_event(self, parts: list[Buffer]) -> None:
        """Sends an event whose bytes were counted by `hold`, which it frees when the client has read it."""
        self._account.unsent = self._account.held
        self._transport.writelines([b"%x\r\n" % size_of(parts), *parts, b"\r\n"])
        if self._writable:
            self._account.sent()

    def end_events(self, last: bytes = b"") -> None:
        """`last`: events to send before the end."""
        self._ticket = self._viewer = None
        self.turn = self._listener.turn
        self._transport.write(_chunk(last) + b"0\r\n\r\n")
        self._end(unread=False)


def _readable_by(origin: str) -> bytes:
    """The header by which a browser shows a response to a page of another origin."""
    return b"Access-Control-Allow-Origin: %b\r\nVary: Origin\r\n" % origin.encode()


def _chunk(data: bytes) -> bytes:
    """A chunk of a chunked body. Returns nothing for no data, as an empty chunk would end the body."""
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""
