"""The table of calls whose response is a document. A row says what the message requests and how the document is
encoded. Decisions shared with HTTP are made in `upstream.documents`, not here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from shmserve.errors import InvalidRequest
from shmserve.gateway.auth.actions import Action
from shmserve.gateway.grpc.messages import INFERENCE, message_class, methods
from shmserve.gateway.kserve.plans import check_version
from shmserve.gateway.upstream.device_regions import DeviceOrder
from shmserve.gateway.upstream.documents import Arguments, Route, unknown_of_load, versions_of_load
from shmserve.gateway.upstream.regions import Registration

RpcQuery = tuple[Route, Arguments]


class Rpc(Struct):
    """`query`: message -> what it requests. `shown`: document -> the fields of the response."""

    action: Action
    request: Any
    response: Any
    query: Callable[[Any], RpcQuery]
    shown: Callable[[Any], dict[str, Any]]


# ---------------------------------------------------------------------------------------- requests


def _plain(action: Action) -> Callable[[Any], RpcQuery]:
    return lambda message: (Route(action), Arguments())


def _of_model(action: Action) -> Callable[[Any], RpcQuery]:
    return lambda message: (Route(action, message.name, check_version(message.version)), Arguments())


def _index(message: Any) -> RpcQuery:
    if message.repository_name:
        return Route(Action.NAMED_REPOSITORY), Arguments()
    return Route(Action.INDEX), Arguments(only_ready=message.ready)


def _load(message: Any) -> RpcQuery:
    if message.repository_name:
        return Route(Action.NAMED_REPOSITORY), Arguments()
    arguments = Arguments(files={})
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
    return Route(Action.LOAD, message.model_name), arguments


def _unload(message: Any) -> RpcQuery:
    if message.repository_name:
        return Route(Action.NAMED_REPOSITORY), Arguments()
    arguments = Arguments()
    for name, parameter in message.parameters.items():
        if name not in ("unload_dependents", "force"):
            known = "supported are 'unload_dependents' and 'force'"
            raise InvalidRequest(f"Unrecognized unload parameter '{name[:80]}'; {known}")
        setattr(arguments, name, _value(name, parameter, "bool_param"))
    return Route(Action.UNLOAD, message.model_name), arguments


def _value(name: str, parameter: Any, kind: str) -> Any:
    given = parameter.WhichOneof("parameter_choice")
    if given != kind:
        raise InvalidRequest(f"parameter '{name[:80]}' is given as {given or 'nothing'}; expected a {kind}")
    return getattr(parameter, kind)


def _memory(action: Action, kind: str) -> Callable[[Any], RpcQuery]:
    return lambda message: (Route(action, message.name, kind=kind), Arguments())


def _register(message: Any) -> RpcQuery:
    order = Registration(message.key, message.byte_size, message.offset)
    return Route(Action.MEMORY_REGISTER, message.name, kind="system"), Arguments(order=order)


def _register_cuda(message: Any) -> RpcQuery:
    order = DeviceOrder(message.raw_handle, message.device_id, message.byte_size)
    return Route(Action.MEMORY_REGISTER, message.name, kind="cuda"), Arguments(order=order)


def _trace(message: Any) -> RpcQuery:
    if not message.settings:
        return Route(Action.TRACE, message.model_name), Arguments()
    settings = {name: list(one.value) or None for name, one in message.settings.items()}
    return Route(Action.SET_TRACE, message.model_name), Arguments(settings=settings)


def _log(message: Any) -> RpcQuery:
    if not message.settings:
        return Route(Action.LOG), Arguments()
    settings = {}
    for name, one in message.settings.items():
        kind = one.WhichOneof("parameter_choice")
        if kind is None:
            raise InvalidRequest(f"the log setting '{name[:80]}' has no value")
        settings[name] = getattr(one, kind)
    return Route(Action.SET_LOG), Arguments(settings=settings)


# ---------------------------------------------------------------------------------------- responses


def _same(document: Any) -> dict[str, Any]:
    return dict(document)


def _under(name: str) -> Callable[[Any], dict[str, Any]]:
    return lambda document: {name: document}


def _flag(name: str) -> Callable[[Any], dict[str, Any]]:
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


_TABLE: dict[str, tuple[Action, Callable[[Any], RpcQuery], Callable[[Any], dict[str, Any]]]] = {
    "ServerLive": (Action.LIVE, _plain(Action.LIVE), _flag("live")),
    "ServerReady": (Action.READY, _plain(Action.READY), _flag("ready")),
    "ModelReady": (Action.MODEL_READY, _of_model(Action.MODEL_READY), _flag("ready")),
    "ServerMetadata": (Action.METADATA, _plain(Action.METADATA), _same),
    "ModelMetadata": (Action.MODEL_METADATA, _of_model(Action.MODEL_METADATA), _same),
    "ModelConfig": (Action.CONFIG, _of_model(Action.CONFIG), _under("config")),
    "ModelStatistics": (Action.STATISTICS, _of_model(Action.STATISTICS), _same),
    "RepositoryIndex": (Action.INDEX, _index, _under("models")),
    "RepositoryModelLoad": (Action.LOAD, _load, _nothing),
    "RepositoryModelUnload": (Action.UNLOAD, _unload, _nothing),
    "SystemSharedMemoryStatus": (Action.MEMORY_STATUS, _memory(Action.MEMORY_STATUS, "system"), _regions),
    "SystemSharedMemoryRegister": (Action.MEMORY_REGISTER, _register, _nothing),
    "SystemSharedMemoryUnregister": (Action.MEMORY_UNREGISTER, _memory(Action.MEMORY_UNREGISTER, "system"), _nothing),
    "CudaSharedMemoryStatus": (Action.MEMORY_STATUS, _memory(Action.MEMORY_STATUS, "cuda"), _regions),
    "CudaSharedMemoryRegister": (Action.MEMORY_REGISTER, _register_cuda, _nothing),
    "CudaSharedMemoryUnregister": (Action.MEMORY_UNREGISTER, _memory(Action.MEMORY_UNREGISTER, "cuda"), _nothing),
    "TraceSetting": (Action.TRACE, _trace, _trace_settings),
    "LogSettings": (Action.LOG, _log, _log_settings),
}


def _rpcs() -> dict[str, Rpc]:
    rpcs = {}
    descriptors = methods(INFERENCE)
    for name, (action, query, shown) in _TABLE.items():
        method = descriptors[name]
        request, response = message_class(method.input_type.full_name), message_class(method.output_type.full_name)
        rpcs[name] = Rpc(action, request, response, query, shown)
    return rpcs


RPCS = _rpcs()
