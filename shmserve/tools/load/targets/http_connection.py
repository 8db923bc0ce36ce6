"""A connection of HTTP/1.1 with one request at a time, whose response is a body or a stream of events."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import httptools

from shmserve.errors import ConnectionLost, ServeError
from shmserve.tools.load.targets.connecting import FOREIGN, LOST, close

END_OF_EVENT = b"\n\n"
OnEvent = Callable[[bytes], None]


class HttpConnection(asyncio.Protocol):
    """A connection with one request at a time; httptools calls the `on_` methods."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._transport: Any = None
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._body: deque[bytes] = deque()
        self._on_event: OnEvent | None = None
        self.closed = False

    def ask(self, request: bytes, on_event: OnEvent | None = None) -> asyncio.Future[tuple[int, bytes]]:
        """The result is the status and the body. `on_event` gets each server-sent event of a response with status 200
        as it arrives, without the empty line at its end; the body is then what follows the last one.
        """
        self._on_event = on_event
        self._answer = answer = asyncio.get_running_loop().create_future()
        if self.closed:
            answer.set_exception(ConnectionLost("the server closed the connection"))
        else:
            self._transport.write(request)
        return answer

    def close(self) -> None:
        self.closed = True
        close(self._transport)

    # ------------------------------------------------------------------------------------ called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionLost(f"{FOREIGN} HTTP: {error}"))
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        self._fail(ConnectionLost(f"{LOST}: {error or 'closed by the server'}"))

    def _fail(self, error: ServeError) -> None:
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_exception(error)

    # ------------------------------------------------------------------------------------ called by httptools

    def on_body(self, data: bytes) -> None:
        on_event = self._on_event
        if on_event is None or self._answer is None or self._parser.get_status_code() != 200:
            self._body.append(data)
            return
        *events, rest = b"".join((*self._body, data)).split(END_OF_EVENT)
        self._body.clear()
        self._body.append(rest)
        for event in events:
            on_event(event)

    def on_message_complete(self) -> None:
        answer, self._answer = self._answer, None
        body = b"".join(self._body)
        self._body.clear()
        status = self._parser.get_status_code()
        if not self._parser.should_keep_alive():
            self.close()
        if answer is not None and not answer.done():
            answer.set_result((status, body))
