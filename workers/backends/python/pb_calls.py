"""Calls between models: requests that a model creates become calls, and replies become responses. Also the functions of
pb_utils that query the server.

Invariant: an error of the called model or of the server is a response with an error; exceptions are raised only for
calls that cannot be made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from msgspec.structs import replace

from shmserve.errors import ServeError
from shmserve.protocol.messages import Options
from shmserve.workers.backends.python import pb_requests
from shmserve.workers.backends.python.pb_requests import InferenceRequest, InferenceResponse, TritonError
from shmserve.workers.backends.python.pb_tensor import Tensor, TritonModelException
from shmserve.workers.model_calls import queries
from shmserve.workers.model_calls.answer import triton_number
from shmserve.workers.model_calls.calls import WINDOW
from shmserve.workers.model_calls.pending import CallInput

if TYPE_CHECKING:
    from shmserve.protocol.worker_messages import Work
    from shmserve.workers.model_calls.calls import OutgoingCalls
    from shmserve.workers.model_calls.pending import CallResponse, Pending

_PLAIN = Options()
REPLAYED_BYTES = 1024 * 1024
"""Maximum total bytes of a call's responses that are kept for a second iteration."""


class Responses:
    """The responses to a call of a decoupled model, for `for` and `async for`. Deleting it, or `cancel`, ends the call.
    Once complete, it can be iterated over again, as in Triton."""

    def __init__(self, calls: OutgoingCalls, pending: Pending, here: Callable[[], bool]) -> None:
        self._calls = calls
        self._pending = pending
        self._here = here
        self._taken: list[InferenceResponse] | None = []
        """All responses so far; None if they are too large to keep."""
        self._size = 0
        self._at = -1
        """The index of the next response in `_taken`. Negative until the call is complete."""

    def __iter__(self) -> Responses:
        if self._at >= 0 and self._taken is None:
            raise TritonModelException(
                f"the {self._size} bytes of these responses are more than the {REPLAYED_BYTES} that are kept for a "
                "second loop; keep the responses in a list"
            )
        if self._taken is not None and self._at >= len(self._taken):
            self._at = 0
        return self

    def __next__(self) -> InferenceResponse:
        response = self._again() if self._at >= 0 else self._took(_next(self._calls, self._pending))
        if response is None:
            raise StopIteration
        return response

    def __aiter__(self) -> Responses:
        return iter(self)

    async def __anext__(self) -> InferenceResponse:
        if self._at >= 0:
            response = self._again()
        else:
            await _ready_soon(self._calls, self._pending, self._here())
            response = self._took(self._calls.take(self._pending))
        if response is None:
            raise StopAsyncIteration
        return response

    def _took(self, response: CallResponse | None) -> InferenceResponse | None:
        if response is None:
            self._at = len(self._taken or ())
            return None
        taken = response_from(response)
        self._size += sum(tensor._array.nbytes for tensor in taken._tensors)
        if self._size > REPLAYED_BYTES:
            self._taken = None
        if self._taken is not None:
            self._taken.append(taken)
        return taken

    def _again(self) -> InferenceResponse | None:
        if self._taken is None or self._at >= len(self._taken):
            return None
        self._at += 1
        return self._taken[self._at - 1]

    def cancel(self) -> None:
        """Ends the call. If it was not complete, the next and last response is an error with the code CANCELLED."""
        self._calls.cancel(self._pending)

    def __del__(self) -> None:
        self._calls.forget(self._pending)


def begin(
    calls: OutgoingCalls, request: InferenceRequest, decoupled: bool, held: bool, running: Sequence[Work]
) -> Pending:
    """Sends the call for a request that the model created."""
    flags = request._flags
    options: Options | None = replace(
        request._options,
        sequence_start=bool(flags & 1),
        sequence_end=bool(flags & 2),
        window=WINDOW if decoupled else 0,
    )
    inputs = [CallInput(tensor._name, tensor._array, getattr(tensor, "_work", None)) for tensor in request._inputs]
    if options == _PLAIN:
        options = None
    version = max(request._version, 0)
    try:
        return calls.call(request._model, version, inputs, request._names, options, held, running)
    except ServeError as error:
        raise TritonModelException(f"model '{request._model}' cannot be called: {error}") from None


def finish(calls: OutgoingCalls, pending: Pending) -> InferenceResponse:
    return response_from(_next(calls, pending))


async def begun_soon(calls: OutgoingCalls, pending: Pending, here: Callable[[], bool]) -> Responses:
    """Waits for the first response, as Triton does: a coroutine often iterates with a plain `for`, which would block
    the event loop while it waits."""
    responses = Responses(calls, pending, here)
    await _ready_soon(calls, pending, here())
    return responses


async def finish_soon(calls: OutgoingCalls, pending: Pending, coroutines: bool) -> InferenceResponse:
    await _ready_soon(calls, pending, coroutines)
    return response_from(calls.take(pending))


def _next(calls: OutgoingCalls, pending: Pending) -> CallResponse | None:
    try:
        return calls.next(pending)
    except ServeError as error:
        raise TritonModelException(str(error)) from None


async def _ready_soon(calls: OutgoingCalls, pending: Pending, coroutines: bool) -> None:
    try:
        await calls.wait_soon(pending, lambda: pending.ready, coroutines)
    except ServeError as error:
        raise TritonModelException(str(error)) from None


def response_from(response: CallResponse | None) -> InferenceResponse:
    if response is None:
        return InferenceResponse(error=TritonError("the call was cancelled", TritonError.CANCELLED))
    if response.code:
        return InferenceResponse(error=TritonError(response.text, triton_number(response.code)))
    return InferenceResponse([Tensor(name, array) for name, array in response.outputs], None, response.parameters)


# ---------------------------------------------------------------------------------------------- the server


def load_model(model_name: str, config: str = "", files: dict[str, bytes] | None = None) -> None:
    """Loads a model and waits until it is ready. `config` is JSON. `files` maps names such as "file:1/model.onnx" to
    the contents of a version's files, and requires `config`."""
    with _raising():
        queries.load(pb_requests.current().server(), model_name, config, files)


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Unloads a model without waiting for completion, because a model may unload an ensemble that contains it."""
    with _raising():
        queries.unload(pb_requests.current().server(), model_name, unload_dependents)


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    version = int(model_version) if model_version.isdecimal() else 0
    if model_version and not version:
        raise TritonModelException(f"'{model_version}' is not a model version")
    with _raising():
        return queries.is_ready(pb_requests.current().server(), model_name, version)


@contextmanager
def _raising() -> Iterator[None]:
    """Raises errors of the server as those of pb_utils."""
    try:
        yield
    except ServeError as error:
        raise TritonModelException(str(error)) from None
