"""The common base of both kinds of Python backends: the model file, the model object, and its calls to the server.

Invariant: while `initialize` and `execute` run, the main thread does not hold the turn (the lock that guards all worker
state, see `responses.OpenResponses`), so that the model can make calls and wait for replies.
"""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from shmserve.errors import InvalidRequest, ServeError
from shmserve.repo.backends import LANE_ADDRESS
from shmserve.repo.parameters import STRICT_OUTPUTS
from shmserve.workers.backends.base import BackendModel, Context
from shmserve.workers.backends.python import pb_calls, pb_metrics, pb_requests, pb_utils
from shmserve.workers.backends.python.forked_calls import ForkedHost
from shmserve.workers.batch.output_checks import as_integers
from shmserve.workers.batch.specs import model_outputs_of
from shmserve.workers.model_calls.coroutines import Coroutines
from shmserve.workers.model_calls.probes import ReadinessCalls
from shmserve.workers.model_calls.responses import OpenResponses
from shmserve.workers.process.log import log_message, log_traceback

if TYPE_CHECKING:
    from shmserve.protocol.worker_messages import Work
    from shmserve.repo.config.schema import ModelConfig
    from shmserve.shm.counters import Subject
    from shmserve.workers.backends.python.pb_tensor import Array
    from shmserve.workers.model_calls.calls import OutgoingCalls
    from shmserve.workers.model_calls.pending import Pending


class PythonHost:
    """The interface of a model file to its process while it is imported and completes the configuration."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.calls = context.calls

    def server(self) -> OutgoingCalls:
        """Returns the interface for calls. Raises TritonModelException."""
        raise pb_utils.TritonModelException(
            "the model cannot ask the server: there is none, or the model is still being loaded or already finalized"
        )

    def count(self, subject: Subject) -> memoryview[float]:
        """Returns the memory of a new metric, which the server reads."""
        if self.calls is None:
            return memoryview(bytearray(8 * subject.count)).cast("d")  # without a server the metrics are not read
        try:
            return self.server().count(subject)
        except ServeError as error:
            raise pb_utils.TritonModelException(str(error)) from None

    def model_dir(self) -> str:
        return str(self.context.version_folder)

    def forked(self) -> None:
        if address := self.context.settings.get(LANE_ADDRESS, ""):
            pb_requests.bind(ForkedHost(self, address))

    def call(self, _request: pb_utils.InferenceRequest, _decoupled: bool) -> Any:
        self.server()

    async def call_soon(self, _request: pb_utils.InferenceRequest, _decoupled: bool) -> Any:
        self.server()


class PythonModel(PythonHost, BackendModel, ABC):
    streams: OpenResponses
    """Kept after `close` for threads of the model that outlive it."""
    _running: Sequence[object] = ()
    """The batch that the model is executing."""

    def __init__(self, context: Context, config: ModelConfig, kind: Any, arguments: dict[str, str]) -> None:
        """`kind`: the class of the model; `arguments`: those of its `initialize`."""
        super().__init__(context)
        self.streams = OpenResponses(config.decoupled)
        self.strict = STRICT_OUTPUTS.read(config)
        self.probes = callable(getattr(kind, "is_ready", None))
        self._integers = {
            spec.name: spec.numpy
            for spec in model_outputs_of(config)
            if self.strict and spec.item and spec.numpy.kind in "iu" and spec.dtype != "BF16"
        }
        self._instance = context.instance
        self._coroutines: Coroutines | None = None
        self._probes = ReadinessCalls(self._is_ready)
        self._closed = False
        self._model: Any = None
        pb_requests.bind(self)
        if self.calls is not None:
            self.calls.connect(self.streams)
        try:
            self._model = self._initialized(kind, arguments)
        except BaseException:
            self.close()
            raise

    def _initialized(self, kind: Any, arguments: dict[str, str]) -> Any:
        model = kind()
        if callable(getattr(model, "initialize", None)):
            self.streams.turn.release()
            try:
                model.initialize(arguments)
            finally:
                self.streams.turn.acquire()
        return model

    def close(self) -> None:
        model, self._model = self._model, None
        self._closed = True
        pb_metrics.keep()  # before the objects of the model are deleted
        self.streams.stop(False)
        try:
            if self._coroutines is not None:
                self._coroutines.close()
            if callable(getattr(model, "finalize", None)):
                model.finalize()
        finally:
            self.streams.close()

    # ------------------------------------------------------------------------------------ readiness

    def probe(self, report: Callable[[bool], None]) -> None:
        self._probes.add(report)

    def _is_ready(self) -> bool:
        try:
            ready = self._model.is_ready()
            if inspect.iscoroutine(ready):
                ready = asyncio.run(ready)
        except Exception as error:
            log_traceback(f"is_ready of model instance '{self._instance}' failed", error)
            return False
        if not isinstance(ready, bool):
            log_message(
                f"is_ready of model instance '{self._instance}' returned {type(ready).__name__}, not True or False"
            )
        return ready is True

    # ------------------------------------------------------------------------------------ running

    def _execute(self, requests: Any) -> Any:
        """Returns the result of the model's `execute`, which may be a coroutine."""
        self.streams.turn.release()
        try:
            result = self._model.execute(requests)
            if type(result) is not list and inspect.iscoroutine(result):
                return self._run(result)
            return result
        finally:
            self.streams.turn.acquire()

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Runs a coroutine of the model and returns its result. If other models can be called, this thread reads their
        replies while it waits."""
        future = self._loop().submit(coroutine)
        streams = self.streams
        if streams.listening:
            future.add_done_callback(lambda _: streams.wake())
            streams.wait_for(future.done, even_if_lost=True)
        return future.result()

    def _loop(self) -> Coroutines:
        if self._coroutines is None:
            self._coroutines = Coroutines()
        return self._coroutines

    def _as_declared(self, name: str, array: Array) -> Array:
        """With strict outputs, converts an integer output to its configured type if all values fit, because numpy's
        default is 64 bits."""
        declared = self._integers.get(name)
        if declared is None or array.dtype == declared or array.dtype.kind not in "iu":
            return array
        return as_integers(array, declared)

    @abstractmethod
    def _work_items(self) -> Sequence[Work]:
        """The requests that the model is executing. Empty during warm-up, whose requests the server does not know."""

    def _is_held(self) -> bool:
        """Whether a call made by this thread keeps the instance from running its next batch until it is answered."""
        return bool(self._running)

    # ------------------------------------------------------------------------------------ calls to the server

    def server(self) -> OutgoingCalls:
        return super().server() if self.calls is None or self._closed else self.calls

    def forked(self) -> None:
        self.streams.forked()
        super().forked()

    def call(self, request: pb_utils.InferenceRequest, decoupled: bool) -> Any:
        calls, pending = self._begin_call(request, decoupled)
        if decoupled:
            return pb_calls.Responses(calls, pending, self._here)
        return pb_calls.finish(calls, pending)

    async def call_soon(self, request: pb_utils.InferenceRequest, decoupled: bool) -> Any:
        calls, pending = self._begin_call(request, decoupled)
        if decoupled:
            return await pb_calls.begun_soon(calls, pending, self._here)
        return await pb_calls.finish_soon(calls, pending, self._here())

    def _begin_call(self, request: pb_utils.InferenceRequest, decoupled: bool) -> tuple[OutgoingCalls, Pending]:
        calls = self.server()
        return calls, pb_calls.begin(calls, request, decoupled, self._is_held(), self._work_items())

    def _here(self) -> bool:
        """Whether this thread runs the event loop of the model's coroutines."""
        return self._coroutines is not None and self._coroutines.is_current_thread


def check_execute(config: ModelConfig, kind: Any) -> None:
    if not callable(getattr(kind, "execute", None)):
        raise InvalidRequest(f"class TritonPythonModel of model '{config.name}' has no execute method")
