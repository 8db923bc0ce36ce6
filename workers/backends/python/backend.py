"""Models that are a `model.py` with a class TritonPythonModel.

Invariants: the model gets the requests of a batch one by one, as in Triton, and its arrays are views of the callers'
memory. Exceptions and invalid results of a model fail requests, never the worker.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Coroutine, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shmserve.errors import InvalidRequest, ModelFailed
from shmserve.protocol.messages import Failure
from shmserve.repo.config.schema import as_triton_json, from_triton_json
from shmserve.repo.parameters import HOST_INPUTS, SEND_WAITS, STACKED
from shmserve.workers.backends.base import Backend, Context, SeparateModel
from shmserve.workers.backends.python import pb_metrics, pb_requests, pb_utils
from shmserve.workers.backends.python.model import PythonHost, PythonModel, check_execute
from shmserve.workers.backends.python.model_file import PythonModelFile, has_generator
from shmserve.workers.backends.python.pb_requests import mark_device_inputs, request_from
from shmserve.workers.backends.python.pb_tensor import DeviceTensor
from shmserve.workers.batch.specs import request_inputs_of
from shmserve.workers.model_calls.answer import NOT_ITERATIVE, Request, Response, failure_text, triton_code
from shmserve.workers.model_calls.responses import CANCELLED
from shmserve.workers.model_calls.stream import NO_RESPONSE, SENT_TWICE, ResponseSender, StreamClosed
from shmserve.workers.process.device import device_of
from shmserve.workers.process.log import log_message, public

if TYPE_CHECKING:
    from shmserve.protocol.worker_messages import Work
    from shmserve.repo.config.schema import ModelConfig

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class Python(Backend):
    asks = True
    source: Path | None = None
    """The model.py of a backend that runs all its models with it; None: the model has its own."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._file = PythonModelFile(context, self.source)
        self.resources.callback(pb_metrics.keep)
        pb_requests.bind(PythonHost(context))

    def complete(self, config: ModelConfig) -> ModelConfig:
        function = getattr(self._file.kind(config), "auto_complete_config", None)
        if function is None:
            return config
        completed = function(pb_utils.ModelConfig(as_triton_json(config)))
        if not isinstance(completed, pb_utils.ModelConfig):
            raise InvalidRequest(
                f"auto_complete_config of model '{config.name}' must return the model configuration object that it "
                f"was given, not {type(completed).__name__}"
            )
        return from_triton_json(completed.as_dict())

    def load(self, config: ModelConfig) -> PythonModel:
        kind: type[PythonModel] = SeparatePython
        if STACKED.read(config):
            from shmserve.workers.backends.python.stacked import StackedPython  # few models need it

            kind = StackedPython
        return kind(self.context, config, self._file.kind(config), self._file.arguments(config))


class SeparatePython(PythonModel, SeparateModel):
    _running: Sequence[Request] = ()

    def __init__(self, context: Context, config: ModelConfig, kind: Any, arguments: dict[str, str]) -> None:
        self._generator = has_generator(kind, config.name, config.decoupled)
        if not self._generator:
            check_execute(config, kind)
        self._send_waits = SEND_WAITS.read(config)
        self._inputs = [spec.name for spec in request_inputs_of(config)]
        self._outputs = [entry.name for entry in config.output]
        sequences = config.sequence_batching
        iterative = sequences is not None and sequences.iterative_sequence
        self._again = Response(again=True) if iterative else Response(error=NOT_ITERATIVE)
        self.on_device = not HOST_INPUTS.read(config) and device_of(config, context.instance).kind == "GPU"
        super().__init__(context, config, kind, arguments)

    # ------------------------------------------------------------------------------------ batches

    def execute(self, requests: list[Request]) -> list[Response | None]:
        streams = self.streams
        self._running = requests
        try:
            if streams.decoupled:
                return self._decoupled_answers(requests, *self._begin_decoupled(self._received(requests)))
            received = self._received(requests)
            responses = self._execute(received)
            if responses is None:  # all responses have been sent, or will be
                responses = [None] * len(requests)
            elif type(responses) is not list and not isinstance(responses, (list, tuple)):
                raise ModelFailed(f"Expected a list in the execute return, found type '{type(responses)}'.")
            if len(responses) != len(requests):
                raise ModelFailed(
                    f"number of InferenceResponse objects returned ({len(responses)}) from execute must match the "
                    f"number of requests ({len(requests)})"
                )
            for request, response in zip(received, responses, strict=True):
                if request._again and response is not None:
                    raise ModelFailed(
                        "Expected a None object in the execute function return list for reschduled request, found "
                        f"type '{type(response)}'."
                    )
            if streams.open or None in responses:
                remaining = list(received)
                del received  # so that a request that the model dropped is finalized
                return self._collected(remaining, list(responses))
            return [self._converted(response) for response in responses]
        finally:
            self._running = ()

    def _received(self, requests: list[Request]) -> list[pb_utils.InferenceRequest]:
        make, names, outputs = request_from, self._inputs, self._outputs
        model, version = self.context.model, self.context.version
        received = [make(self, request.work, request.arrays, names, outputs, model, version) for request in requests]
        if self.on_device:
            mark_device_inputs(received)
        return received

    def failed(self, requests: list[Request], response: Response) -> list[Response | None]:
        streams = self.streams
        if streams.decoupled:
            return super().failed(requests, response)
        return [streams.withdraw_sent(request.work.request) or response for request in requests]

    def _collected(self, received: list[pb_utils.InferenceRequest], responses: list[Any]) -> list[Response | None]:
        """Returns the answers of a batch in which some responses were sent, or will be, instead of being returned."""
        answers: list[Response | None] = []
        while received:
            request, response = received.pop(0), responses.pop(0)
            sender = getattr(request, "_sender", None)
            again = response is None and request._again
            if sender is None:
                answers.append(self._again if again else self._converted(response))
                continue
            stream: ResponseSender = sender._stream
            del request, sender  # if these were the last references, no response can be sent
            if response is not None:
                sent = self.streams.withdraw_sent(stream.work.request)
                if sent is not None:
                    log_message(
                        f"model instance '{self._instance}' returned a response that it had sent before: {SENT_TWICE}",
                        "error",
                    )
                answers.append(sent or self._converted(response))
            elif again and not stream.final:
                self.streams.take_over(stream.work.request)
                answers.append(self._again)
            else:
                answer = self.streams.collect(stream)
                answers.append(answer or self._failure(NO_RESPONSE))
        return answers

    # ------------------------------------------------------------------------------------ decoupled

    def _begin_decoupled(self, requests: list[pb_utils.InferenceRequest]) -> tuple[list[ResponseSender], list[bool]]:
        """Starts a batch of a decoupled model; returns which requests are to run again."""
        host = self.streams
        streams = [host.begin(request._work) for request in requests]
        for request, stream in zip(requests, streams, strict=True):
            request._sender = pb_utils.InferenceResponseSender(self, stream)
        if self._generator:
            for request, stream in zip(requests, streams, strict=True):
                self._start(self._generate(request, stream), [stream])
            return streams, []
        host.turn.release()
        try:
            result = self._model.execute(requests)
        finally:
            host.turn.acquire()
        if inspect.iscoroutine(result):
            self._start(self._follow(result, streams), streams)
            return streams, []
        self._check_none(result)
        return streams, [request._again for request in requests]

    def _decoupled_answers(
        self, requests: list[Request], streams: list[ResponseSender], again: list[bool]
    ) -> list[Response | None]:
        host = self.streams
        if not host.connected:  # a warm-up sample: only its failure matters
            answers = [host.collect(stream) for stream in streams]
            return [answer if answer is not None and answer.error is not None else None for answer in answers]
        if True not in again:
            return [None] * len(requests)
        if self._again.error is not None:
            for stream, wish in zip(streams, again, strict=True):
                if wish:
                    host.fail(stream, self._again.error)
            return [None] * len(requests)
        return [
            self._again if wish and host.take_over(request.work.request) else None
            for request, wish in zip(requests, again, strict=True)
        ]

    def _start(self, coroutine: Coroutine[Any, Any, None], streams: list[ResponseSender]) -> None:
        loop = self._loop()
        task_streams = tuple(streams)

        def started(task: asyncio.Task[None]) -> None:
            for stream in task_streams:
                stream.answered_by(partial(loop.loop.call_soon_threadsafe, task.cancel), task_streams)
            task.add_done_callback(ended)
            if all(stream.cancelled for stream in task_streams):
                loop.loop.call_soon(task.cancel)  # only after it has started, so that it can fail its streams

        def ended(task: asyncio.Task[None]) -> None:
            for stream in task_streams:
                stream.answer_ended()

        loop.start(coroutine, started)

    async def _generate(self, request: pb_utils.InferenceRequest, stream: ResponseSender) -> None:
        try:
            async with aclosing(self._model.stream(request)) as responses:
                async for response in responses:
                    await self.send(stream, response, 0)
            if not stream.final:
                self.send(stream, None, _FINAL)
        except asyncio.CancelledError:
            self.streams.fail_all([stream], CANCELLED)
        except Exception as error:
            self.streams.fail_all([stream], self.context.failure_of(error))

    async def _follow(self, coroutine: Coroutine[Any, Any, Any], streams: list[ResponseSender]) -> None:
        """Runs a batch of a model whose execute is a coroutine."""
        try:
            self._check_none(await coroutine)
        except asyncio.CancelledError:
            self.streams.fail_all(streams, CANCELLED)
        except Exception as error:
            self.streams.fail_all(streams, self.context.failure_of(error))

    # ------------------------------------------------------------------------------------ requests and senders

    def sender(self, request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponseSender:
        """Creates the sender of a request of a model that is not decoupled; other requests already have theirs."""
        work = request._work
        if not any(running.work is work for running in self._running):
            raise pb_utils.TritonModelException(
                "the request has been answered: its response sender can send nothing more"
            )
        request._sender = sender = pb_utils.InferenceResponseSender(self, self.streams.begin_late(work))
        return sender

    def send(self, stream: ResponseSender, response: Any, flags: int) -> Awaitable[None]:
        answer = None if response is None or _is_end_only(response, flags) else self._converted(response)
        coroutines = self._coroutines
        try:
            if coroutines is not None and coroutines.is_current_thread:
                return self.streams.send_soon(stream, answer, flags == _FINAL, coroutines.loop)
            if not self._send_waits:
                return self.streams.send_soon(stream, answer, flags == _FINAL, None)
            return self.streams.send(stream, answer, flags == _FINAL)
        except StreamClosed as error:
            raise pb_utils.TritonModelException(str(error)) from None

    # ------------------------------------------------------------------------------------ running requests

    def _work_items(self) -> Sequence[Work]:
        streams = self.streams
        if not streams.connected:
            return ()  # the server does not know the requests of warm-up samples
        work_items = [running.work for running in self._running]
        return work_items + [stream.work for stream in list(streams.open.values())] if streams.decoupled else work_items

    def _is_held(self) -> bool:
        if self.streams.decoupled and threading.current_thread() is not threading.main_thread():
            return False
        return super()._is_held()

    # ------------------------------------------------------------------------------------ answers

    def _converted(self, response: Any) -> Response:
        if not isinstance(response, pb_utils.InferenceResponse):
            return self._failure(
                "Expected an 'InferenceResponse' object in the execute function return list, found type "
                f"'{type(response)}'."
            )
        error = response._error
        if error is not None:
            code = triton_code(error._code)
            text = public(error._message, str(self.context.folder))
            return Response(error=Failure(code, text))
        outputs = [(tensor._name, self._output_of(tensor)) for tensor in response._tensors]
        return Response(outputs, None, response._parameters or None)

    def _output_of(self, tensor: pb_utils.Tensor) -> Any:
        """Returns the value of an output: the device piece if it is on a GPU and of the right type. No conversion
        happens there."""
        name = tensor._name
        if isinstance(tensor, DeviceTensor) and self._integers.get(name, tensor.piece.dtype) == tensor.piece.dtype:
            return tensor.piece
        return self._as_declared(name, tensor._array) if self._integers else tensor._array

    def _check_none(self, result: Any) -> None:
        if result is not None:
            raise ModelFailed(
                f"Python model '{self._instance}' is using the decoupled mode and the execute function must return "
                f"None. It returned {type(result)}"
            )

    def _failure(self, what: str) -> Response:
        return Response(error=Failure(ModelFailed.code, failure_text(self._instance, what)))


def _is_end_only(response: Any, flags: int) -> bool:
    """Whether the response has the final flag and no content."""
    if not flags or not isinstance(response, pb_utils.InferenceResponse):
        return False
    return not (response._tensors or response._error or response._parameters)
