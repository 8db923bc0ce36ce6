"""A connection to a server over HTTP or HTTPS, with its errors."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from shmserve.errors import (
    ConnectionLost,
    DeadlineExceeded,
    Denied,
    Internal,
    InvalidRequest,
    NotFound,
    ServeError,
    Unavailable,
    Unsupported,
    from_wire,
)

BY_STATUS: dict[int, type[ServeError]] = {
    400: InvalidRequest,
    401: Denied,
    403: Denied,
    404: NotFound,
    429: Unavailable,
    501: Unsupported,
    503: Unavailable,
    504: DeadlineExceeded,
}
"""HTTP status -> error; all others are failures of the server."""
TIMEOUT_S = 10.0
MAX_RESPONSE_BYTES = 256 << 20
"""Maximum size of a response."""
JSON_SIZE = "Inference-Header-Content-Length"


def parts_of(url: str) -> Any:
    try:
        parts = urlsplit(url)
        surplus = parts.username or parts.query or parts.fragment or parts.port == 0
    except ValueError:  # of the port, or of brackets
        parts, surplus = urlsplit(""), ""
    if parts.scheme not in ("http", "https") or not parts.hostname or surplus:
        raise InvalidRequest(f"invalid url {url!r}: expected http://host:port or https://host:port")
    return parts


class HttpAnswer(NamedTuple):
    status: int
    body: bytes
    json_size: int
    """Bytes of JSON before binary data; 0: no binary data follows."""

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace")


class HttpLink:
    """A connection that is kept open, and reopened once if the server has closed it in the meantime."""

    def __init__(self, scheme: str, netloc: str, token: str, timeout: float | None = TIMEOUT_S) -> None:
        self._address = scheme, netloc, token
        self._connection = (
            http.client.HTTPSConnection(netloc, timeout=timeout, context=ssl.create_default_context())
            if scheme == "https"
            else http.client.HTTPConnection(netloc, timeout=timeout)
        )
        self._url = f"{scheme}://{netloc}"
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._closed = False
        self._lock = threading.Lock()

    def another(self, timeout: float | None) -> HttpLink:
        return HttpLink(*self._address, timeout=timeout)

    def call(self, method: str, path: str, body: str | bytes | None = None) -> Any:
        text = self.text(method, path, body)
        try:
            return json.loads(text)
        except ValueError as error:
            raise Internal(f"the answer to {method} {path} is not JSON: {error}") from error

    def text(self, method: str, path: str, body: str | bytes | None = None) -> str:
        return self.ask(method, path, body).text

    def ask(
        self, method: str, path: str, body: str | bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> HttpAnswer:
        answer = self._request(method, path, body, headers or {})
        if answer.status != 200:
            raise _error(answer, f"{method} {path}")
        return answer

    def events(self, path: str, body: bytes) -> Iterator[bytes]:
        """The data of the server-sent events that answer a POST, as they arrive."""
        try:
            self._connection.request("POST", path, body, self._headers | {"Content-Type": "application/json"})
            answer = self._connection.getresponse()
            if answer.status != 200:
                raise _error(HttpAnswer(answer.status, answer.read(MAX_RESPONSE_BYTES), 0), f"POST {path}")
            while line := answer.readline(MAX_RESPONSE_BYTES):
                if line.startswith(b"data: "):
                    yield line[len(b"data: ") :].rstrip()
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._lost(error) from error

    def status(self, method: str, path: str) -> int:
        return self._request(method, path, None, {}).status

    def _request(self, method: str, path: str, body: str | bytes | None, headers: Mapping[str, str]) -> HttpAnswer:
        with self._lock:
            fresh = self._connection.sock is None
            try:
                return self._once(method, path, body, headers)
            except (OSError, http.client.HTTPException, ValueError) as error:
                self._connection.close()
                if fresh or self._closed or isinstance(error, TimeoutError):
                    raise self._lost(error) from error
            try:
                return self._once(method, path, body, headers)
            except (OSError, http.client.HTTPException, ValueError) as error:
                self._connection.close()
                raise self._lost(error) from error

    def _once(self, method: str, path: str, body: str | bytes | None, headers: Mapping[str, str]) -> HttpAnswer:
        if self._closed:
            raise ConnectionLost("the connection is closed")
        kind = {"Content-Type": "application/json"} if body is not None else {}
        self._connection.request(method, path, body, self._headers | kind | dict(headers))
        answer = self._connection.getresponse()
        data = answer.read(MAX_RESPONSE_BYTES + 1)
        if len(data) > MAX_RESPONSE_BYTES:
            raise http.client.HTTPException(f"its answer has more than {MAX_RESPONSE_BYTES} bytes")
        return HttpAnswer(answer.status, data, int(answer.headers.get(JSON_SIZE, 0)))

    def _lost(self, error: Exception) -> ConnectionLost:
        reason = "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
        return ConnectionLost(f"no server at {self._url} ({reason})")

    def close(self) -> None:
        """Wakes up a call in progress, which fails."""
        self._closed = True
        sock = self._connection.sock
        if sock is not None:
            with contextlib.suppress(OSError):  # the server was faster
                sock.shutdown(socket.SHUT_RDWR)
            if self._lock.acquire(blocking=False):
                self._connection.close()
                self._lock.release()


def _error(answer: HttpAnswer, request: str) -> ServeError:
    """The error that the response describes; only the answers to queries of clients have its code."""
    try:
        document = json.loads(answer.text)
        text, code = document.get("error", ""), document.get("code")
        text = str(text["message"] if isinstance(text, dict) else text)  # an object: of OpenAI's API
    except (ValueError, AttributeError, KeyError):
        text, code = "", None
    if code:
        return from_wire(code, text)
    reason = http.client.responses.get(answer.status, "no reason given")
    return BY_STATUS.get(answer.status, Internal)(text or f"{request}: {reason} (status {answer.status})")
