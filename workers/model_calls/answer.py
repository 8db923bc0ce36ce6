"""The arguments and results of a backend that runs requests one by one, and the errors of failed models."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from shmserve.errors import ModelFailed, ServeError
from shmserve.protocol.messages import Failure
from shmserve.workers.process.log import public, text_of

if TYPE_CHECKING:
    import numpy as np

    from shmserve.protocol.messages import Value
    from shmserve.protocol.worker_messages import Work

    Array = np.ndarray[Any, np.dtype[Any]]

Trace = Callable[[str, BaseException], None]
"""Reports the traceback of a failed model, with a description. In the server it is written to the log."""


class Request(Struct, gc=False):
    """One request: its arrays in the order of the configuration, None for an absent optional input."""

    work: Work
    arrays: list[Array | None]


class Response(Struct, gc=False):
    """The result of one request: outputs by name, or an error. `again`: the request must run again; only outputs that
    are states of its sequence are used."""

    outputs: list[tuple[str, Any]] = []
    error: Failure | None = None
    parameters: dict[str, Value] | None = None
    again: bool = False


def failure_of(error: Exception, instance: str, model_dir: str, trace: Trace) -> Failure:
    """Converts an error to the error for clients. Also reports the traceback, unless the request itself is the
    cause."""
    if isinstance(error, ServeError) and not isinstance(error, ModelFailed):
        return Failure(error.code, public(text_of(error), model_dir))
    trace(f"model instance '{instance}' failed", error)
    what = text_of(error)
    if not isinstance(error, ModelFailed):
        what = f"{type(error).__name__}: {what}"
    return Failure(ModelFailed.code, public(failure_text(instance, what), model_dir))


def failure_text(instance: str, what: str) -> str:
    return f"Failed to process the request(s) for model instance '{instance}', message: {what}"
