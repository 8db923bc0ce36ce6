"""The fields around the tensors of a gRPC request -> an RpcPlan. Invariant: limits are checked before anything is
expanded into Python objects."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from shmserve.errors import InvalidRequest
from shmserve.gateway.grpc import contents
from shmserve.gateway.http2.limits import MESSAGE_BYTES
from shmserve.gateway.kserve.plans import (
    InputPlan,
    RegionSlice,
    RequestPlan,
    check_tensor,
    check_version,
    options_of,
    region_slice_of,
    requested_outputs,
)
from shmserve.gateway.limits.bounded_cache import BoundedCache
from shmserve.gateway.limits.turns import SlicedWork
from shmserve.protocol.grpc.messages import message_class, read
from shmserve.protocol.messages import DIMS, PARAMETERS, TENSORS, Value

_CACHED_PLANS = 1024
_CACHED_BYTES = 2048
_EMPTY_FINAL = "triton_enable_empty_final_response"
_REQUEST = message_class("inference.ModelInferRequest")
_PARAMETERS = 2 * PARAMETERS
"""Maximum number of parameters in one map: the model's plus the server's."""


class RpcPlan(Struct, frozen=True):
    """`raw`: number of tensors expected in raw_input_contents. Plans are cached and shared."""

    model: str
    version: str
    plan: RequestPlan
    raw: int
    contents: str = ""
    """The first input with typed contents."""
    empty_final: bool = False


class RpcPlans:
    """Cache of plans: clients repeat requests byte for byte."""

    def __init__(self) -> None:
        self._cache: BoundedCache[bytes, RpcPlan] = BoundedCache(_CACHED_PLANS)

    def plan(self, head: bytes) -> RpcPlan:
        plan = self._cache.get(head)
        if plan is None:
            plan = plan_of(head)
            if len(head) <= _CACHED_BYTES and not plan.contents:
                self._cache.put(head, plan)
        return plan


def plan_of(head: bytes) -> RpcPlan:
    request = _request_of(head)
    return _plan(request, [_spec(one) for one in request.inputs])


def plan_in_slices(head: bytes, limit: int = MESSAGE_BYTES) -> SlicedWork[RpcPlan]:
    """Does the same in slices, without decoding the contents by protobuf. `limit`: maximum size of a numeric tensor,
    which may be eight times its size in the message."""
    split = contents.cut(head)
    request = _request_of(split.around)
    specs = []
    for tensor, data in zip(request.inputs, split.contents, strict=True):
        if data is None:
            specs.append(_spec(tensor))
        else:
            name, dtype, shape = _described(tensor)
            _place(tensor)
            converted = yield from contents.to_bytes(name, dtype, data, limit)
            specs.append(InputPlan(name, dtype, shape, len(converted), converted))
    return _plan(request, specs)


def _request_of(head: bytes) -> Any:
    request = read(_REQUEST, head)
    if len(request.inputs) > TENSORS:
        raise InvalidRequest(f"the request has {len(request.inputs)} inputs; the limit is {TENSORS}")
    return request


def _plan(request: Any, specs: list[InputPlan]) -> RpcPlan:
    parameters = parameters_of("the request", request.parameters)
    empty_final = parameters.pop(_EMPTY_FINAL, False)
    if type(empty_final) is not bool:
        raise InvalidRequest(f"'{_EMPTY_FINAL}' must be true or false, not {empty_final!r:.40}")
    with_contents = next((one.name for one in request.inputs if one.HasField("contents")), "")
    options = options_of("", parameters)
    outputs = requested_outputs([_output(one) for one in request.outputs[: TENSORS + 1]])
    plan = RequestPlan(tuple(specs), 0, options, *outputs)
    raw = sum([spec.follows for spec in specs])
    return RpcPlan(request.model_name, check_version(request.model_version), plan, raw, with_contents, empty_final)


def _output(one: Any) -> tuple[str, dict[str, Value]]:
    return one.name, parameters_of(f"output '{one.name[:80]}'", one.parameters)


def _described(one: Any) -> tuple[str, str, tuple[int, ...]]:
    if len(one.shape) > DIMS:
        raise InvalidRequest(f"input '{one.name[:80]}' has {len(one.shape)} dims; the limit is {DIMS}")
    return one.name, one.datatype, check_tensor(one.name, one.datatype, one.shape)


def _place(one: Any) -> RegionSlice | None:
    """The shared memory region of an input. InvalidRequest: the input also has contents."""
    place: RegionSlice | None = None
    if one.parameters:
        what = f"input '{one.name}'"
        place = region_slice_of(what, parameters_of(what, one.parameters))
    if place is not None and one.HasField("contents"):
        raise InvalidRequest(f"input '{one.name}' is in a shared memory region, but also has data")
    return place


def _spec(one: Any) -> InputPlan:
    name, dtype, shape = _described(one)
    place = _place(one)
    if place is not None:
        return InputPlan(name, dtype, shape, place.size, None, place)
    if one.HasField("contents"):
        data = contents.small_to_bytes(name, dtype, one.contents)
        return InputPlan(name, dtype, shape, len(data), data)
    return InputPlan(name, dtype, shape, 0)


def parameters_of(what: str, fields: Any) -> dict[str, Value]:
    """Decodes a map of InferParameter."""
    if len(fields) > _PARAMETERS:
        raise InvalidRequest(f"{what} has {len(fields)} parameters; the limit is {_PARAMETERS}")
    parameters: dict[str, Value] = {}
    for name, parameter in fields.items():
        kind = parameter.WhichOneof("parameter_choice")
        if kind is None:
            raise InvalidRequest(f"parameter '{name[:80]}' of {what} has no value")
        parameters[name] = getattr(parameter, kind)
    return parameters
