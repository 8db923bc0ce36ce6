"""Queries and operations: the query to the broker, and the document for the client. Independent of the protocol: a
request is a route and its arguments, a response is made from the broker's JSON."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct

from shmserve.errors import InvalidRequest, NotFound, ServeError, Unavailable, Unsupported
from shmserve.gateway.kserve.json_scan import check_depth, unreadable
from shmserve.gateway.kserve.status import encodable
from shmserve.gateway.upstream.device_regions import DeviceOrder, handle_of
from shmserve.gateway.upstream.regions import Caller, Regions, Registration
from shmserve.protocol.actions import Action
from shmserve.protocol.namespaces import plain
from shmserve.session.uploads import Body, loading, of_json, of_unload

_FILE = "file:"
_VERSIONS = re.compile(r"[0-9]{1,19}(,[0-9]{1,19}){0,63}", re.ASCII)
_NO_MODEL = "failed to poll from model repository"
_MEMORY = ("system_shared_memory", "cuda_shared_memory")
_MAX_QUERY_BYTES = 1 << 20
"""Maximum size of a body, except for loads."""
_SETTINGS_BYTES = 16 * 1024
_encode = msgspec.json.Encoder().encode


class Route(Struct, frozen=True):
    """The requested action, and its model or shared memory region."""

    action: Action
    model: str = ""
    version: str = ""
    kind: str = ""
    """Kind of memory, system or cuda, in which case `model` is the name of the region; or openai."""


class YesOrNo(Struct):
    """Yes, or no with a reason. Over HTTP the status says which, and only a reason has a body, as in Triton."""

    yes: bool
    text: str = ""


def same(answer: Any) -> Any:
    return answer


def _raise(error: ServeError) -> Any:
    raise error


class BrokerQuery(Struct):
    """A query to the broker. `show` converts the broker's answer to a document: a YesOrNo, None for no body, or
    anything that can be encoded as JSON. `failed` converts an error to a document, or raises it."""

    what: str
    show: Callable[[Any], Any] = same
    model: str = ""
    version: int | str = ""
    body: Body | None = None
    failed: Callable[[ServeError], Any] = _raise


class BadLoad(InvalidRequest):
    """The model in a load request is invalid. Clients match on this text."""

    def __init__(self, model: str, error: InvalidRequest) -> None:
        text, begin = str(error), f"failed to load '{model}'"
        if text.startswith("load failed for model "):
            super().__init__(text)
            return
        reason = text.removeprefix(begin).removeprefix(": ").removeprefix(f", {_NO_MODEL}: ")
        super().__init__(f"{begin}, {_NO_MODEL}: {reason}")


class FixedDocument(Struct):
    """A document that needs no query to the broker."""

    document: Any


class QueryArguments(Struct):
    """The arguments of a request besides its route. Each action uses some of them."""

    only_ready: bool = False
    config: str | None = None
    files: dict[str, bytes] = {}
    previous: bool = False
    versions: tuple[int, ...] = ()
    unload_dependents: bool = False
    force: bool = False
    order: Registration | DeviceOrder | None = None
    settings: dict[str, Any] | None = None


def query_of(route: Route, arguments: QueryArguments, regions: Regions, caller: Caller) -> BrokerQuery | FixedDocument:
    """The query, or the document if no query is needed. Raises the errors that the client receives."""
    model, version = route.model, route.version
    match route.action:
        case Action.LIVE | Action.READY:
            query = route.action.row.query
            return BrokerQuery(query, _flag(query), failed=_not_there)
        case Action.MODEL_READY:
            return BrokerQuery("ready", _flag("ready", "Model version not ready"), model, version, failed=_not_ready)
        case Action.METADATA:
            return BrokerQuery("metadata", _server(regions))
        case Action.MODEL_METADATA | Action.CONFIG | Action.STATISTICS | Action.TRACE | Action.LOG:
            return BrokerQuery(route.action.row.query, same, model, version)
        case Action.MODELS:
            return BrokerQuery("models", _index(arguments.only_ready))
        case Action.LOAD:
            operation, body = _loading(model, arguments)
            return BrokerQuery(operation, _nothing, model, body=body, failed=_not_loaded(model))
        case Action.UNLOAD:
            body = of_unload(arguments.unload_dependents, False, arguments.force, None)
            return BrokerQuery("unload", _nothing, model, body=body, failed=_was_not_there)
        case Action.SET_TRACE | Action.SET_LOG:
            return BrokerQuery(route.action.row.query, same, model, body=of_json(arguments.settings or {}))
        case Action.MEMORY_STATUS:
            return FixedDocument(regions.status(route.kind, model))
        case Action.MEMORY_REGISTER:
            regions.register(model, arguments.order or Registration("", 0), caller)
            return FixedDocument(None)
        case Action.MEMORY_UNREGISTER:
            regions.unregister(route.kind, model, caller)
            return FixedDocument(None)
        case Action.NAMED_REPOSITORY:
            raise Unsupported("'repository_name' specification is not supported")
    raise Unsupported("this gateway does not support the request")


# ---------------------------------------------------------------------------------------- HTTP responses


def error_body(text: str) -> bytes:
    return _encode({"error": encodable(text)})


def http_answer(document: Any) -> tuple[int, bytes]:
    """Status and body."""
    if document is None:
        return 200, b""
    if type(document) is YesOrNo:
        if document.yes:
            return 200, b""
        return 400, error_body(document.text) if document.text else b""
    return 200, _encode(document)


# ---------------------------------------------------------------------------------------- documents


def _server(regions: Regions) -> Callable[[Any], Any]:
    """Adds the extensions that the gateway implements."""
    added = ["binary_tensor_data", *(_MEMORY if regions.allowed else ())]
    return lambda answer: answer | {"extensions": [*answer["extensions"], *added]}


def _nothing(answer: Any) -> Any:
    return None


def _flag(name: str, otherwise: str = "") -> Callable[[Any], Any]:
    return lambda answer: YesOrNo(True) if answer[name] else YesOrNo(False, otherwise)


def _not_there(error: ServeError) -> Any:
    """For health queries, an unreachable or stopping server is a result, not an error."""
    if isinstance(error, Unavailable):
        return YesOrNo(False)
    raise error


def _not_ready(error: ServeError) -> Any:
    if isinstance(error, NotFound):
        return YesOrNo(False, f"Model version not ready: {error}")
    raise error


def _was_not_there(error: ServeError) -> Any:
    """Unloading a model that does not exist succeeds."""
    if isinstance(error, NotFound):
        return None
    raise error


def _not_loaded(model: str) -> Callable[[ServeError], Any]:
    def failed(error: ServeError) -> Any:
        raise BadLoad(model, error) if isinstance(error, InvalidRequest) else error

    return failed


def _index(only_ready: bool) -> Callable[[Any], Any]:
    def show(answer: Any) -> Any:
        matching = []
        for model in answer:
            if only_ready and model["state"] != "READY":
                continue
            more = ("version", "state", "reason") if model["state"] else ()
            matching.append({"name": plain(model["name"])} | {name: model[name] for name in more})
        return matching

    return show


# ---------------------------------------------------------------------------------------- arguments


class _Filter(Struct):
    ready: bool = False


class _Load(Struct):
    parameters: dict[str, str | bool | int] = {}


class _UnloadParameters(Struct):
    unload_dependents: bool = False
    force: bool = False


class _Unload(Struct):
    parameters: _UnloadParameters = msgspec.field(default_factory=_UnloadParameters)


class _Handle(Struct):
    b64: str


class _DeviceOrder(Struct):
    raw_handle: _Handle
    device_id: int
    byte_size: int


def arguments_of(route: Route, body: bytes) -> QueryArguments:
    """Decodes the arguments in a JSON body."""
    match route.action:
        case Action.MODELS:
            return QueryArguments(only_ready=_only_ready(body))
        case Action.LOAD:
            return _of_load(_read(_Load, body).parameters)
        case Action.UNLOAD:
            values = _read(_Unload, body).parameters
            return QueryArguments(unload_dependents=values.unload_dependents, force=values.force)
        case Action.MEMORY_REGISTER if route.kind == "system":
            return QueryArguments(order=_read(Registration, body))
        case Action.MEMORY_REGISTER:
            query = _read(_DeviceOrder, body)
            return QueryArguments(order=DeviceOrder(handle_of(query.raw_handle.b64), query.device_id, query.byte_size))
        case Action.SET_TRACE | Action.SET_LOG:
            if len(body) > _SETTINGS_BYTES:
                raise InvalidRequest(f"the settings have {len(body)} bytes; the limit is {_SETTINGS_BYTES}")
            return QueryArguments(settings=_read(dict[str, Any], body))
    return QueryArguments()


def _read(kind: Any, body: bytes) -> Any:
    """Decodes the body. An empty one has no fields."""
    if kind is not _Load:
        _check_size(body)
    check_depth(body)
    try:
        return msgspec.json.decode(body if body.strip() else b"{}", type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise unreadable(error) from None


def _check_size(body: bytes) -> None:
    if len(body) > _MAX_QUERY_BYTES:
        raise InvalidRequest(f"the request body has {len(body)} bytes; the limit is {_MAX_QUERY_BYTES}")


def _only_ready(body: bytes) -> bool:
    """As in Triton, a wrong type is reported at any nesting depth, and ends the decoding."""
    if not body.strip():
        return False
    _check_size(body)
    try:
        return msgspec.json.decode(body, type=_Filter).ready
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"Invalid value for 'ready': expected a boolean ({error})") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise unreadable(error) from None


def _of_load(parameters: dict[str, str | bool | int]) -> QueryArguments:
    """`config`; files in base64 under the names "file:PATH"; `previous` and `versions`."""
    arguments = QueryArguments(files={})
    for name, value in parameters.items():
        if name == "versions" and not isinstance(value, bool):
            arguments.versions = versions_of_load(str(value))
        elif name == "previous" and isinstance(value, bool):
            arguments.previous = value
        elif name == "previous" or not isinstance(value, str):
            kind = "true or false" if name == "previous" else "a string"
            raise InvalidRequest(f"load parameter '{name[:80]}' must be {kind}")
        elif name == "config":
            arguments.config = value
        elif name.startswith(_FILE):
            try:
                arguments.files[name.removeprefix(_FILE)] = base64.b64decode(value, validate=True)
            except (binascii.Error, ValueError):
                raise InvalidRequest(f"load parameter '{name[:80]}' is not base64") from None
        else:
            raise unknown_of_load(name)
    return arguments


def unknown_of_load(name: str) -> InvalidRequest:
    return InvalidRequest(
        f"Unrecognized load parameter '{name[:80]}'; supported are 'config', 'file:PATH', 'previous' and 'versions'"
    )


def versions_of_load(text: str) -> tuple[int, ...]:
    """The parameter `versions`: numbers separated by commas. The broker checks their range."""
    if not _VERSIONS.fullmatch(text):
        raise InvalidRequest(f"load parameter 'versions' is '{text[:80]}'; expected numbers, such as '2' or '2,3'")
    return tuple(map(int, text.split(",")))


def _loading(model: str, arguments: QueryArguments) -> tuple[str, Body]:
    try:
        if arguments.files and arguments.config is None:
            raise InvalidRequest(
                "files require the parameter 'config', as the repository is not read for a model that is sent"
            )
        return loading(arguments.config, arguments.files, arguments.previous, arguments.versions)
    except InvalidRequest as error:
        raise BadLoad(model, error) from error
