"""Calls of a process that a model has forked, for example one of a multiprocessing.Pool.

The worker's link belongs to the worker, so such a process is an ordinary client of the server: it has no share in the
request that the model runs, and the server cannot detect that a circular call waits for itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shmserve.errors import ServeError
from shmserve.workers.backends.python.pb_requests import InferenceRequest, InferenceResponse, TritonError
from shmserve.workers.backends.python.pb_tensor import Tensor, TritonModelException
from shmserve.workers.model_calls.answer import triton_number

if TYPE_CHECKING:
    from shmserve import Client
    from shmserve.shm.counters import Subject
    from shmserve.workers.backends.python.pb_requests import RequestHost
    from shmserve.workers.model_calls.calls import OutgoingCalls


class ForkedHost:
    """Replaces the host of the worker. `host` refuses what only the worker can do. `address`: the server's lane."""

    def __init__(self, host: RequestHost, address: str) -> None:
        self._host = host
        self._address = address
        self._client: Client | None = None

    def server(self) -> OutgoingCalls:
        return self._host.server()

    def count(self, subject: Subject) -> memoryview[float]:
        return self._host.count(subject)

    def model_dir(self) -> str:
        return self._host.model_dir()

    def forked(self) -> None:
        """The client connects again in each process."""

    def call(self, request: InferenceRequest, decoupled: bool) -> Any:
        return self._responses(request) if decoupled else self._response(request)

    async def call_soon(self, request: InferenceRequest, decoupled: bool) -> Any:
        if decoupled:
            raise TritonModelException("in a process that the model has forked, call decoupled models with exec")
        return await asyncio.to_thread(self._response, request)

    def _response(self, request: InferenceRequest) -> InferenceResponse:
        try:
            return _answered(self._connected().infer(**_arguments(request)))
        except ServeError as error:
            return _failed(error)

    def _responses(self, request: InferenceRequest) -> Iterator[InferenceResponse]:
        try:
            for result in self._connected().stream(**_arguments(request)):
                yield _answered(result)
        except ServeError as error:
            yield _failed(error)

    def _connected(self) -> Client:
        from shmserve import Client  # imported here, because few models fork

        if self._client is None:
            self._client = Client(self._address)
        return self._client


def _arguments(request: InferenceRequest) -> dict[str, Any]:
    options = request._options
    queue = {"timeout": options.queue_timeout_us} if options.queue_timeout_us else {}
    return {
        "model": request._model,
        "inputs": {tensor.name(): tensor.as_numpy() for tensor in request._inputs},
        "outputs": request._names or None,
        "version": request._version if request._version > 0 else None,
        "priority": options.priority or None,
        "sequence": options.sequence or None,
        "sequence_start": bool(request._flags & 1),
        "sequence_end": bool(request._flags & 2),
        "parameters": {**options.parameters, **queue} or None,
        "request_id": options.id or None,
    }


def _answered(result: Any) -> InferenceResponse:
    return InferenceResponse([Tensor(name, array) for name, array in result.items()])


def _failed(error: ServeError) -> InferenceResponse:
    return InferenceResponse(error=TritonError(str(error), triton_number(error.code)))
