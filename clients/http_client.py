"""A client over HTTP and HTTPS, for the queries and operations of the command line, and for single requests.

A gateway answers the same queries as the lane, to callers with the same roles, under the path /shmserve/. Tensors are
sent as binary data of KServe v2, which any server of that protocol takes.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import threading
from collections.abc import Iterable, Mapping
from contextlib import closing
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

from shmserve.clients.queries import BlockingQueries
from shmserve.errors import (
    ConnectionLost,
    Denied,
    Internal,
    InvalidRequest,
    NotFound,
    ServeError,
    Unavailable,
    Unsupported,
    from_wire,
)
from shmserve.protocol.messages import Reply, Tensor
from shmserve.session import Result
from shmserve.session.decode import inline_result
from shmserve.session.encode import plain_input
from shmserve.session.uploads import Body

_BY_STATUS: dict[int, type[ServeError]] = {
    400: InvalidRequest,
    401: Denied,
    403: Denied,
    404: NotFound,
    503: Unavailable,
}
TIMEOUT_S = 10.0
MAX_RESPONSE_BYTES = 256 << 20
"""Maximum size of a response."""
_JSON_SIZE = "Inference-Header-Content-Length"
_NO_VERSION = ("", None, 0)


def parts_of(url: str) -> Any:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query or parts.fragment:
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
        secure = scheme == "https"
        created: http.client.HTTPConnection
        if secure:
            created = http.client.HTTPSConnection(netloc, timeout=timeout, context=ssl.create_default_context())
        else:
            created = http.client.HTTPConnection(netloc, timeout=timeout)
        self._made = created
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

    def status(self, method: str, path: str) -> int:
        return self._request(method, path, None, {}).status

    def _request(self, method: str, path: str, body: str | bytes | None, headers: Mapping[str, str]) -> HttpAnswer:
        with self._lock:
            fresh = self._made.sock is None
            try:
                return self._once(method, path, body, headers)
            except (OSError, http.client.HTTPException, ValueError) as error:
                self._made.close()
                if fresh or self._closed or isinstance(error, TimeoutError):
                    raise self._lost(error) from error
            try:
                return self._once(method, path, body, headers)
            except (OSError, http.client.HTTPException, ValueError) as error:
                self._made.close()
                raise self._lost(error) from error

    def _once(self, method: str, path: str, body: str | bytes | None, headers: Mapping[str, str]) -> HttpAnswer:
        if self._closed:
            raise ConnectionLost("the connection is closed")
        kind = {"Content-Type": "application/json"} if body is not None else {}
        self._made.request(method, path, body, self._headers | kind | dict(headers))
        answer = self._made.getresponse()
        data = answer.read(MAX_RESPONSE_BYTES + 1)
        if len(data) > MAX_RESPONSE_BYTES:
            raise http.client.HTTPException(f"its answer has more than {MAX_RESPONSE_BYTES} bytes")
        return HttpAnswer(answer.status, data, int(answer.headers.get(_JSON_SIZE, 0)))

    def _lost(self, error: Exception) -> ConnectionLost:
        reason = "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
        return ConnectionLost(f"no server at {self._url} ({reason})")

    def close(self) -> None:
        """Wakes up a call in progress, which fails."""
        self._closed = True
        sock = self._made.sock
        if sock is not None:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                return  # the server was faster
            if self._lock.acquire(blocking=False):
                self._made.close()
                self._lock.release()


def _error(answer: HttpAnswer, request: str) -> ServeError:
    """The error that the response describes; only the answers to queries of clients have its code."""
    try:
        document = json.loads(answer.text)
        text, code = str(document.get("error", "")), document.get("code")
    except (ValueError, AttributeError):
        text, code = "", None
    if code:
        return from_wire(code, text)
    reason = http.client.responses.get(answer.status, "no reason given")
    return _BY_STATUS.get(answer.status, Internal)(text or f"{request}: {reason} (status {answer.status})")


class HttpClient(BlockingQueries):
    """A server behind `url`. `token` is sent as a bearer token. `timeout`: that of queries, in seconds."""

    def __init__(self, url: str, token: str = "", timeout: float | None = TIMEOUT_S) -> None:
        parts = parts_of(url)
        self._url = url
        self._path = parts.path.rstrip("/")
        self._timeout = timeout
        self._link = HttpLink(parts.scheme, parts.netloc, token, timeout)
        self._closed = threading.Event()

    @property
    def url(self) -> str:
        return self._url

    def _ask(self, what: str, model: str = "", version: int | str | None = None, timeout: float | None = None) -> Any:
        path = self._path_of(what, model, version)
        if timeout is None:
            return self._link.call("GET", path)
        with closing(self._link.another(timeout)) as link:
            return link.call("GET", path)

    def _operate(self, what: str, model: str, version: int | str | None, timeout: float | None, body: Body) -> Any:
        """Over a connection of its own, so that one that has ended meanwhile cannot run an operation twice."""
        with closing(self._link.another(timeout)) as link:
            return link.call("POST", self._path_of(what, model, version), b"".join(iter(body.take, b"")))

    def _path_of(self, what: str, model: str, version: int | str | None) -> str:
        path = f"{self._path}/shmserve/{what}"
        path += f"/models/{quote(model, safe='')}" if model else ""
        return path if version in _NO_VERSION else f"{path}/versions/{version}"

    def metrics(self) -> str:
        raise Unsupported("metrics over HTTP have an endpoint of their own: GET /metrics on --metrics-port")

    def history(self, model: str = "", version: str = "") -> dict[str, Any]:
        """What the gateway has recorded in the last hour, of the server or of a version of a model."""
        part = f"/{quote(model, safe='')}/versions/{version}" if model else ""
        found: dict[str, Any] = self._link.call("GET", f"{self._path}/page/history{part}")
        return found

    def infer(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        outputs: Iterable[str] | None = None,
        version: int | str | None = None,
        timeout: float | None = None,
    ) -> Result:
        """Run the model, and return its outputs."""
        tensors = {name: plain_input(name, value) for name, value in inputs.items()}
        document: dict[str, Any] = {
            "inputs": [
                {"name": name, "datatype": dtype, "shape": shape, "parameters": {"binary_data_size": len(data)}}
                for name, (dtype, shape, data) in tensors.items()
            ],
            "parameters": {"binary_data_output": True} | ({"timeout": round(timeout * 1e6)} if timeout else {}),
        }
        if outputs is not None:
            document["outputs"] = [{"name": name, "parameters": {"binary_data": True}} for name in outputs]
        text = json.dumps(document).encode()
        path = f"{self._path}/v2/models/{quote(model, safe='')}"
        path += "/infer" if version in _NO_VERSION else f"/versions/{version}/infer"
        with closing(self._link.another(timeout)) as link:
            body = b"".join([text, *(data for _, _, data in tensors.values())])
            return _result(link.ask("POST", path, body, {_JSON_SIZE: str(len(text))}))

    def stream(self, *_: object, **__: object) -> Any:
        raise Unsupported("responses of a stream are not sent over HTTP; connect over the lane, ipc or tcp instead")

    def _pause(self, seconds: float) -> None:
        self._closed.wait(seconds)

    def close(self) -> None:
        """Close the connection; a call in progress fails."""
        self._closed.set()
        self._link.close()


def _result(answer: HttpAnswer) -> Result:
    try:
        document = json.loads(answer.body[: answer.json_size or None])
        at, tensors = answer.json_size, []
        for one in document["outputs"]:
            size = one["parameters"]["binary_data_size"]
            tensors.append(Tensor(one["name"], one["datatype"], tuple(one["shape"]), answer.body[at : at + size]))
            at += size
        parameters = document.get("parameters", {})
        return inline_result(Reply(0, int(document.get("model_version") or 0), tuple(tensors), parameters))
    except (KeyError, TypeError, ValueError) as error:
        raise Internal(f"the server's answer is not that of KServe v2: {error!r}") from error
