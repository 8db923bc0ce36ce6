"""Requests and responses of Python models: those received, and those that a model creates.

Invariant: a received request refers to the original message; derived objects are created only when the model asks for
them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Sequence
from operator import index
from typing import TYPE_CHECKING, Any, Protocol

from shmserve.errors import InvalidRequest
from shmserve.protocol.messages import PARAMETERS, Options
from shmserve.protocol.worker_messages import Work
from shmserve.workers.backends.python.pb_tensor import (
    Array,
    DeviceTensor,
    PreferredMemory,
    Tensor,
    TritonModelException,
    text_of,
)

if TYPE_CHECKING:
    from shmserve.shm.counters import Subject
    from shmserve.workers.model_calls.calls import OutgoingCalls
    from shmserve.workers.model_calls.responses import OpenResponses
    from shmserve.workers.model_calls.stream import ResponseSender

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2
TRACE_PARENT, TRACE_STATE = "traceparent", "tracestate"
"""The request parameters with the W3C trace context."""
PARAMETER_BYTES = 16 * 1024
"""Maximum number of characters in the parameters of a response."""


class TritonError:
    """The error of a failed request: a message and a code, for InferenceResponse."""

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)
    __slots__ = ("_code", "_message")

    def __init__(self, message: str, code: int = 1) -> None:
        self._message = str(message)
        self._code = code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


class InferenceTrace:
    """The trace that a request belongs to, from the request's parameters."""

    __slots__ = ("_parameters",)

    def __init__(self, parameters: dict[str, Any] | None = None) -> None:
        self._parameters = parameters or {}

    def get_context(self) -> str | None:
        """Returns the W3C trace context as JSON, or None."""
        context = {name: self._parameters[name] for name in (TRACE_PARENT, TRACE_STATE) if name in self._parameters}
        return json.dumps(context) if context else None


class InferenceRequest:
    """A request that the model received, or one that it creates to call another model."""

    __slots__ = ("_again", "_flags", "_host", "_inputs", "_model", "_names", "_options", "_sender", "_version", "_work")

    # Set only for received requests; the last one only when needed.
    _host: ModelHost
    _work: Work
    _again: bool
    _sender: InferenceResponseSender

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
        trace: InferenceTrace | None = None,
        parameters: dict[str, Any] | None = None,
        priority: int = 0,
    ) -> None:
        if preferred_memory is not None and not isinstance(preferred_memory, PreferredMemory):
            raise TypeError(f"preferred_memory must be PreferredMemory, not {type(preferred_memory).__name__}")
        self._model: str = text_of(model_name, "model_name")
        self._version: int = _integer(model_version, "model_version")
        if isinstance(requested_output_names, (str, bytes)):
            raise TypeError("requested_output_names must be a list of names, not one name")
        self._names = [text_of(name, "requested_output_names") for name in requested_output_names]
        identity = text_of(request_id, "request_id")
        self._inputs = _tensors(
            inputs, "inputs", f"Input tensor for request with id '{identity}' and model name '{self._model}'"
        )
        self._flags = _integer(flags, "flags")
        traced = {} if trace is None else json.loads(trace.get_context() or "{}")
        named = isinstance(correlation_id, (str, bytes))
        self._options = Options(
            id=identity,
            sequence=text_of(correlation_id) if named else _integer(correlation_id, "correlation_id"),
            queue_timeout_us=_integer(timeout, "timeout"),
            parameters=traced | dict(parameters or {}),
            priority=priority,
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

    def priority(self) -> int:
        return self._options.priority

    def trace(self) -> InferenceTrace:
        return InferenceTrace(self._options.parameters)

    def requested_output_names(self) -> list[str]:
        return self._names

    def is_cancelled(self) -> bool:
        """Whether the caller no longer waits: it cancelled the request or disconnected, or the timeout has passed."""
        host = _host_of(self)
        if host is None:
            return False
        sender = getattr(self, "_sender", None)
        return host.streams.is_cancelled(self._work.request, None if sender is None else sender._stream)

    def set_release_flags(self, flags: int) -> None:
        """With RESCHEDULE, the request is not answered now but runs again in a later batch."""
        if flags not in (TRITONSERVER_REQUEST_RELEASE_ALL, TRITONSERVER_REQUEST_RELEASE_RESCHEDULE):
            raise TritonModelException(f"{flags} is not one of the flags TRITONSERVER_REQUEST_RELEASE_...")
        self._again = flags == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE

    def get_response_sender(self) -> InferenceResponseSender:
        """Returns the sender for responses outside the return value of `execute`. Each call returns the same object."""
        host = _host_of(self)
        if host is None:
            raise TritonModelException("a request created by a model has no response sender")
        sender: InferenceResponseSender | None = getattr(self, "_sender", None)
        return host.sender(self) if sender is None else sender

    def exec(self, decoupled: bool = False) -> Any:
        """Calls the other model and waits for its response. With `decoupled`, returns an iterator of
        responses at once."""
        return _request_host(self).call(self, decoupled)

    async def async_exec(self, decoupled: bool = False) -> Any:
        """`exec` for coroutines, several of which can wait at once."""
        return await _request_host(self).call_soon(self, decoupled)


def _integer(value: Any, what: str) -> int:
    try:
        return index(value)
    except TypeError:
        raise TypeError(f"{what} must be an integer, not {type(value).__name__}") from None


def _tensors(values: Sequence[Tensor], what: str, which: str) -> list[Tensor]:
    """Returns a copy of the list. As in Triton, None raises TritonModelException and other types raise TypeError."""
    tensors = list(values)
    for tensor in tensors:
        if tensor is None:
            raise TritonModelException(f"{which} should not be empty.")
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{what} must be pb_utils.Tensor objects, not {type(tensor).__name__}")
    return tensors


def _request_host(request: InferenceRequest) -> RequestHost:
    if _host_of(request) is not None:
        raise TritonModelException("this request was sent to the model; create a new one to call another model")
    return current()


_NO_OPTIONS = Options()


def _host_of(request: InferenceRequest) -> ModelHost | None:
    host: ModelHost | None = getattr(request, "_host", None)
    return host


def request_from(
    host: ModelHost,
    work: Work,
    arrays: Sequence[Array | None],
    names: Sequence[str],
    outputs: list[str],
    model: str,
    version: int,
) -> InferenceRequest:
    """Creates a received request without the constructor, whose checks were already done."""
    request = InferenceRequest.__new__(InferenceRequest)
    request._host = host
    request._work = work
    request._again = False
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
            tensor._work = work
            inputs.append(tensor)
    request._inputs = inputs
    return request


def mark_device_inputs(requests: Sequence[InferenceRequest]) -> None:
    """Replaces inputs that are pieces of device memory with DeviceTensor objects."""
    for request in requests:
        for place, tensor in enumerate(request._inputs):
            piece: Any = tensor._array
            if not hasattr(piece, "host"):
                continue
            wire = next(sent.dtype for sent in request._work.inputs if sent.name == tensor._name)
            if wire == "BF16":  # no library accepts it by address
                tensor._array = piece.host()
            else:
                on_device = request._inputs[place] = DeviceTensor(tensor._name, piece, wire)
                on_device._work = tensor._work


class InvalidParameters(TritonModelException, InvalidRequest):
    """The parameters of a response cannot be sent."""


def check_parameters(parameters: Any) -> None:
    """Raises InvalidParameters unless the parameters of a response are names with plain values."""
    if not isinstance(parameters, dict):
        raise InvalidParameters(f"Expect dict, got {type(parameters)}")
    if len(parameters) > PARAMETERS:
        raise InvalidParameters(f"a response can have up to {PARAMETERS} parameters, this one has {len(parameters)}")
    size = 0
    for key, value in parameters.items():
        if not isinstance(key, str):
            raise InvalidParameters(f"Expect parameters keys to have type str, found type {type(key)}")
        if not isinstance(value, (str, int, float)):
            raise InvalidParameters(f"Expect parameters values to have type bool/int/str, found type {type(value)}")
        if isinstance(value, int) and not -(2**63) <= value < 2**64:
            raise InvalidParameters(f"response parameter '{key}' does not fit into 64 bits")
        size += len(key) + (len(value) if isinstance(value, str) else 8)
    if size > PARAMETER_BYTES:
        raise InvalidParameters(f"the parameters of a response have {size} characters, more than {PARAMETER_BYTES}")


class InferenceResponse:
    """The response to one request: output tensors or an error, and parameters."""

    __slots__ = ("_error", "_parameters", "_tensors")

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | str | None = None,
        parameters: dict[str, Any] | None = None,
    ) -> None:
        self._tensors = _tensors(output_tensors, "output_tensors", "Output tensor for inference response")
        if error is not None and not isinstance(error, TritonError):
            error = TritonError(str(error))
        self._error = error
        if parameters is not None:
            check_parameters(parameters)
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

    def __init__(self, host: ModelHost | None = None, stream: ResponseSender | None = None) -> None:
        if host is None or stream is None:
            raise TritonModelException("a response sender comes from InferenceRequest.get_response_sender()")
        self._host = host
        self._stream = stream

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> Awaitable[None]:
        """Sends a response. TRITONSERVER_RESPONSE_COMPLETE_FINAL marks the last one; the flag without a response only
        ends the responses. Blocks until the caller has room for the response; in a coroutine, await the returned
        object instead."""
        if flags not in (0, TRITONSERVER_RESPONSE_COMPLETE_FINAL):
            raise TritonModelException(
                f"Unable to send response. Unsupported flag value. It is {flags}, and neither 0 nor "
                "TRITONSERVER_RESPONSE_COMPLETE_FINAL"
            )
        if response is None and not flags:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        return self._host.send(self._stream, response, flags)

    def is_cancelled(self) -> bool:
        """Whether the caller no longer waits: further responses are dropped, and the model may stop."""
        return self._host.streams.is_cancelled(self._stream.work.request, self._stream)

    def __del__(self) -> None:
        stream = getattr(self, "_stream", None)
        if stream is not None and not (stream.final or stream.over):
            self._host.streams.forget(stream)


class RequestHost(Protocol):
    """The interface to the server for requests that the model of this process creates."""

    def call(self, request: InferenceRequest, decoupled: bool) -> Any:
        """Calls another model and waits for its response."""

    def call_soon(self, request: InferenceRequest, decoupled: bool) -> Awaitable[Any]:
        """`call` for coroutines."""

    def server(self) -> OutgoingCalls:
        """Returns the calls to the server. Raises if there is no server."""

    def count(self, subject: Subject) -> memoryview[float]:
        """Returns the memory of a new metric."""

    def model_dir(self) -> str:
        """Returns the directory of the version."""

    def forked(self) -> None:
        """Called in a process that the model forked."""


class ModelHost(Protocol):
    """The backend that delivered a request."""

    streams: OpenResponses

    def sender(self, request: InferenceRequest) -> InferenceResponseSender:
        """Creates the sender of a request."""

    def send(self, stream: ResponseSender, response: InferenceResponse | None, flags: int) -> Awaitable[None]:
        """Sends a response, the last response, or the end of the responses."""


class _Current:
    host: RequestHost | None = None


def bind(host: RequestHost) -> None:
    """Registers the backend that runs the model of this process."""
    _Current.host = host


def current() -> RequestHost:
    if _Current.host is None:
        raise TritonModelException("no model is loaded in this process, so the server cannot be called")
    return _Current.host


def _forked() -> None:
    if _Current.host is not None:
        _Current.host.forked()


os.register_at_fork(after_in_child=_forked)
