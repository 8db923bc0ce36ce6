"""Parses a KServe request in JSON into a `RequestPlan`: what to send to the broker, and how to answer the client.

Invalid requests raise InvalidRequest (Internal for negative dims, as in Triton). Invariant: every plan can be encoded
for the broker, so that a client's error is never counted as the gateway's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Struct

from shmserve.dtypes import ITEM_BYTES
from shmserve.dtypes import elements as elements_of
from shmserve.errors import Internal, InvalidRequest
from shmserve.gateway.kserve import json_outline, json_tensors
from shmserve.gateway.kserve.json_outline import CutList
from shmserve.gateway.kserve.json_scan import Text, check_depth, unreadable
from shmserve.gateway.limits.bounded_cache import BoundedCache
from shmserve.gateway.limits.turns import SlicedWork
from shmserve.protocol.messages import DIMS, NAME_LENGTH, PARAMETERS, TENSORS, Value
from shmserve.session.encode import TopK
from shmserve.shm.views import Array

CLASSES = 1_000_000
"""Maximum number of classes that a request may ask for."""
INT64_MAX = 2**63 - 1
UINT64_MAX = 2**64 - 1
_CACHED_PLANS = 1024
_CACHED_BYTES = 2048
_UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
_RESERVED = "headers"
RESERVED_PREFIX = "triton_"
"""Parameters whose names begin so have a meaning for the server."""


class _Input(Struct):
    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Value] = {}
    data: Any = UNSET


class _RequestedOutput(Struct):
    name: str
    parameters: dict[str, Value] = {}


class _JsonRequest(Struct):
    inputs: list[_Input]
    outputs: list[_RequestedOutput] | None = None
    id: str = ""
    parameters: dict[str, Value] = {}


_decode = msgspec.json.Decoder(_JsonRequest).decode


class RegionSlice(Struct, frozen=True):
    """Location of a tensor in shared memory that the client has registered."""

    region: str
    offset: int
    size: int

    def check(self, region: str, size: int) -> None:
        """Raises InvalidRequest if the tensor exceeds the region of `size` bytes. The order of the checks and their
        texts are Triton's."""
        if self.offset >= size:
            raise InvalidRequest(f"Invalid offset for shared memory region: '{region}'")
        if self.offset + self.size > UINT64_MAX:
            raise InvalidRequest(
                f"Integer overflow detected: byte_size ({self.size}) + offset ({self.offset}) > {UINT64_MAX} for "
                f"shared memory region: '{region}'"
            )
        if self.offset + self.size > size:
            raise InvalidRequest(f"Invalid offset + byte size for shared memory region: '{region}'")


class InputPlan(Struct, frozen=True):
    """An input. Its bytes are in `data` if the JSON contains them, or in shared memory at `place`; otherwise they are
    `size` bytes of the binary data after the JSON. `data` is an array if it has already been copied to the memory that
    workers map."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    data: bytes | bytearray | Array | None = None
    place: RegionSlice | None = None

    @property
    def follows(self) -> bool:
        return self.data is None and self.place is None


class RequestOptions(Struct):
    """The parameters of a request, in the form that the session expects."""

    id: str = ""
    priority: int | None = None
    sequence: int | str | None = None
    sequence_start: bool = False
    sequence_end: bool = False
    parameters: dict[str, Value] | None = None
    binary: bool = False
    """Whether outputs that the request does not list are sent as binary data."""


class RequestPlan(Struct, frozen=True):
    """One request to a model. Cached and shared by equal requests."""

    inputs: tuple[InputPlan, ...]
    binary_bytes: int
    """Size of the binary data after the JSON."""
    options: RequestOptions
    outputs: Sequence[str] | Mapping[str, TopK | None] | None = None
    binary: dict[str, bool] = {}
    """Whether an output that the request lists is sent as binary data."""
    places: dict[str, RegionSlice] = {}
    """Outputs that are written to shared memory instead of being sent."""

    @property
    def in_regions(self) -> list[str]:
        """Regions that the request reads or writes."""
        places = [spec.place for spec in self.inputs if spec.place is not None]
        return [place.region for place in (*places, *self.places.values())] if places or self.places else []

    def is_binary(self, output: str) -> bool:
        return self.binary.get(output, self.options.binary)


class RequestPlans:
    """Cache of plans by the bytes of the JSON, which clients often repeat exactly."""

    def __init__(self) -> None:
        self._cache: BoundedCache[bytes, RequestPlan] = BoundedCache(_CACHED_PLANS)

    def plan(self, text: bytes) -> RequestPlan:
        plan = self._cache.get(text)
        if plan is None:
            plan = plan_of(text)
            if len(text) <= _CACHED_BYTES and not plan.options.id and all(spec.data is None for spec in plan.inputs):
                self._cache.put(text, plan)
        return plan


def plan_of(text: bytes) -> RequestPlan:
    check_depth(text)
    request = _request_of(text)
    return _plan(request, [_spec(one) for one in request.inputs])


def plan_in_slices(text: Text, limit: int) -> SlicedWork[RequestPlan]:
    """Like `plan_of`, but parses a large text in slices. `limit`: maximum size of an input in bytes."""
    outline = yield from json_outline.outline(text)
    request = _request_of(outline.around)
    yield
    specs = []
    for tensor in request.inputs:
        cut = json_outline.cut_of(tensor.data, outline)
        specs.append(_spec(tensor) if cut is None else (yield from _cut_spec(tensor, text, cut, limit)))
    return _plan(request, specs)


def _plan(request: _JsonRequest, specs: Sequence[InputPlan]) -> RequestPlan:
    total = sum([spec.size for spec in specs if spec.follows])
    options = options_of(request.id, request.parameters)
    outputs = requested_outputs([(output.name, output.parameters) for output in request.outputs or ()])
    return RequestPlan(tuple(specs), total, options, *outputs)


def _request_of(text: bytes) -> _JsonRequest:
    try:
        request = _decode(text)
    except _UNREADABLE as error:
        if b"NaN" not in text and b"Infinity" not in text:
            raise unreadable(error) from None
        request = _decode_non_finite(text)
    if len(request.inputs) > TENSORS:
        raise InvalidRequest(f"the request has {len(request.inputs)} inputs; the limit is {TENSORS}")
    return request


def _decode_non_finite(text: bytes) -> _JsonRequest:
    """Decodes a request that contains NaN or Infinity, which are not JSON but are accepted in requests."""
    try:
        return msgspec.convert(json.loads(text), _JsonRequest)
    except _UNREADABLE as error:
        raise unreadable(error) from None


# ---------------------------------------------------------------------------------------- tensors


def check_tensor(name: str, dtype: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Checks the fields of an input except its data. Returns the shape."""
    check_text("input name", name)
    if len(shape) > DIMS:
        raise InvalidRequest(f"input '{name}' has {len(shape)} dims; the limit is {DIMS}")
    dims = tuple(shape)
    if any(not 0 <= dim <= INT64_MAX for dim in dims):
        raise InvalidRequest(f"input '{name}' of shape {list(dims)}: dims must be from 0 to {INT64_MAX}")
    if dtype not in ITEM_BYTES:
        raise InvalidRequest(f"input '{name}' has the unknown data-type '{dtype[:40]}'")
    count = elements_of(dims)
    if count > INT64_MAX:
        raise InvalidRequest(
            f"shape {list(dims)} of input '{name}' causes total element count to exceed maximum size of {INT64_MAX}"
        )
    if count * (ITEM_BYTES[dtype] or 1) > INT64_MAX:
        raise InvalidRequest(f"byte size overflow for input '{name}' of shape {list(dims)} and data-type {dtype}")
    return dims


def _shape_of(tensor: _Input) -> tuple[int, ...]:
    if any(dim < 0 for dim in tensor.shape):  # Triton's parser answers this with status 500
        raise Internal(
            "Unable to parse 'shape': attempt to access JSON non-unsigned-integer as unsigned-integer: input "
            f"'{tensor.name[:80]}' has the shape {tensor.shape[:DIMS]}"
        )
    return check_tensor(tensor.name, tensor.datatype, tensor.shape)


def _spec(tensor: _Input) -> InputPlan:
    name, parameters = tensor.name, tensor.parameters
    shape = _shape_of(tensor)
    size = parameters.get("binary_data_size")
    place = region_slice_of(f"input '{name}'", parameters) if parameters else None
    if place is not None:
        if size is not None or tensor.data is not UNSET:
            raise InvalidRequest(f"input '{name}' is in a shared memory region, but also has data")
        return InputPlan(name, tensor.datatype, shape, place.size, None, place)
    if size is None:
        if tensor.data is UNSET:
            raise InvalidRequest(f"input '{name}' has neither 'data' nor the parameter 'binary_data_size'")
        data = json_tensors.to_bytes(name, tensor.datatype, shape, tensor.data)
        return InputPlan(name, tensor.datatype, shape, len(data), data)
    if tensor.data is not UNSET:
        raise InvalidRequest(f"input '{name}' has both 'data' and the parameter 'binary_data_size'")
    return InputPlan(name, tensor.datatype, shape, _count(f"'binary_data_size' of input '{name}'", size))


def _cut_spec(tensor: _Input, text: Text, cut: CutList, limit: int) -> SlicedWork[InputPlan]:
    if "binary_data_size" in tensor.parameters or "shared_memory_region" in tensor.parameters:
        return _spec(tensor)  # raises
    shape = _shape_of(tensor)
    data = yield from json_tensors.cut_to_bytes(tensor.name, tensor.datatype, shape, text, cut, limit)
    return InputPlan(tensor.name, tensor.datatype, shape, len(data), data)


RequestedOutputs = tuple[Sequence[str] | Mapping[str, TopK | None] | None, dict[str, bool], dict[str, RegionSlice]]
"""The fields `outputs`, `binary` and `places` of a plan."""


def requested_outputs(outputs: Sequence[tuple[str, Mapping[str, Value]]]) -> RequestedOutputs:
    """`outputs`: their names and parameters."""
    if len(outputs) > TENSORS:
        raise InvalidRequest(f"the request names {len(outputs)} outputs; the limit is {TENSORS}")
    wanted: dict[str, TopK | None] = {}
    binary: dict[str, bool] = {}
    places: dict[str, RegionSlice] = {}
    for name, parameters in outputs:
        check_text("output name", name)
        if name in wanted:
            raise InvalidRequest(f"output '{name}' already exists in request")
        wanted[name] = _classes(name, parameters)
        place = region_slice_of(f"output '{name}'", parameters) if parameters else None
        if place is not None:
            places[name] = place
        binary[name] = _bool(f"'binary_data' of output '{name}'", parameters.get("binary_data", False))
    return (wanted if any(wanted.values()) else list(wanted) or None), binary, places


def _classes(name: str, parameters: Mapping[str, Value]) -> TopK | None:
    count = parameters.get("classification")
    if count is None:
        return None
    if "shared_memory_region" in parameters:
        raise InvalidRequest(f"output '{name}': 'classification' results cannot be written to a shared memory region")
    if type(count) is not int or not 0 < count <= CLASSES:
        raise InvalidRequest(f"'classification' of output '{name}' must be a number from 1 to {CLASSES}, not {count!r}")
    return TopK(count)


def region_slice_of(what: str, parameters: Mapping[str, Value]) -> RegionSlice | None:
    region = parameters.get("shared_memory_region")
    if region is None:
        return None
    if type(region) is not str:
        raise InvalidRequest(f"'shared_memory_region' of {what} must be a name")
    if "shared_memory_byte_size" not in parameters:
        raise InvalidRequest(f"{what} is in a shared memory region, but has no 'shared_memory_byte_size'")
    offset = _count(f"'shared_memory_offset' of {what}", parameters.get("shared_memory_offset", 0), UINT64_MAX)
    size = _count(f"'shared_memory_byte_size' of {what}", parameters["shared_memory_byte_size"], UINT64_MAX)
    return RegionSlice(check_text("region name", region), offset, size)


# ---------------------------------------------------------------------------------------- parameters


def options_of(request_id: str, parameters: Mapping[str, Value]) -> RequestOptions:
    """Separates parameters for the server from those for the model. `timeout` stays with the latter, because the
    session interprets it."""
    options = RequestOptions(check_text("request id", request_id) if request_id else "")
    if not parameters:
        return options
    rest: dict[str, Value] = {}
    for name, value in parameters.items():
        match name:
            case "sequence_id":
                options.sequence = _sequence(value)
            case "sequence_start":
                options.sequence_start = _bool(f"'{name}'", value)
            case "sequence_end":
                options.sequence_end = _bool(f"'{name}'", value)
            case "priority":
                options.priority = _count(f"'{name}'", value, UINT64_MAX)
            case "binary_data_output":
                options.binary = _bool(f"'{name}'", value)
            case _:
                rest[check_text("parameter name", name)] = _parameter(name, value)
    if len(rest) > PARAMETERS:
        raise InvalidRequest(f"the request has {len(rest)} parameters; the limit is {PARAMETERS}")
    if not options.sequence:  # the id is missing, 0 or "": not in a sequence, so ignore the flags
        options.sequence_start = options.sequence_end = False
    if rest:
        options.parameters = rest
    return options


def _parameter(name: str, value: Value) -> Value:
    if name == "timeout":
        return _count("'timeout'", value)
    if name == _RESERVED or name.startswith(RESERVED_PREFIX):
        raise InvalidRequest(f"parameter '{name}' is reserved for Triton usage and should not be specified")
    if type(value) is int and not -INT64_MAX - 1 <= value <= INT64_MAX:
        raise InvalidRequest(f"parameter '{name}' does not fit in 64 bits")
    if type(value) is str:
        _writable(f"parameter '{name}'", value)
    return value


def _sequence(value: Value) -> int | str | None:
    if type(value) is str:
        return check_text("sequence_id", value) if value else None
    number = _count("'sequence_id'", value, UINT64_MAX)
    return number or None


def _count(what: str, value: Value, largest: int = INT64_MAX) -> int:
    if type(value) is not int or not 0 <= value <= largest:
        raise InvalidRequest(f"{what} must be a number from 0 to {largest}, not {value!r:.40}")
    return value


def _bool(what: str, value: Value) -> bool:
    if type(value) is not bool:
        raise InvalidRequest(f"{what} must be true or false, not {value!r:.40}")
    return value


def is_version(text: str) -> bool:
    return text.isascii() and text.isdecimal() and 0 < int(text[:20]) <= INT64_MAX


def check_version(version: str) -> str:
    if version and not is_version(version):
        raise InvalidRequest(
            f"failed to get model version from specified version string '{version[:40]}': expected an integer above 0"
        )
    return version


def check_text(what: str, text: str) -> str:
    """Returns the text. Raises InvalidRequest if it is too long or cannot be encoded for the broker."""
    if len(text) > NAME_LENGTH:
        raise InvalidRequest(f"{what} '{text[:40]}...' has {len(text)} characters; the limit is {NAME_LENGTH}")
    return _writable(what, text)


def _writable(what: str, text: str) -> str:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(f"{what} contains a lone surrogate") from None
    return text


# ---------------------------------------------------------------------------------------- raw requests


def raw_plan(model: str, config: Mapping[str, Any], size: int) -> tuple[RequestPlan, bytes]:
    """The plan of a request without JSON, whose body is the data of the model's only input; and the bytes to insert
    before the body. `config`: the model's configuration; `size`: bytes of the body."""
    inputs = config.get("input", [])
    if len(inputs) != 1:
        raise InvalidRequest(
            f"Raw request must only have 1 input (found 1) to be deduced but got {len(inputs)} inputs in "
            f"'{model}' model configuration"
        )
    name, dtype = inputs[0]["name"], tensor_type(inputs[0])
    dims = [int(dim) for dim in inputs[0]["dims"]]
    lead = (1,) if config.get("max_batch_size", 0) else ()
    prefix = b""
    if dtype == "BYTES":
        if any(dim != 1 for dim in dims):
            raise InvalidRequest(f"For BYTE datatype raw input '{name}', the model must have input shape [1]")
        prefix = size.to_bytes(4, "little")
    else:
        dims = _fitted(name, dims, size, ITEM_BYTES[dtype])
    spec = InputPlan(name, dtype, (*lead, *dims), len(prefix) + size)
    return RequestPlan((spec,), spec.size, RequestOptions(binary=True)), prefix


def tensor_type(config: Mapping[str, Any]) -> str:
    """The data type of an input in a model's configuration."""
    dtype: str = config["data_type"].removeprefix("TYPE_")
    return "BYTES" if dtype == "STRING" else dtype


def _fitted(name: str, dims: list[int], size: int, item: int) -> list[int]:
    variable = [index for index, dim in enumerate(dims) if dim < 0]
    if len(variable) > 1:
        raise InvalidRequest(
            f"The shape of the raw input '{name}' can not be deduced because there are more than one variable-sized "
            "dimension"
        )
    for index in variable:
        row = item
        for dim in dims:
            row *= dim if dim >= 0 else 1
        if not row or size % row:
            raise InvalidRequest(
                f"{size} bytes of raw input '{name}' are not a multiple of its row size of {row} bytes"
            )
        dims[index] = size // row
    return dims
