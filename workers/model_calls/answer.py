"""The arguments and results of a backend that runs requests one by one, and the errors of failed models."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from shmserve.errors import InvalidRequest, ModelFailed, ServeError
from shmserve.protocol.messages import Failure
from shmserve.workers.process.log import public, text_of

if TYPE_CHECKING:
    import numpy as np

    from shmserve.protocol.messages import Value
    from shmserve.protocol.worker_messages import Row, Work

    Array = np.ndarray[Any, np.dtype[Any]]

Trace = Callable[[str, BaseException], None]
"""Reports the traceback of a failed model, with a description. In the server it is written to the log."""


TRITON_CODES = (
    "UNKNOWN",
    "MODEL_FAILED",
    "NOT_FOUND",
    "INVALID_ARG",
    "UNAVAILABLE",
    "UNSUPPORTED",
    "ALREADY_EXISTS",
    "CANCELLED",
)
"""Wire codes by the number of Triton's code. INTERNAL maps to MODEL_FAILED: the model failed, not the server."""
_NEAREST = {
    "INTERNAL": "MODEL_FAILED",
    "PROTOCOL": "INVALID_ARG",
    "QUEUE_TIMEOUT": "UNAVAILABLE",
    "CONNECTION_LOST": "UNAVAILABLE",
    "DEADLINE_EXCEEDED": "UNAVAILABLE",
    "DENIED": "UNAVAILABLE",
    "HANDLE_LOST": "UNAVAILABLE",
}
"""Wire codes that Triton does not have -> those that it has."""


NOT_ITERATIVE = Failure(
    InvalidRequest.code,
    "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not configured to handle "
    "such a flag.",
)


def triton_code(number: int) -> str:
    return TRITON_CODES[number] if number in range(len(TRITON_CODES)) else "UNKNOWN"


def triton_number(code: str) -> int:
    code = _NEAREST.get(code, code)
    return TRITON_CODES.index(code) if code in TRITON_CODES else 0


class ResponseOutputs(Protocol):
    """The outputs of one response. Must be finished by either `rows` or `abandon`."""

    def place_alone(self, index: int, shape: tuple[int, ...]) -> Array | None:
        """Returns the memory that the request gets for this output. None: the output has to be put."""

    def near_alone(self, index: int, shape: tuple[int, ...]) -> int | None:
        """Returns the address on this process's GPU at which to write this output, instead of `place_alone`. None: its
        reader wants it on the host, or it has to be put."""

    def put_named(self, name: str, array: Any) -> None:
        """Takes an output that was computed elsewhere."""

    def rows(self, parameters: dict[str, Value] | None = None) -> list[Row]:
        """Returns the row of the request."""

    def abandon(self) -> None:
        """Frees the memory of the outputs; they will not be used."""


class Request(Struct, gc=False):
    """One request: its arrays in the order of the configuration, None for an absent optional input. `outputs_of`
    opens the outputs of a response, for backends that compute them where they will be read."""

    work: Work
    arrays: list[Array | None]
    outputs_of: Callable[[Work], ResponseOutputs]


class Response(Struct, gc=False):
    """The result of one request: outputs by name, or an error. `again`: the request must run again; only outputs that
    are states of its sequence are used. `placed` has outputs that are already where they will be read; the row of the
    response takes it."""

    outputs: list[tuple[str, Any]] = []
    error: Failure | None = None
    parameters: dict[str, Value] | None = None
    again: bool = False
    placed: ResponseOutputs | None = None


def failure_of(error: Exception, instance: str, model_dir: str, trace: Trace) -> Failure:
    """Converts an error, and its notes, to the error for clients. Also reports the traceback, unless the request itself
    is the cause."""
    if isinstance(error, ServeError) and not isinstance(error, ModelFailed):
        return Failure(error.code, public(text_of(error), model_dir))
    trace(f"model instance '{instance}' failed", error)
    what = text_of(error)
    if not isinstance(error, ModelFailed):
        what = f"{type(error).__name__}: {what}"
    notes = getattr(error, "__notes__", ())
    if notes:
        what += f" ({'; '.join(map(str, notes))})"
    return Failure(ModelFailed.code, public(failure_text(instance, what), model_dir))


def failure_text(instance: str, what: str) -> str:
    return f"Failed to process the request(s) for model instance '{instance}', message: {what}"
