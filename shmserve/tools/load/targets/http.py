"""KServe v2 over HTTP/1.1: one connection per slot, binary tensors, requests encoded once and sent repeatedly."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import quote

import httptools

from shmserve.errors import ConnectionLost, InvalidRequest, ModelFailed, NotFound, ServeError, Unavailable
from shmserve.tools.load.plan import Endpoint
from shmserve.tools.load.targets import base
from shmserve.tools.load.targets.base import Arrays, ModelFacts, Part, RequestOptions, Slot, latest_statistics
from shmserve.tools.load.targets.connecting import FOREIGN, LOST, close, connect, explained, tls_of
from shmserve.tools.load.targets.kserve import facts_of, json_values, parameters, raw_bytes

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


CODES: dict[int, type[ServeError]] = {400: InvalidRequest, 404: NotFound, 429: Unavailable, 503: Unavailable}
"""HTTP status -> error; all others are failures of the server."""
_DATA = b"data: "
_ERROR_EVENT = b'data: {"error":'
"""The beginning of an event that reports an error. A model may also have an output of this name."""


class HttpTarget:
    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._tls = tls_of(endpoint)
        self._head = f"Host: {endpoint.authority}\r\n" + "".join(
            f"{name}: {value}\r\n" for name, value in endpoint.headers
        )
        """The first headers of each request."""
        self._connections: list[HttpConnection] = []
        self._control: HttpConnection | None = None

    async def facts(self, model: str, version: str) -> ModelFacts:
        path = _model_path(model, version)
        with explained(self._endpoint):
            server = await self._get("/v2")
        metadata = await self._get(path)
        return facts_of(metadata, await self._get(f"{path}/config", {}), server)

    def prepare(self, arrays: Arrays, facts: ModelFacts, options: RequestOptions) -> Any:
        kind = _StreamBody if options.stream else _Body
        return kind(arrays, facts, options, self._head)

    async def slot(self) -> Slot:
        connection = await self._connect()
        self._connections.append(connection)
        return _HttpSlot(connection, self._connect)

    async def statistics(self, model: str, version: str) -> dict[str, Any]:
        return latest_statistics(await self._get(f"{_model_path(model, version)}/stats", {}))

    async def close(self) -> None:
        for connection in (*self._connections, *filter(None, [self._control])):
            connection.close()

    async def _connect(self) -> HttpConnection:
        return await connect(HttpConnection, self._endpoint, self._tls)

    async def _get(self, path: str, default: Any = None) -> Any:
        """A document; `default` if the server does not have it."""
        if self._control is None or self._control.closed:
            self._control = await self._connect()
        request = f"GET {path} HTTP/1.1\r\n{self._head}\r\n"
        try:
            status, body = await asyncio.wait_for(self._control.ask(request.encode()), base.ASK_S)
        except TimeoutError as error:
            self._control.close()
            text = f"{self._endpoint.origin} has not answered GET {path} within {base.ASK_S:g} s"
            raise ConnectionLost(f"{text}: is it a KServe server?") from error
        if status != 200:
            if default is not None and status in (400, 404):
                return default
            raise _error(status, body)
        return json.loads(body)


def _model_path(model: str, version: str) -> str:
    return f"/v2/models/{quote(model, safe='')}" + (f"/versions/{quote(version, safe='')}" if version else "")


class _Body:
    """A request. Its JSON is encoded again only for the parts of sequences, its tensors never."""

    def __init__(self, arrays: Arrays, facts: ModelFacts, options: RequestOptions, head: str) -> None:
        self._options = options
        self._start = f"POST {_model_path(options.model, options.version)}/infer HTTP/1.1\r\n{head}".encode()
        raw = {name: raw_bytes(array) for name, array in arrays.items()}
        self._document: dict[str, Any] = {
            "inputs": [
                {
                    "name": name,
                    "datatype": facts.inputs[name]["datatype"],
                    "shape": list(arrays[name].shape),
                    "parameters": {"binary_data_size": len(data)},
                }
                for name, data in raw.items()
            ]
        }
        if options.outputs:
            self._document["outputs"] = [
                {"name": name, "parameters": {"binary_data": True}} for name in options.outputs
            ]
        self._tensors = b"".join(raw.values())
        self._whole = self._written(None)

    def request(self, part: Part | None) -> bytes:
        return self._whole if part is None else self._written(part)

    def _written(self, part: Part | None) -> bytes:
        results = {**parameters(self._options, part), "binary_data_output": True}
        text = json.dumps(self._document | {"parameters": results}).encode()
        lengths = (
            f"Content-Type: application/octet-stream\r\nInference-Header-Content-Length: {len(text)}\r\n"
            f"Content-Length: {len(text) + len(self._tensors)}\r\n\r\n"
        )
        return b"".join((self._start, lengths.encode(), text, self._tensors))


class _StreamBody:
    """A request to generate_stream, which takes plain JSON: one row, and no choice of outputs."""

    def __init__(self, arrays: Arrays, facts: ModelFacts, options: RequestOptions, head: str) -> None:
        path = f"{_model_path(options.model, options.version)}/generate_stream"
        self._start = f"POST {path} HTTP/1.1\r\n{head}Content-Type: application/json\r\n"
        self._options = options
        self._values = {name: json_values(array, facts.inputs[name], facts) for name, array in arrays.items()}
        self._whole = self._written(None)

    def request(self, part: Part | None) -> bytes:
        return self._whole if part is None else self._written(part)

    def _written(self, part: Part | None) -> bytes:
        text = json.dumps(self._values | {"parameters": parameters(self._options, part)}).encode()
        return b"".join((f"{self._start}Content-Length: {len(text)}\r\n\r\n".encode(), text))


class _HttpSlot:
    def __init__(self, connection: HttpConnection, connect: Callable[[], Awaitable[HttpConnection]]) -> None:
        self._connection = connection
        self._connect = connect

    async def send(self, body: Any, part: Part | None) -> None:
        await self._ask(body.request(part))

    async def stream(self, body: Any, part: Part | None, on_answer: Callable[[], None]) -> None:
        failed: list[str] = []

        def receive(event: bytes) -> None:
            text = _event_error(event)
            if text is None:
                on_answer()
            else:
                failed.append(text)

        await self._ask(body.request(part), receive)
        if failed:
            raise ModelFailed(failed[0])

    async def _ask(self, request: bytes, on_event: Callable[[bytes], None] | None = None) -> None:
        if self._connection.closed:  # by the server, after an error or when idle
            self._connection = await self._connect()
        try:
            status, answer = await self._connection.ask(request, on_event)
        except asyncio.CancelledError:
            self._connection.close()  # its response would be taken for the next request's
            raise
        if status != 200:
            raise _error(status, answer)


def _event_error(event: bytes) -> str | None:
    """The text of an event that is an error; None for a response of the model."""
    if not event.startswith(_ERROR_EVENT):
        return None
    try:
        document = json.loads(event.removeprefix(_DATA))
        return str(document["error"]) if len(document) == 1 else None
    except (ValueError, KeyError):
        return event.decode(errors="replace")


def _error(status: int, body: bytes) -> ServeError:
    try:
        text = str(json.loads(body.strip().removeprefix(_DATA))["error"])
    except (ValueError, KeyError, TypeError):
        text = body[:200].decode(errors="replace") or "no text"
    return CODES.get(status, ModelFailed)(f"HTTP {status}: {text}")
