"""The calls whose response is a document: what the message requests, and how the document is encoded. Decisions shared
with HTTP are made in `upstream.documents`, not here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec import Struct

from shmserve.errors import InvalidRequest
from shmserve.gateway.kserve.plans import check_version
from shmserve.gateway.upstream.device_regions import DeviceOrder
from shmserve.gateway.upstream.documents import QueryArguments, Route, unknown_of_load, versions_of_load
from shmserve.gateway.upstream.regions import Registration
from shmserve.protocol.actions import Action
from shmserve.protocol.grpc.messages import INFERENCE, message_class, methods

RpcQuery = tuple[Route, QueryArguments]
_Query = Callable[[Action, Any], RpcQuery]
_Shown = Callable[[Any], dict[str, Any]]


class Rpc(Struct):
    """`query`: message -> what it requests. `shown`: document -> the fields of the response."""

    action: Action
    request: Any
    response: Any
    query: Callable[[Any], RpcQuery]
    shown: _Shown


# ---------------------------------------------------------------------------------------- requests


def _plain(action: Action, message: Any) -> RpcQuery:
    return Route(action), QueryArguments()


def _of_model(action: Action, message: Any) -> RpcQuery:
    return Route(action, message.name, check_version(message.version)), QueryArguments()


def _index(action: Action, message: Any) -> RpcQuery:
    if message.repository_name:
        return Route(Action.NAMED_REPOSITORY), QueryArguments()
    return Route(action), QueryArguments(only_ready=message.ready)


def _load(action: Action, message: Any) -> RpcQuery:
    if message.repository_name:
        return Route(Action.NAMED_REPOSITORY), QueryArguments()
    arguments = QueryArguments(files={})
    for name, parameter in message.parameters.items():
        if name == "config":
            arguments.config = _value(name, parameter, "string_param")
        elif name.startswith("file:"):
            arguments.files[name.removeprefix("file:")] = _value(name, parameter, "bytes_param")
        elif name == "previous":
            arguments.previous = _value(name, parameter, "bool_param")
        elif name == "versions" and parameter.WhichOneof("parameter_choice") == "int64_param":
            arguments.versions = versions_of_load(str(parameter.int64_param))
        elif name == "versions":
            arguments.versions = versions_of_load(_value(name, parameter, "string_param"))
        else:
            raise unknown_of_load(name)
    return Route(action, message.model_name), arguments


def _unload(action: Action, message: Any) -> RpcQuery:
    if message.repository_name:
        return Route(Action.NAMED_REPOSITORY), QueryArguments()
    for name in message.parameters:
        if name not in ("unload_dependents", "force"):
            known = "supported are 'unload_dependents' and 'force'"
            raise InvalidRequest(f"Unrecognized unload parameter '{name[:80]}'; {known}")
    flags = {name: _value(name, parameter, "bool_param") for name, parameter in message.parameters.items()}
    return Route(action, message.model_name), QueryArguments(**flags)


def _value(name: str, parameter: Any, kind: str) -> Any:
    which = parameter.WhichOneof("parameter_choice")
    if which != kind:
        raise InvalidRequest(f"parameter '{name[:80]}' is given as {which or 'nothing'}; expected a {kind}")
    return getattr(parameter, kind)


def _memory(kind: str) -> _Query:
    return lambda action, message: (Route(action, message.name, kind=kind), QueryArguments())


def _register(action: Action, message: Any) -> RpcQuery:
    order = Registration(message.key, message.byte_size, message.offset)
    return Route(action, message.name, kind="system"), QueryArguments(order=order)


def _register_cuda(action: Action, message: Any) -> RpcQuery:
    order = DeviceOrder(message.raw_handle, message.device_id, message.byte_size)
    return Route(action, message.name, kind="cuda"), QueryArguments(order=order)


def _trace(action: Action, message: Any) -> RpcQuery:
    if not message.settings:
        return Route(action, message.model_name), QueryArguments()
    settings = {name: list(one.value) or None for name, one in message.settings.items()}
    return Route(Action.SET_TRACE, message.model_name), QueryArguments(settings=settings)


def _log(action: Action, message: Any) -> RpcQuery:
    if not message.settings:
        return Route(action), QueryArguments()
    settings = {}
    for name, one in message.settings.items():
        kind = one.WhichOneof("parameter_choice")
        if kind is None:
            raise InvalidRequest(f"the log setting '{name[:80]}' has no value")
        settings[name] = getattr(one, kind)
    return Route(Action.SET_LOG), QueryArguments(settings=settings)


# ---------------------------------------------------------------------------------------- responses


def _under(name: str) -> _Shown:
    return lambda document: {name: document}


def _flag(name: str) -> _Shown:
    return lambda document: {name: document.yes}


def _nothing(document: Any) -> dict[str, Any]:
    return {}


def _regions(document: Any) -> dict[str, Any]:
    return {"regions": {region["name"]: region for region in document}}


def _trace_settings(document: Any) -> dict[str, Any]:
    return {"settings": {name: {"value": _texts(value)} for name, value in document.items()}}


def _texts(value: Any) -> list[str]:
    return [str(one) for one in value] if isinstance(value, list) else [str(value)]


def _log_settings(document: Any) -> dict[str, Any]:
    return {"settings": {name: {_kind(value): value} for name, value in document.items()}}


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "bool_param"
    return "uint32_param" if isinstance(value, int) else "string_param"


_HANDLERS: dict[str, tuple[_Query, _Shown]] = {
    "ServerLive": (_plain, _flag("live")),
    "ServerReady": (_plain, _flag("ready")),
    "ModelReady": (_of_model, _flag("ready")),
    "ServerMetadata": (_plain, dict),
    "ModelMetadata": (_of_model, dict),
    "ModelConfig": (_of_model, _under("config")),
    "ModelStatistics": (_of_model, dict),
    "RepositoryIndex": (_index, _under("models")),
    "RepositoryModelLoad": (_load, _nothing),
    "RepositoryModelUnload": (_unload, _nothing),
    "SystemSharedMemoryStatus": (_memory("system"), _regions),
    "SystemSharedMemoryRegister": (_register, _nothing),
    "SystemSharedMemoryUnregister": (_memory("system"), _nothing),
    "CudaSharedMemoryStatus": (_memory("cuda"), _regions),
    "CudaSharedMemoryRegister": (_register_cuda, _nothing),
    "CudaSharedMemoryUnregister": (_memory("cuda"), _nothing),
    "TraceSetting": (_trace, _trace_settings),
    "LogSettings": (_log, _log_settings),
}


def _rpcs() -> dict[str, Rpc]:
    actions = {name: action for action in Action for name in action.row.grpc}
    rpcs = {}
    descriptors = methods(INFERENCE)
    for name, (query, shown) in _HANDLERS.items():
        method, action = descriptors[name], actions[name]
        request, response = message_class(method.input_type.full_name), message_class(method.output_type.full_name)
        rpcs[name] = Rpc(action, request, response, partial(query, action), shown)
    return rpcs


RPCS = _rpcs()
