"""What python models import as `triton_python_backend_utils`: tensors, requests, responses, errors, helpers.

The rule: names and behaviour are those that models were written against. What this server does not do yet raises
TritonModelException and says so by name, instead of being missing.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from shmserve import dtypes
from shmserve.errors import ServeError
from shmserve.messages import Options, Work
from shmserve.shm.strings import decode_bytes, encode_bytes
from shmserve.workers.pb_config import ModelConfig
from shmserve.workers.say import say

if TYPE_CHECKING:
    from shmserve.workers.pb_host import Host
    from shmserve.workers.streams import Stream

__all__ = [
    "InferenceRequest",
    "InferenceResponse",
    "InferenceResponseSender",
    "Logger",
    "MetricFamily",
    "ModelConfig",
    "PreferredMemory",
    "Tensor",
    "TritonError",
    "TritonModelException",
    "deserialize_bytes_tensor",
    "get_input_config_by_name",
    "get_input_tensor_by_name",
    "get_output_config_by_name",
    "get_output_tensor_by_name",
    "is_model_ready",
    "load_model",
    "numpy_to_triton_type",
    "serialize_byte_tensor",
    "triton_string_to_numpy",
    "triton_to_numpy_type",
    "unload_model",
    "using_decoupled_model_transaction_policy",
]

Array = np.ndarray[Any, np.dtype[Any]]

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2
TRITONSERVER_MEMORY_CPU = 0
TRITONSERVER_MEMORY_GPU = 2

_NUMBERS = {
    name: number
    for number, name in enumerate(
        ("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64"), 1
    )
} | {"BYTES": 13, "BF16": 14}
"""Wire name -> the number of the data type in the configuration's enum."""
_NAMES = {number: name for name, number in _NUMBERS.items()}
_CPU = 1
"""The device type of host memory in DLPack."""


class TritonModelException(Exception):
    """What the functions of this module raise."""


def _unsupported(what: str) -> Callable[..., NoReturn]:
    def call(*_: object, **__: object) -> NoReturn:
        raise TritonModelException(f"{what} is not supported by this server yet")

    return call


class TritonError:
    """Why a request failed, for InferenceResponse."""

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)
    __slots__ = ("_code", "_message")

    def __init__(self, message: str, code: int = 1) -> None:
        self._message = str(message)
        self._code = code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


class Tensor:
    """A named numpy array. Arrays of inputs are read-only and, when large, lie in the caller's own memory."""

    __slots__ = ("_array", "_name")

    def __init__(self, name: str, numpy_array: Array) -> None:
        if not isinstance(numpy_array, np.ndarray):
            raise TypeError(f"Tensor '{name}' needs a numpy array, not {type(numpy_array).__name__}")
        self._name = name
        self._array = numpy_array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Array:
        return self._array

    def shape(self) -> list[int]:
        return list(self._array.shape)

    def triton_dtype(self) -> int:
        return _NUMBERS[dtypes.from_numpy(self._array.dtype)]

    def is_cpu(self) -> bool:
        return True

    def to_dlpack(self) -> Any:
        return self.__dlpack__()

    def __dlpack__(self, stream: Any = None, **options: Any) -> Any:
        """Older consumers cannot be told that memory is read-only, so they get a copy of what is."""
        array = self._array
        if array.dtype.hasobject:
            raise TritonModelException(f"tensor '{self._name}' holds strings, which DLPack cannot describe")
        if not array.flags.writeable and "max_version" not in options:
            array = array.copy()
        try:
            return array.__dlpack__(stream=stream, **options)
        except (BufferError, TypeError) as error:
            raise TritonModelException(f"tensor '{self._name}' cannot be given as DLPack: {error}") from error

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU, 0

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> Tensor:
        """From anything with `__dlpack__`, or a capsule: contiguous and in host memory."""
        source = tensor if hasattr(tensor, "__dlpack__") else _Capsule(tensor)
        device = source.__dlpack_device__()
        if int(device[0]) != _CPU:
            raise TritonModelException(
                f"tensor '{name}' is on device {tuple(map(int, device))}; only host memory (1, 0)"
            )
        try:
            array = np.from_dlpack(source)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise TritonModelException(f"tensor '{name}' cannot be read as DLPack: {error}") from error
        if not array.flags.c_contiguous:
            raise TritonModelException(f"tensor '{name}' is not contiguous; DLPack tensors must be")
        return Tensor(name, array)


class _Capsule:
    """What numpy wants around a bare DLPack capsule, which can only come from host memory here."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU, 0


class PreferredMemory:
    __slots__ = ("device_id", "kind")

    def __init__(self, preferred_memory: int, preferred_device_id: int = 0) -> None:
        self.kind = preferred_memory
        self.device_id = preferred_device_id


class InferenceRequest:
    """A request that came, or one that a model makes for another model."""

    __slots__ = ("_again", "_flags", "_host", "_inputs", "_model", "_names", "_options", "_sender", "_version", "_work")

    # Set of requests that came, the last two only where they are needed.
    _host: Host
    _work: Work
    _sender: InferenceResponseSender
    _again: bool

    def __init__(
        self,
        model_name: str,
        requested_output_names: Sequence[str],
        inputs: Sequence[Tensor],
        request_id: str = "",
        correlation_id: int | str = 0,
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: Any = None,
        parameters: dict[str, Any] | None = None,
    ) -> None:
        self._model = model_name
        self._version = model_version
        self._names = list(requested_output_names)
        self._inputs = list(inputs)
        self._flags = flags
        self._options = Options(
            id=request_id, sequence=correlation_id, queue_timeout_us=timeout, parameters=dict(parameters or {})
        )

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def model_name(self) -> str:
        return self._model

    def version(self) -> int:
        return self._version

    def request_id(self) -> str:
        return self._options.id

    def correlation_id(self) -> int | str:
        return self._options.sequence

    def flags(self) -> int:
        return self._flags

    def set_flags(self, flags: int) -> None:
        self._flags = flags

    def timeout(self) -> int:
        return self._options.queue_timeout_us

    def parameters(self) -> str:
        return json.dumps(self._options.parameters)

    def trace(self) -> None:
        return None

    def requested_output_names(self) -> list[str]:
        return self._names

    def is_cancelled(self) -> bool:
        """Whether its caller no longer waits: it cancelled the request, its timeout has passed, or it has gone."""
        host = _host_of(self)
        if host is None:
            return False
        sender = getattr(self, "_sender", None)
        return host.is_cancelled(self._work.request, None if sender is None else sender._stream)

    def set_release_flags(self, flags: int) -> None:
        """RESCHEDULE: the request is not answered now, but run again in a batch to come."""
        if flags not in (TRITONSERVER_REQUEST_RELEASE_ALL, TRITONSERVER_REQUEST_RELEASE_RESCHEDULE):
            raise TritonModelException(f"{flags} is none of the flags TRITONSERVER_REQUEST_RELEASE_...")
        self._again = flags == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE

    def get_response_sender(self) -> InferenceResponseSender:
        """For answers outside of what `execute` returns. Always the same one."""
        host = _host_of(self)
        if host is None:
            raise TritonModelException("a request that a model makes has no response sender")
        found: InferenceResponseSender | None = getattr(self, "_sender", None)
        return host.sender(self) if found is None else found

    exec = _unsupported("InferenceRequest.exec (a model that calls models)")
    async_exec = _unsupported("InferenceRequest.async_exec (a model that calls models)")


_NO_OPTIONS = Options()


def _host_of(request: InferenceRequest) -> Host | None:
    host: Host | None = getattr(request, "_host", None)
    return host


def request_from(
    host: Host,
    work: Work,
    arrays: Sequence[Array | None],
    names: Sequence[str],
    outputs: list[str],
    model: str,
    version: int,
) -> InferenceRequest:
    """A request as the model sees it. Not by way of the constructor, which checks what has been checked."""
    request = InferenceRequest.__new__(InferenceRequest)
    request._host = host
    request._work = work
    options = work.options or _NO_OPTIONS
    request._model = model
    request._version = version
    request._names = list(outputs) if work.outputs is None else [wanted.name for wanted in work.outputs]
    request._options = options
    request._flags = options.sequence_start + 2 * options.sequence_end
    inputs: list[Tensor] = []
    for name, array in zip(names, arrays, strict=True):
        if array is not None:
            tensor = Tensor.__new__(Tensor)
            tensor._name = name
            tensor._array = array
            inputs.append(tensor)
    request._inputs = inputs
    return request


class InferenceResponse:
    """The answer to one request: its outputs, or why there are none."""

    __slots__ = ("_error", "_parameters", "_tensors")

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | str | None = None,
        parameters: dict[str, Any] | None = None,
    ) -> None:
        self._tensors = list(output_tensors)
        for tensor in self._tensors:
            if not isinstance(tensor, Tensor):
                raise TypeError(f"output_tensors must be pb_utils.Tensor objects, not {type(tensor).__name__}")
        if error is not None and not isinstance(error, TritonError):
            error = TritonError(str(error))
        self._error = error
        self._parameters = parameters

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def parameters(self) -> str:
        return json.dumps(self._parameters or {})


class InferenceResponseSender:
    """Sends the responses of one request, from any thread, also after `execute` has returned."""

    __slots__ = ("_host", "_stream")

    def __init__(self, host: Host | None = None, stream: Stream | None = None) -> None:
        if host is None or stream is None:
            raise TritonModelException("a response sender comes from InferenceRequest.get_response_sender()")
        self._host = host
        self._stream = stream

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> Awaitable[None]:
        """Sends a response, with TRITONSERVER_RESPONSE_COMPLETE_FINAL as the last one; with the flag alone it only says
        that there are no more. Waits until the caller wants to have it; a coroutine awaits what is returned instead."""
        if flags not in (0, TRITONSERVER_RESPONSE_COMPLETE_FINAL):
            raise TritonModelException(f"flags={flags} is neither 0 nor TRITONSERVER_RESPONSE_COMPLETE_FINAL")
        if response is None and not flags:
            raise TritonModelException("without TRITONSERVER_RESPONSE_COMPLETE_FINAL there must be a response to send")
        return self._host.send(self._stream, response, flags)

    def is_cancelled(self) -> bool:
        """Whether the caller no longer waits: what is sent is dropped, and the model may stop."""
        return self._host.is_cancelled(self._stream.work.request, self._stream)

    def __del__(self) -> None:
        stream = getattr(self, "_stream", None)
        if stream is not None and not (stream.final or stream.over):
            self._host.forget(stream)


class MetricFamily:
    COUNTER, GAUGE, HISTOGRAM = range(3)

    def __init__(self, *_: object, **__: object) -> None:
        _unsupported("MetricFamily (metrics of a model)")()


class Logger:
    """Lines on the worker's stderr, which the server takes into its log."""

    INFO, WARNING, ERROR, VERBOSE = range(4)
    _WORDS = ("info", "warning", "error", "verbose")

    @staticmethod
    def log(msg: Any, level: int = INFO) -> None:
        say(str(msg), Logger._WORDS[level] if level in range(4) else "info")

    @staticmethod
    def log_info(msg: Any) -> None:
        say(str(msg), "info")

    @staticmethod
    def log_warn(msg: Any) -> None:
        say(str(msg), "warning")

    @staticmethod
    def log_error(msg: Any) -> None:
        say(str(msg), "error")

    @staticmethod
    def log_verbose(msg: Any) -> None:
        say(str(msg), "verbose")


load_model = _unsupported("load_model")
unload_model = _unsupported("unload_model")
is_model_ready = _unsupported("is_model_ready")

# ---------------------------------------------------------------------------------------------- helpers


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    for tensor in inference_request._inputs:
        if tensor._name == name:
            return tensor
    return None


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    for tensor in inference_response._tensors:
        if tensor._name == name:
            return tensor
    return None


def get_input_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    return _by_name(model_config.get("input", ()), name)


def get_output_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    return _by_name(model_config.get("output", ()), name)


def _by_name(entries: Sequence[dict[str, Any]], name: str) -> dict[str, Any] | None:
    return next((entry for entry in entries if entry["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: dict[str, Any]) -> bool:
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """The numpy type for TYPE_FP32 and the like."""
    name = dtypes.FROM_CONFIG.get(triton_type_string)
    if name is None:
        raise TritonModelException(f"'{triton_type_string}' is no data type of a configuration")
    return dtypes.to_numpy(name).type


def triton_to_numpy_type(data_type: int) -> Any:
    """The numpy type for the number of a data type, as `Tensor.triton_dtype` gives it."""
    name = _NAMES.get(data_type)
    if name is None:
        raise TritonModelException(f"{data_type} is not the number of a data type")
    return dtypes.to_numpy(name).type


def numpy_to_triton_type(data_type: Any) -> int:
    try:
        return _NUMBERS[dtypes.from_numpy(np.dtype(data_type))]
    except TypeError as error:
        raise TritonModelException(str(error)) from None


def serialize_byte_tensor(input_tensor: Array) -> bytes | None:
    """A tensor of strings as bytes: for each element its length, 4 bytes little-endian, and its bytes."""
    if input_tensor.size == 0:
        return None
    try:
        return encode_bytes(input_tensor)
    except ServeError as error:
        raise TritonModelException(str(error)) from None


def deserialize_bytes_tensor(encoded_tensor: bytes) -> Array:
    """The inverse of serialize_byte_tensor, as one dimension."""
    data = bytes(encoded_tensor)
    count = at = 0
    while at < len(data):
        at += 4 + int.from_bytes(data[at : at + 4], "little")
        count += 1
    try:
        return decode_bytes(data, (count,))
    except ServeError as error:
        raise TritonModelException(str(error)) from None
