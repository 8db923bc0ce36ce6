"""Methods and paths of HTTP -> what is wanted. The rule of the file: one table, and who may do what stands beside it.

What is wanted has one name here, whatever the path; whether this door gives it is looked up by that name.
"""

from __future__ import annotations

from urllib.parse import unquote

from msgspec import Struct

from shmserve.clients.gateway.flags import INFER, OBSERVE, OPERATE, ROLES
from shmserve.errors import InvalidRequest

NEEDS = {
    "live": ROLES,
    "ready": ROLES,
    "model_ready": ROLES,
    "metadata": ROLES,
    "model_metadata": ROLES,
    "config": (OBSERVE, OPERATE),
    "statistics": (OBSERVE, OPERATE),
    "index": (OBSERVE, OPERATE),
    "metrics": (OBSERVE, OPERATE),
    "infer": (INFER,),
    "generate": (INFER,),
    "generate_stream": (INFER,),
    "load": (OPERATE,),
    "unload": (OPERATE,),
    "trace": (OBSERVE, OPERATE),
    "set_trace": (OPERATE,),
    "log": (OBSERVE, OPERATE),
    "set_log": (OPERATE,),
    "memory_status": (INFER, OPERATE),
    "memory_register": (INFER, OPERATE),
    "memory_unregister": (INFER, OPERATE),
    "named_repository": (OPERATE,),
}
"""What is wanted -> the roles of which the door has to give one. What is not here nobody gets."""


class Route(Struct, frozen=True):
    """What is wanted, and of what. `status` other than 200: nothing, and this is why."""

    action: str
    model: str = ""
    version: str = ""
    status: int = 200
    text: str = ""
    kind: str = ""
    """Of memory: system or cuda. `model` is the name of the region then."""
    allow: str = ""
    """The methods that the path has, where another was used."""


_HEALTH = {"live": "live", "ready": "ready"}
_OF_MODEL = {"": "model_metadata", "ready": "model_ready", "config": "config", "stats": "statistics"}
_TO_MODEL = {"infer": "infer", "generate": "generate", "generate_stream": "generate_stream"}
_OPERATIONS = {"load": "load", "unload": "unload"}
_MEMORY = ("systemsharedmemory", "cudasharedmemory")

UNKNOWN = Route("", status=404, text="Not Found")


def resolve(method: str, target: str, metrics: bool = False) -> Route:
    """`target` as it stands in the request. `metrics`: at the door of Prometheus, which has nothing else."""
    path = target.partition("?")[0].partition("#")[0]
    try:
        words = [unquote(word, errors="strict") for word in path.strip("/").split("/")]
    except UnicodeDecodeError:
        return Route("", status=400, text="the path is not UTF-8")
    try:
        if metrics:
            return _allowed(method, ("GET",), Route("metrics")) if words == ["metrics"] else UNKNOWN
        return _found(method, words) if words[0] == "v2" else UNKNOWN
    except InvalidRequest as error:
        return Route("", status=400, text=str(error))


def _allowed(method: str, methods: tuple[str, ...], route: Route) -> Route:
    if method in methods:
        return route
    return Route("", status=405, text=f"Method Not Allowed: use {' or '.join(methods)}", allow=", ".join(methods))


def _found(method: str, words: list[str]) -> Route:
    get, post = ("GET",), ("POST",)
    match words[1:]:
        case []:
            return _allowed(method, get, Route("metadata"))
        case ["health", word] if word in _HEALTH:
            return _allowed(method, get, Route(_HEALTH[word]))
        case ["models", "stats"]:
            return _allowed(method, get, Route("statistics"))
        case ["models", model, "trace", "setting"]:
            return _setting(method, "trace", _named(model))
        case ["models", model, *rest]:
            return _model(method, _named(model), rest)
        case ["trace", "setting"]:
            return _setting(method, "trace", "")
        case ["logging"]:
            return _setting(method, "log", "")
        case ["repository", "index"]:
            return _allowed(method, post, Route("index"))
        case ["repository", "models", model, word] if word in _OPERATIONS:
            return _allowed(method, post, Route(_OPERATIONS[word], _named(model)))
        case ["repository", _, "index"] | ["repository", _, "models", _, "load" | "unload"]:
            return _allowed(method, post, Route("named_repository"))
        case [kind, *rest] if kind in _MEMORY:
            return _memory(method, kind.removesuffix("sharedmemory"), rest)
    return UNKNOWN


def _named(model: str) -> str:
    if not model:
        raise InvalidRequest("the name of the model is missing in the path")
    return model


def _setting(method: str, what: str, model: str) -> Route:
    return _allowed(method, ("GET", "POST"), Route(what if method == "GET" else f"set_{what}", model))


def _model(method: str, model: str, rest: list[str]) -> Route:
    version = ""
    if rest[:1] == ["versions"] and len(rest) > 1:
        version, rest = rest[1], rest[2:]
        if not (version.isascii() and version.isdecimal() and 0 < int(version[:20]) < 2**63):
            return Route("", status=400, text=f"version '{version[:40]}' of the path is not a number from 1 on")
    word = "/".join(rest)
    if word in _OF_MODEL:
        return _allowed(method, ("GET",), Route(_OF_MODEL[word], model, version))
    if word in _TO_MODEL:
        return _allowed(method, ("POST",), Route(_TO_MODEL[word], model, version))
    return UNKNOWN


def _memory(method: str, kind: str, rest: list[str]) -> Route:
    region = ""
    if rest[:1] == ["region"] and len(rest) > 1:
        region, rest = rest[1], rest[2:]
    match rest:
        case ["status"]:
            return _allowed(method, ("GET",), Route("memory_status", region, kind=kind))
        case ["register"]:
            return _allowed(method, ("POST",), Route("memory_register", region, kind=kind))
        case ["unregister"]:
            return _allowed(method, ("POST",), Route("memory_unregister", region, kind=kind))
    return UNKNOWN
