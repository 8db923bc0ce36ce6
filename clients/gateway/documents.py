"""Questions and operations: what the broker is asked, and the document that the caller gets. The rule of the file: no
socket is known here; a request comes as a route and bytes, an answer as what the broker's JSON said.
"""

from __future__ import annotations

import binascii
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct

from shmserve.clients.gateway.regions import Order, Regions
from shmserve.clients.gateway.routes import Route
from shmserve.errors import InvalidRequest, NotFound, ServeError, Unavailable, Unsupported
from shmserve.session.body import Body, of_json, of_load

_FILE = "file:"
_encode = msgspec.json.Encoder().encode


class Question(Struct):
    """`answer` makes status and body of what the broker said; `failed`, where it is not the usual, of an error."""

    what: str
    answer: Callable[[Any], tuple[int, bytes]]
    model: str = ""
    version: str = ""
    body: Body | None = None
    failed: Callable[[ServeError], tuple[int, bytes] | None] | None = None


class _Filter(Struct):
    ready: bool = False


class _Load(Struct):
    parameters: dict[str, str] = {}


class _UnloadParameters(Struct):
    unload_dependents: bool = False


class _Unload(Struct):
    parameters: _UnloadParameters = msgspec.field(default_factory=_UnloadParameters)


def question_of(route: Route, body: bytes, regions: Regions) -> Question | tuple[int, bytes]:
    """What to ask; or the answer, where there is nothing to ask. Raises what the caller is told."""
    model, version = route.model, route.version
    match route.action:
        case "live" | "ready":
            return Question(route.action, _flag(route.action, b""), failed=_not_there)
        case "model_ready":
            text = error_body("Model version not ready")
            return Question("ready", _flag("ready", text), model, version, failed=_not_ready)
        case "metadata":
            return Question("metadata", _server)
        case "model_metadata":
            return Question("metadata", _json, model, version)
        case "config" | "statistics":
            return Question(route.action, _json, model, version)
        case "index":
            return Question("models", _index(_read(_Filter, body).ready))
        case "load":
            return Question("load", _nothing, model, body=_load_body(body))
        case "unload":
            dependents = _read(_Unload, body).parameters.unload_dependents
            return Question("unload", _nothing, model, body=of_json({"unload_dependents": dependents, "wait": False}),
                            failed=_was_not_there)  # fmt: skip
        case "memory_status":
            return 200, _encode(regions.status(route.kind, model))
        case "memory_register":
            regions.register(route.kind, model, _order(route.kind, body))
            return 200, b""
        case "memory_unregister":
            regions.unregister(route.kind, model)
            return 200, b""
    raise refusal(route.action)


def refusal(action: str) -> ServeError:
    """For what this gateway does not do."""
    match action:
        case "named_repository":
            return Unsupported("'repository_name' specification is not supported")
        case "trace" | "set_trace":
            return Unsupported("the server does not support tracing")
        case "log" | "set_log":
            return Unsupported("the server does not support changing or showing its log settings")
    return Unsupported("this gateway does not do that")


def error_body(text: str) -> bytes:
    if not text.isascii():  # it may say what the caller said, and that may be half a character
        text = text.encode(errors="replace").decode()
    return _encode({"error": text})


# ---------------------------------------------------------------------------------------- answers


def _json(said: Any) -> tuple[int, bytes]:
    return 200, _encode(said)


def _server(said: Any) -> tuple[int, bytes]:
    """With what this door adds."""
    return 200, _encode(said | {"extensions": [*said["extensions"], "binary_tensor_data"]})


def _nothing(said: Any) -> tuple[int, bytes]:
    return 200, b""


def _flag(name: str, otherwise: bytes) -> Callable[[Any], tuple[int, bytes]]:
    return lambda said: (200, b"") if said[name] else (400, otherwise)


def _not_there(error: ServeError) -> tuple[int, bytes] | None:
    """Health of a server that is not there, or about to stop, is an answer and no error."""
    return (400, b"") if isinstance(error, Unavailable) else None


def _not_ready(error: ServeError) -> tuple[int, bytes] | None:
    return (400, error_body(f"Model version not ready: {error}")) if isinstance(error, NotFound) else None


def _was_not_there(error: ServeError) -> tuple[int, bytes] | None:
    """To unload what is not there is no mistake."""
    return (200, b"") if isinstance(error, NotFound) else None


def _index(only_ready: bool) -> Callable[[Any], tuple[int, bytes]]:
    def answer(said: Any) -> tuple[int, bytes]:
        found = []
        for model in said:
            if only_ready and model["state"] != "READY":
                continue
            if model["state"]:
                found.append({name: model[name] for name in ("name", "version", "state", "reason")})
            else:
                found.append({"name": model["name"]})
        return 200, _encode(found)

    return answer


# ---------------------------------------------------------------------------------------- what comes along


def _read(kind: type[Any], body: bytes) -> Any:
    if not body.strip():
        return kind()
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"failed to parse the request JSON buffer: {error}") from None


def _order(kind: str, body: bytes) -> Order:
    if kind != "system":
        return Order("", 0)  # what it says is not looked at
    found: Order = _read(Order, body or b"{}")
    return found


def _load_body(body: bytes) -> Body:
    """`config`, and files under the names "file:PATH", in base64."""
    config: str | None = None
    files: dict[str, bytes] = {}
    for name, value in _read(_Load, body).parameters.items():
        if name == "config":
            config = value
        elif name.startswith(_FILE):
            try:
                files[name.removeprefix(_FILE)] = binascii.a2b_base64(value, strict_mode=True)
            except (binascii.Error, ValueError):
                raise InvalidRequest(f"load parameter '{name[:80]}' is not base64") from None
        else:
            raise InvalidRequest(f"Unrecognized load parameter '{name[:80]}'; known are 'config' and 'file:PATH'")
    if files and config is None:
        raise InvalidRequest("files need the parameter 'config': a model that is sent is not looked for anywhere else")
    return of_load(config, files)
