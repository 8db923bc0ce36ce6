"""KServe v2 over HTTP/1.1: one connection per slot, binary tensors, requests encoded once and sent repeatedly."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from shmserve.errors import ModelFailed
from shmserve.tools.load.plan import Endpoint
from shmserve.tools.load.targets.base import (
    Arrays,
    ModelFacts,
    RequestSlot,
    SequencePart,
    TargetOptions,
    facts_of,
    latest_statistics,
)
from shmserve.tools.load.targets.connecting import explained
from shmserve.tools.load.targets.http_connection import DATA, HttpCaller, HttpConnections
from shmserve.tools.load.targets.kserve import json_values, parameters, raw_bytes

_ERROR_EVENT = b'data: {"error":'
"""The beginning of an event that reports an error. A model may also have an output of this name."""


class HttpTarget:
    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._connections = HttpConnections(endpoint)

    async def facts(self, model: str, version: str) -> ModelFacts:
        path, get = _model_path(model, version), self._connections.get
        with explained(self._endpoint):
            server = await get("/v2")
        metadata = await get(path)
        return facts_of(metadata, await get(f"{path}/config", {}), server)

    def prepare(self, arrays: Arrays, facts: ModelFacts, options: TargetOptions) -> Any:
        kind = _StreamBody if options.stream else _Body
        return kind(arrays, facts, options, self._connections.head)

    async def slot(self) -> RequestSlot:
        return _HttpSlot(await self._connections.caller())

    async def statistics(self, model: str, version: str) -> dict[str, Any]:
        return latest_statistics(await self._connections.get(f"{_model_path(model, version)}/stats", {}))

    async def close(self) -> None:
        self._connections.close()


def _model_path(model: str, version: str) -> str:
    return f"/v2/models/{quote(model, safe='')}" + (f"/versions/{quote(version, safe='')}" if version else "")


class _Body:
    """A request. Its JSON is encoded again only for the parts of sequences, its tensors never."""

    def __init__(self, arrays: Arrays, facts: ModelFacts, options: TargetOptions, head: str) -> None:
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

    def request(self, part: SequencePart | None) -> bytes:
        return self._whole if part is None else self._written(part)

    def _written(self, part: SequencePart | None) -> bytes:
        results = {**parameters(self._options, part), "binary_data_output": True}
        text = json.dumps(self._document | {"parameters": results}).encode()
        lengths = (
            f"Content-Type: application/octet-stream\r\nInference-Header-Content-Length: {len(text)}\r\n"
            f"Content-Length: {len(text) + len(self._tensors)}\r\n\r\n"
        )
        return b"".join((self._start, lengths.encode(), text, self._tensors))


class _StreamBody:
    """A request to generate_stream, which takes plain JSON: one row, and no choice of outputs."""

    def __init__(self, arrays: Arrays, facts: ModelFacts, options: TargetOptions, head: str) -> None:
        path = f"{_model_path(options.model, options.version)}/generate_stream"
        self._start = f"POST {path} HTTP/1.1\r\n{head}Content-Type: application/json\r\n"
        self._options = options
        self._values = {name: json_values(array, facts.inputs[name], facts) for name, array in arrays.items()}
        self._whole = self._written(None)

    def request(self, part: SequencePart | None) -> bytes:
        return self._whole if part is None else self._written(part)

    def _written(self, part: SequencePart | None) -> bytes:
        text = json.dumps(self._values | {"parameters": parameters(self._options, part)}).encode()
        return b"".join((f"{self._start}Content-Length: {len(text)}\r\n\r\n".encode(), text))


class _HttpSlot:
    def __init__(self, caller: HttpCaller) -> None:
        self._caller = caller

    async def send(self, body: Any, part: SequencePart | None) -> None:
        await self._caller.ask(body.request(part))

    async def stream(self, body: Any, part: SequencePart | None, on_answer: Callable[[], None]) -> None:
        failed: list[str] = []

        def receive(event: bytes) -> None:
            text = _event_error(event)
            if text is None:
                on_answer()
            else:
                failed.append(text)

        await self._caller.ask(body.request(part), receive)
        if failed:
            raise ModelFailed(failed[0])


def _event_error(event: bytes) -> str | None:
    """The text of an event that is an error; None for a response of the model."""
    if not event.startswith(_ERROR_EVENT):
        return None
    try:
        document = json.loads(event.removeprefix(DATA))
        return str(document["error"]) if len(document) == 1 else None
    except (ValueError, KeyError):
        return event.decode(errors="replace")
