"""HTTP/1.1 for targets: a connection with one request at a time, and all connections to an endpoint."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import httptools

from shmserve.errors import ConnectionLost, ModelFailed, ServeError
from shmserve.tools.load.plan import Endpoint
from shmserve.tools.load.targets import base
from shmserve.tools.load.targets.connecting import FOREIGN, LOST, close, connect, tls_of
from shmserve.transport.http_link import BY_STATUS

DATA = b"data: "
"""The beginning of a server-sent event."""
END_OF_EVENT = b"\n\n"
OnEvent = Callable[[bytes], None]


class HttpClientConnection(asyncio.Protocol):
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


class HttpConnections:
    """The connections to an endpoint: one for each caller, and one for other requests."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._tls = tls_of(endpoint)
        self.head = f"Host: {endpoint.authority}\r\n" + "".join(
            f"{name}: {value}\r\n" for name, value in endpoint.headers
        )
        """The first headers of each request."""
        self._callers: list[HttpCaller] = []
        self._control: HttpClientConnection | None = None

    async def caller(self) -> HttpCaller:
        caller = HttpCaller(await self._connect(), self._connect)
        self._callers.append(caller)
        return caller

    def close(self) -> None:
        for caller in self._callers:
            caller.close()
        if self._control is not None:
            self._control.close()

    async def _connect(self) -> HttpClientConnection:
        return await connect(HttpClientConnection, self._endpoint, self._tls)

    async def get(self, path: str, default: Any = None) -> Any:
        """A document; `default` if the server does not have it."""
        if self._control is None or self._control.closed:
            self._control = await self._connect()
        request = f"GET {path} HTTP/1.1\r\n{self.head}\r\n"
        try:
            status, body = await asyncio.wait_for(self._control.ask(request.encode()), base.ASK_S)
        except asyncio.TimeoutError as error:
            self._control.close()
            text = f"{self._endpoint.origin} has not answered GET {path} within {base.ASK_S:g} s"
            raise ConnectionLost(f"{text}: is it a KServe server?") from error
        if status != 200:
            if default is not None and status in (400, 404):
                return default
            raise _error(status, body)
        return json.loads(body)


class HttpCaller:
    """Sends one request at a time, and connects again if the server has closed the connection."""

    def __init__(
        self, connection: HttpClientConnection, connect: Callable[[], Awaitable[HttpClientConnection]]
    ) -> None:
        self._connection = connection
        self._connect = connect

    def close(self) -> None:
        self._connection.close()

    async def ask(self, request: bytes, on_event: OnEvent | None = None) -> None:
        if self._connection.closed:  # by the server, after an error or when idle
            self._connection = await self._connect()
        try:
            status, answer = await self._connection.ask(request, on_event)
        except asyncio.CancelledError:
            self._connection.close()  # its response would be taken for the next request's
            raise
        if status != 200:
            raise _error(status, answer)


def _error(status: int, body: bytes) -> ServeError:
    try:
        text = error_text(json.loads(body.strip().removeprefix(DATA))["error"])
    except (ValueError, KeyError, TypeError):
        text = body[:200].decode(errors="replace") or "no text"
    return BY_STATUS.get(status, ModelFailed)(f"HTTP {status}: {text}")


def error_text(error: Any) -> str:
    """The text of an error, which is an object in an OpenAI API."""
    return str(error.get("message", error)) if isinstance(error, Mapping) else str(error)
