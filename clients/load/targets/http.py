"""KServe v2 over HTTP/1.1: one connection per slot, binary tensors, requests written once and sent again."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import httptools

from shmserve.clients.load.plan import Endpoint
from shmserve.clients.load.targets import base
from shmserve.clients.load.targets.base import Arrays, ModelFacts, Part, RequestOptions, Slot, latest_statistics
from shmserve.clients.load.targets.kserve import facts_of, parameters, raw_bytes
from shmserve.errors import ConnectionLost, InvalidRequest, ModelFailed, NotFound, ServeError, Unavailable, Unsupported

CODES: dict[int, type[ServeError]] = {400: InvalidRequest, 404: NotFound, 429: Unavailable, 503: Unavailable}
"""HTTP status -> error; all others are failures of the server."""


class HttpTarget:
    def __init__(self, endpoint: Endpoint) -> None:
        self._address = endpoint.address
        self._head = f"Host: {endpoint.authority}\r\n" + "".join(
            f"{name}: {value}\r\n" for name, value in endpoint.headers
        )
        """The first headers of each request."""
        self._authority = endpoint.authority
        self._connections: list[_Connection] = []
        self._control: _Connection | None = None

    async def facts(self, model: str, version: str) -> ModelFacts:
        path = _model_path(model, version)
        server, metadata = await self._get("/v2"), await self._get(path)
        return facts_of(metadata, await self._get(f"{path}/config", {}), server)

    def prepare(self, arrays: Arrays, facts: ModelFacts, options: RequestOptions) -> Any:
        return _Body(arrays, facts, options, self._head)

    async def slot(self) -> Slot:
        connection = await self._connect()
        self._connections.append(connection)
        return _HttpSlot(connection, self._connect)

    async def statistics(self, model: str, version: str) -> dict[str, Any]:
        return latest_statistics(await self._get(f"{_model_path(model, version)}/stats", {}))

    async def close(self) -> None:
        for connection in (*self._connections, *filter(None, [self._control])):
            connection.close()

    async def _connect(self) -> _Connection:
        host, port = self._address
        try:
            _, connection = await asyncio.get_running_loop().create_connection(_Connection, host, port)
        except OSError as error:
            text = f"no server at http://{self._authority} ({error.strerror or error})"
            raise ConnectionLost(f"{text}: start one, or select another by --url") from error
        return connection

    async def _get(self, path: str, default: Any = None) -> Any:
        """A document; `default` if the server does not have it."""
        if self._control is None or self._control.closed:
            self._control = await self._connect()
        request = f"GET {path} HTTP/1.1\r\n{self._head}\r\n"
        try:
            status, body = await asyncio.wait_for(self._control.ask(request.encode()), base.ASK_S)
        except TimeoutError as error:
            self._control.close()
            text = f"http://{self._authority} has not answered GET {path} within {base.ASK_S:g} s"
            raise ConnectionLost(f"{text}: is it a KServe server?") from error
        if status != 200:
            if default is not None and status in (400, 404):
                return default
            raise _error(status, body)
        return json.loads(body)


def _model_path(model: str, version: str) -> str:
    return f"/v2/models/{quote(model, safe='')}" + (f"/versions/{quote(version, safe='')}" if version else "")


class _Body:
    """A request; its JSON is written again only for the parts of sequences, its tensors never."""

    def __init__(self, arrays: Arrays, facts: ModelFacts, options: RequestOptions, head: str) -> None:
        self._options = options
        self._start = f"POST {_model_path(options.model, options.version)}/infer HTTP/1.1\r\n{head}".encode()
        raw = {name: raw_bytes(array) for name, array in arrays.items()}
        self._document: dict[str, Any] = {
            "inputs": [
                {"name": name, "datatype": facts.inputs[name]["datatype"], "shape": list(arrays[name].shape),
                 "parameters": {"binary_data_size": len(data)}}
                for name, data in raw.items()
            ]
        }  # fmt: skip
        if options.outputs:
            self._document["outputs"] = [
                {"name": name, "parameters": {"binary_data": True}} for name in options.outputs
            ]
        self._tensors = b"".join(raw.values())
        self._whole = self._written(None)

    def request(self, part: Part | None) -> bytes:
        return self._whole if part is None else self._written(part)

    def _written(self, part: Part | None) -> bytes:
        found = {**parameters(self._options, part), "binary_data_output": True}
        text = json.dumps(self._document | {"parameters": found}).encode()
        lengths = (
            f"Content-Type: application/octet-stream\r\nInference-Header-Content-Length: {len(text)}\r\n"
            f"Content-Length: {len(text) + len(self._tensors)}\r\n\r\n"
        )
        return b"".join((self._start, lengths.encode(), text, self._tensors))


class _HttpSlot:
    def __init__(self, connection: _Connection, connect: Callable[[], Any]) -> None:
        self._connection = connection
        self._connect = connect

    async def send(self, body: Any, part: Part | None) -> None:
        if self._connection.closed:  # by the server, after an error or when idle
            self._connection = await self._connect()
        try:
            status, answer = await self._connection.ask(body.request(part))
        except asyncio.CancelledError:
            self._connection.close()  # its response would be taken for that of the next request
            raise
        if status != 200:
            raise _error(status, answer)

    async def stream(self, body: Any, part: Part | None, on_answer: Callable[[], None]) -> None:
        raise Unsupported("this target has no streams")


def _error(status: int, body: bytes) -> ServeError:
    try:
        text = str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        text = body[:200].decode(errors="replace") or "no text"
    return CODES.get(status, ModelFailed)(f"HTTP {status}: {text}")


class _Connection(asyncio.Protocol):
    """A connection with one request at a time; httptools calls the `on_` methods."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._transport: Any = None
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._body: deque[bytes] = deque()
        self._kept = True
        self.closed = False

    def ask(self, request: bytes) -> asyncio.Future[tuple[int, bytes]]:
        self._answer = answer = asyncio.get_running_loop().create_future()
        if self.closed:
            answer.set_exception(ConnectionLost("the server closed the connection"))
        else:
            self._transport.write(request)
        return answer

    def close(self) -> None:
        self.closed = True
        if self._transport is not None:
            self._transport.close()

    # ------------------------------------------------------------------------------------ called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionLost(f"the server's response is not HTTP: {error}"))
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        self._fail(ConnectionLost(f"the connection was lost: {error or 'closed by the server'}"))

    def _fail(self, error: ServeError) -> None:
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_exception(error)

    # ------------------------------------------------------------------------------------ called by httptools

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        answer, self._answer = self._answer, None
        body = b"".join(self._body)
        self._body.clear()
        status = self._parser.get_status_code()
        if not self._parser.should_keep_alive():
            self.close()
        if answer is not None and not answer.done():
            answer.set_result((status, body))
