"""A client over HTTP and HTTPS, for the queries and operations of the command line, and for single requests.

A gateway answers the same queries as the lane, to callers with the same roles, under the path /shmserve/. Tensors are
sent as binary data of KServe v2, which any server of that protocol takes.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import quote

import numpy as np

from shmserve.clients.queries import BlockingQueries
from shmserve.errors import ConnectionLost, DeadlineExceeded, Internal, ModelFailed, Unsupported
from shmserve.protocol.messages import Reply, Tensor
from shmserve.python_values import to_array
from shmserve.session import Result
from shmserve.session.decode import inline_result
from shmserve.session.encode import plain_input
from shmserve.session.uploads import Body
from shmserve.transport.http_link import JSON_SIZE, TIMEOUT_S, HttpAnswer, HttpLink, parts_of

_NO_VERSION = ("", None, 0)


class HttpClient(BlockingQueries):
    """A server behind `url`. `token` is sent as a bearer token. `timeout`: that of queries, in seconds."""

    def __init__(self, url: str, token: str = "", timeout: float | None = TIMEOUT_S) -> None:
        parts = parts_of(url)
        self._url = url
        self._path = parts.path.rstrip("/")
        self._timeout = timeout  # of the queries that are inherited
        self._link = HttpLink(parts.scheme, parts.netloc, token, timeout)
        self._others: set[HttpLink] = set()
        """The connections of calls in progress that have one of their own."""
        self._closed = threading.Event()

    @property
    def url(self) -> str:
        return self._url

    def _ask(self, what: str, model: str = "", version: int | str | None = None, timeout: float | None = None) -> Any:
        path = self._path_of(what, model, version)
        if timeout is None:
            return self._link.call("GET", path)
        with self._another(timeout) as link:
            return link.call("GET", path)

    def _operate(self, what: str, model: str, version: int | str | None, timeout: float | None, body: Body) -> Any:
        """Over a connection of its own, so that one that has ended meanwhile cannot run an operation twice."""
        with self._another(timeout) as link:
            return link.call("POST", self._path_of(what, model, version), b"".join(iter(body.take, b"")))

    @contextmanager
    def _another(self, timeout: float | None) -> Iterator[HttpLink]:
        """A connection for one call. Raises DeadlineExceeded if the server does not answer in time."""
        with closing(self._link.another(timeout)) as link:
            self._others.add(link)
            try:
                yield link
            except ConnectionLost as error:
                if timeout is None or not isinstance(error.__cause__, TimeoutError):
                    raise
                raise DeadlineExceeded(f"{self._url} did not answer within {timeout:g} s") from error
            finally:
                self._others.discard(link)

    def _path_of(self, what: str, model: str, version: int | str | None) -> str:
        path = f"{self._path}/shmserve/{what}"
        path += f"/models/{quote(model, safe='')}" if model else ""
        return path if version in _NO_VERSION else f"{path}/versions/{version}"

    def metrics(self) -> str:
        return self._link.text("GET", f"{self._path}/shmserve/metrics")

    def history(self, model: str = "", version: str = "") -> dict[str, Any]:
        """What the gateway has recorded in the last hour, of the server or of a version of a model."""
        part = f"/{quote(model, safe='')}/versions/{version}" if model else ""
        document: dict[str, Any] = self._link.call("GET", f"{self._path}/page/history{part}")
        return document

    def infer(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        outputs: Iterable[str] | None = None,
        version: int | str | None = None,
        timeout: float | None = None,
    ) -> Result:
        """Runs the model, and returns its outputs."""
        tensors = {name: plain_input(name, value) for name, value in inputs.items()}
        document: dict[str, Any] = {
            "inputs": [
                {"name": name, "datatype": dtype, "shape": shape, "parameters": {"binary_data_size": len(data)}}
                for name, (dtype, shape, data) in tensors.items()
            ],
            "parameters": {"binary_data_output": True} | _timeout(timeout),
        }
        if outputs is not None:
            document["outputs"] = [{"name": name, "parameters": {"binary_data": True}} for name in outputs]
        text = json.dumps(document).encode()
        path = self._model_path(model, version, "infer")
        with self._another(timeout) as link:
            body = b"".join([text, *(data for _, _, data in tensors.values())])
            return _result(link.ask("POST", path, body, {JSON_SIZE: str(len(text))}))

    @contextmanager
    def stream(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        outputs: Iterable[str] | None = None,
        version: int | str | None = None,
        timeout: float | None = None,
    ) -> Iterator[Iterator[Result]]:
        """Runs the model, and returns its responses as they arrive. They come as JSON, in which an output is a list."""
        dtypes = {one["name"]: one["datatype"] for one in self.metadata(model, version)["outputs"]}
        if outputs is not None:
            wanted = frozenset(outputs)
            dtypes = {name: dtype for name, dtype in dtypes.items() if name in wanted}
        document = {name: _json_values(name, value) for name, value in inputs.items()}
        body = json.dumps(document | _timeout(timeout)).encode()
        with self._another(timeout) as link:
            events = link.events(self._model_path(model, version, "generate_stream"), body)
            yield (_part(event, dtypes) for event in events)

    def _model_path(self, model: str, version: int | str | None, what: str) -> str:
        of_version = "" if version in _NO_VERSION else f"/versions/{version}"
        return f"{self._path}/v2/models/{quote(model, safe='')}{of_version}/{what}"

    def _pause(self, seconds: float) -> None:
        self._closed.wait(seconds)

    def close(self) -> None:
        """Closes the connections; calls in progress fail."""
        self._closed.set()
        for link in (self._link, *self._others):
            link.close()


def _timeout(seconds: float | None) -> dict[str, Any]:
    return {"timeout": round(seconds * 1e6)} if seconds else {}


def _json_values(name: str, value: Any) -> list[Any]:
    """The elements in order, as `generate` takes them."""
    values = np.asarray(value).ravel().tolist()
    try:
        return [one.decode() if isinstance(one, bytes) else one for one in values]
    except UnicodeDecodeError:
        raise Unsupported(f"input '{name}' is not text; streams over HTTP have JSON only, use another url") from None


def _part(event: bytes, dtypes: Mapping[str, str]) -> Result:
    try:
        document = json.loads(event)
        if "error" in document:
            raise ModelFailed(document["error"])
        tensors = []
        for name, dtype in dtypes.items():
            if name in document:
                value = document[name]
                array = to_array(value if isinstance(value, list) else [value], dtype)
                tensors.append(Tensor(name, *plain_input(name, array)))
        return inline_result(Reply(0, int(document.get("model_version") or 0), tuple(tensors), {}))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Internal(f"the server's answer is not that of generate_stream: {error!r}") from error


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
