"""What requests and senders of `pb_utils` ask of whoever runs the model. The rule: it may be asked in any thread.

A process runs one model, so what a model makes itself (requests, metrics) asks the `current` one.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Protocol

from shmserve.workers.backends.python.pb_tensor import TritonModelException

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from shmserve.shm.counters import Subject
    from shmserve.workers.backends.python.pb_requests import (
        InferenceRequest,
        InferenceResponse,
        InferenceResponseSender,
    )
    from shmserve.workers.model_calls.calls import Calls
    from shmserve.workers.model_calls.stream import Stream


class Asked(Protocol):
    """Whom the model of this process asks, whatever it is given."""

    def call(self, request: InferenceRequest, decoupled: bool) -> Any:
        """Asks another model, and waits for the answer."""

    def call_soon(self, request: InferenceRequest, decoupled: bool) -> Awaitable[Any]:
        """The same for coroutines."""

    def server(self) -> Calls:
        """By which the server is asked. Raises where there is none."""

    def count(self, subject: Subject) -> memoryview[float]:
        """Numbers for what the model counts."""

    def model_dir(self) -> str:
        """The directory of the version."""

    def forked(self) -> None:
        """This is a process that the model has forked."""


class Host(Protocol):
    """Who has given it requests."""

    def sender(self, request: InferenceRequest) -> InferenceResponseSender:
        """The sender of a request that has none yet."""

    def send(self, stream: Stream, response: InferenceResponse | None, flags: int) -> Awaitable[None]:
        """Sends a response, the last one, or says that there are no more."""

    def is_cancelled(self, request: int, stream: Stream | None) -> bool:
        """Whether nobody waits for the request any more."""

    def forget(self, stream: Stream) -> None:
        """Nobody has its sender any more. Called within the collector."""


class _Current:
    host: Asked | None = None


def bind(host: Asked) -> None:
    """It runs the model of this process."""
    _Current.host = host


def current() -> Asked:
    if _Current.host is None:
        raise TritonModelException("no model is loaded in this process that could ask a server")
    return _Current.host


def _forked() -> None:
    if _Current.host is not None:
        _Current.host.forked()


os.register_at_fork(after_in_child=_forked)
