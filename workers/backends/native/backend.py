"""Runs a model with an unmodified C or C++ backend of Triton.

The C side records what the backend does with its requests as events. Python takes them after a batch has run, and is
called when the backend does something in a thread of its own, or while a decoupled model runs.

Invariant: a request ends when the backend has both sent its last response and released it, because the backend may read
the inputs until then.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Sequence
from ctypes import byref, c_uint64
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from shmserve.dtypes import elements
from shmserve.errors import ModelFailed, ServeError
from shmserve.protocol.messages import Failure
from shmserve.protocol.work_items import shares_of
from shmserve.repo.backends import DIRECTORY, VERBOSE, library_of
from shmserve.repo.config.schema import as_triton_json, from_triton_json
from shmserve.shm.views import address_of
from shmserve.workers.backends.base import AlikeResults, Backend, Context, SeparateModel
from shmserve.workers.backends.native.library import NativeLibrary
from shmserve.workers.backends.native.memory import MemoryManager
from shmserve.workers.backends.native.records import (
    CPU,
    FINAL,
    GPU,
    RESCHEDULE,
    UNKNOWN_OUTPUT,
    NativeEvent,
    RequestWriter,
    SentResponse,
    SentTensor,
    WordReader,
    alike_words,
)
from shmserve.workers.backends.native.server_calls import ServerCalls
from shmserve.workers.batch.specs import model_outputs_of, request_inputs_of
from shmserve.workers.model_calls.answer import NOT_ITERATIVE, Request, Response, failure_text, triton_code
from shmserve.workers.model_calls.probes import ReadinessCalls
from shmserve.workers.model_calls.responses import OpenResponses
from shmserve.workers.model_calls.stream import SENT_TWICE
from shmserve.workers.process.device import device_of, group_of
from shmserve.workers.process.exit_codes import Exit, exit_process
from shmserve.workers.process.log import log_message, public

if TYPE_CHECKING:
    from shmserve.protocol.worker_messages import Work
    from shmserve.repo.config.schema import ModelConfig
    from shmserve.workers.batch.gather import GatherGroup
    from shmserve.workers.batch.results import Results
    from shmserve.workers.model_calls.answer import ResponseOutputs
    from shmserve.workers.model_calls.stream import ResponseSender

FINALIZE_S = 30.0
"""The time for a backend to finalize, which may wait for threads that never end."""
_NOT_ANSWERED = "the backend released the request without a final response"


class _Answer(Struct, eq=False):
    """A request that the backend has, and its response so far."""

    request: Request
    kept: list[Any] = []
    """The memory of its inputs."""
    stream: ResponseSender | None = None
    """Set for a decoupled model."""
    response: Response | None = None
    """The response of a model that is not decoupled, or the last one of a request that was not yet released."""
    failure: Failure | None = None
    states: list[SentTensor] = []
    final: bool = False
    released: bool = False
    reschedule: bool = False

    @property
    def ended(self) -> bool:
        return self.released and (self.final or self.reschedule)


class _AlikeRequests:
    """The running requests of a batch in which all are alike. Most never become an `_Answer`."""

    def __init__(
        self, first: int, work_items: Sequence[Work], outputs_of: Callable[[Work], ResponseOutputs], kept: list[Any]
    ) -> None:
        self.first = first
        self.tokens = range(first, first + len(work_items))
        self.work_items = work_items
        self._outputs_of = outputs_of
        self._kept = kept

    def answer(self, token: int) -> _Answer:
        answer = _Answer(Request(self.work_items[token - self.first], [], self._outputs_of))
        answer.kept = list(self._kept)
        return answer


class _RunningRequests:
    """The requests that the backend has."""

    def __init__(self, streams: OpenResponses) -> None:
        self._streams = streams
        self.answers: dict[int, _Answer] = {}
        """By token: the requests that have not ended."""
        self.alike: _AlikeRequests | None = None

    def answer_of(self, token: int) -> _Answer | None:
        """Returns a request that has not ended."""
        answer, alike = self.answers.get(token), self.alike
        if answer is not None or alike is None or token not in alike.tokens:
            return answer
        return self.answers.setdefault(token, alike.answer(token))

    def work_items(self) -> list[Work]:
        """Empty during warm-up, whose requests the server does not know."""
        if not self._streams.connected:
            return []
        alike = self.alike
        return [*(answer.request.work for answer in list(self.answers.values())), *(alike.work_items if alike else ())]


class _InitializedBackend:
    """The library of the backend, and the parts of it that have been initialized."""

    def __init__(self, context: Context, config: ModelConfig, completes: bool) -> None:
        path = library_of(config, context.version_folder, context.settings.get(DIRECTORY, ""))
        assert path is not None  # found before this backend was chosen
        self._instance = context.instance
        self._initialized: list[tuple[str, int]] = []
        """The parts of the backend that have to be finalized, each with its address."""
        self.library = library = NativeLibrary(path)
        self.streams = OpenResponses(decoupled=False)
        if library.may_have_threads:
            self.streams.share()
        if context.calls is not None:
            context.calls.connect(self.streams)
        self.requests = _RunningRequests(self.streams)
        self.on_gpu = device_of(config, context.instance).kind == "GPU"
        self._server = ServerCalls(library.host, context.calls, self.requests.work_items)
        self._memory = MemoryManager(library.host, self.streams.turn, context, self.on_gpu)
        library.set_callbacks(**self._memory.callbacks, **self._server.callbacks)
        host, backend = library.host, config.backend
        host.host_set_verbose(VERBOSE in context.settings)
        host.host_set_backend(backend.encode(), str(path.parent).encode(), _settings_json(context, backend))
        folder = str(context.folder).encode()
        host.host_set_model(context.model.encode(), context.version, folder, completes, _json_of(config))

    def start(self, part: str, subject: int) -> None:
        self.streams.turn.release()
        try:
            self.library.call(f"{part}Initialize", subject)
        finally:
            self.streams.turn.acquire()
        self._initialized.append((part, subject))

    def close(self) -> None:
        self.streams.stop(False)
        self._server.close()
        deadline = threading.Timer(FINALIZE_S, self._abandon_finalization)
        deadline.daemon = True
        deadline.start()
        try:
            self._finalize()
        finally:
            deadline.cancel()
            self._memory.close()
            self.streams.close()

    def _finalize(self) -> None:
        """Finalizes all parts, the last one first, also after an error."""
        if self._initialized:
            part, subject = self._initialized.pop()
            try:
                self.library.call(f"{part}Finalize", subject)
            finally:
                self._finalize()

    def _abandon_finalization(self) -> None:
        log_message(f"the backend of instance '{self._instance}' was not finalized within {FINALIZE_S:g} s")
        exit_process(Exit.FINALIZE_FAILED)


class Native(Backend):
    asks = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._opened: _InitializedBackend | None = None

    def complete(self, config: ModelConfig) -> ModelConfig:
        opened = self._opened = self._initialize(config, completes=True)
        return from_triton_json(msgspec.json.decode(opened.library.host.host_config()))

    def load(self, config: ModelConfig) -> NativeModel:
        opened = self._opened or self._initialize(config, completes=False)
        return NativeModel(self.context, config, opened)

    def _initialize(self, config: ModelConfig, completes: bool) -> _InitializedBackend:
        opened = _InitializedBackend(self.context, config, completes)
        self.resources.callback(opened.close)
        opened.start("", opened.library.host.host_backend())
        opened.start("Model", opened.library.host.host_model())
        return opened


class NativeModel(SeparateModel):
    """An instance of the backend. The backend finalizes it."""

    stored = True
    strict = False
    streams: OpenResponses

    def __init__(self, context: Context, config: ModelConfig, opened: _InitializedBackend) -> None:
        library = self._library = opened.library
        streams = self.streams = opened.streams
        library.host.host_set_config(_json_of(config))
        streams.set_decoupled(config.decoupled)
        inputs, outputs = request_inputs_of(config), model_outputs_of(config)
        library.set_tensors(
            streams.decoupled,
            [(spec.name, spec.dtype) for spec in inputs],
            [(spec.name, spec.dtype) for spec in outputs],
        )
        sequences = config.sequence_batching
        library.set_states(sequences.state if sequences is not None else ())
        self._context = context
        self._iterative = sequences is not None and sequences.iterative_sequence
        self.on_device = opened.on_gpu
        self.takes_slots = not streams.decoupled
        self.execute_alike = None if streams.decoupled else self._execute_alike
        self._inputs = len(inputs)
        self._declared = len(config.output)
        self._outputs = outputs
        self._output_names = [spec.name for spec in outputs]
        self._writer = RequestWriter(self._output_names)
        self._requests = opened.requests
        self._answers = opened.requests.answers
        self._tokens = 0
        self._placed: dict[int, ResponseOutputs] = {}
        """By number: the outputs of responses that were not sent yet. Guarded by the turn."""
        self._order = threading.Lock()
        """Held while events are taken and handled, so that they are handled in order. Taken before the turn."""
        self._probes = ReadinessCalls(self._is_ready)
        self.probes = library.has("ModelInstanceReady")
        library.set_callbacks(notify=self._notified, place=self._place, cancelled=self._is_cancelled)
        instance = context.instance
        group = group_of(config, instance)
        library.set_instance(instance, device_of(config, instance), group[0] if group is not None else None)
        opened.start("ModelInstance", library.host.host_instance())

    def probe(self, report: Callable[[bool], None]) -> None:
        self._probes.add(report)

    def _is_ready(self) -> bool:
        try:
            self._library.call("ModelInstanceReady", self._library.host.host_instance())
        except ServeError:
            return False
        return True

    # ------------------------------------------------------------------------------------ batches

    def execute(self, requests: list[Request]) -> list[Response | None]:
        streams = self.streams
        answers = {self._tokens + index: _Answer(request) for index, request in enumerate(requests, 1)}
        self._tokens += len(requests)
        words: array[int] = array("Q")
        for token, answer in answers.items():
            self._writer.write(words, token, answer.request, answer.kept)
            if streams.decoupled:
                answer.stream = streams.begin(answer.request.work)
        self._answers.update(answers)
        streams.turn.release()
        try:
            error = self._library.host.host_execute(words.buffer_info()[0], len(answers))
            self._settle(answers, error)
        finally:
            streams.turn.acquire()
        if not streams.decoupled:
            return self._responses_of(answers)
        if streams.connected:
            return [self._run_again(token, answer) for token, answer in answers.items()]
        last = [streams.collect(answer.stream) for answer in answers.values() if answer.stream is not None]
        return [one if one is not None and one.error is not None else None for one in last]  # a warm-up sample

    def _execute_alike(
        self, inputs: GatherGroup, outputs: Results, outputs_of: Callable[[Work], ResponseOutputs]
    ) -> AlikeResults:
        host, streams = self._library.host, self.streams
        kept: list[Any] = []
        work_items, rows = inputs.work_items, array("Q", shares_of(inputs.work_items))
        words = alike_words(inputs, self._inputs, kept)
        alike = self._requests.alike = _AlikeRequests(self._tokens + 1, work_items, outputs_of, kept)
        self._tokens += len(work_items)
        batch = alike.first, len(work_items), rows.buffer_info()[0]
        inputs.computing()
        described = c_uint64()
        streams.turn.release()
        try:
            error = host.host_execute_alike(*batch, self._inputs, words.buffer_info()[0], len(words))
            self._order.acquire()  # a thread of an earlier batch may still be about to take events
        finally:
            streams.turn.acquire()
        try:
            result = None if error else host.host_alike(*batch, byref(described))
            response = WordReader(result, described.value).response() if result is not None else None
            collected = response is not None and self._collect(response, inputs, outputs)
        finally:
            self._order.release()
        try:
            if response is not None and collected:
                for token in alike.tokens if self._answers else ():
                    self._answers.pop(token, None)
                return AlikeResults(None, response.parameters or None)
            return AlikeResults(self._responses_alike(alike, error))
        finally:
            self._requests.alike = None

    def _collect(self, response: SentResponse, inputs: GatherGroup, outputs: Results) -> bool:
        """Collects the outputs of responses like this one. False: they do not match the configuration."""
        shapes = {output.index: (inputs.rows, *output.shape[1:]) for output in response.outputs}
        if len(shapes) < len(response.outputs) or len(shapes) != self._declared:
            return False
        if not all(index < self._declared and self._outputs[index].fits(shape) for index, shape in shapes.items()):
            return False
        for position, (index, shape) in enumerate(shapes.items()):
            target = outputs.place(index, shape)
            self._library.host.host_collect(len(inputs.work_items), position, address_of(target))
        self._library.host.host_collected()
        return True

    def _responses_alike(self, alike: _AlikeRequests, error: int | None) -> list[Response | None]:
        """Returns a response for each request of a batch whose responses are not alike."""
        answers = {token: self._requests.answer_of(token) for token in alike.tokens}
        known = {token: answer for token, answer in answers.items() if answer is not None}
        self.streams.turn.release()
        try:
            self._settle(known, error)
        finally:
            self.streams.turn.acquire()
        return self._responses_of(known)

    def _settle(self, answers: dict[int, _Answer], error: int | None) -> None:
        """Handles what a batch has left behind. Waits for the end of its requests, unless the model is decoupled."""
        self._handle_events()
        if error:
            self._fail(answers, self._library.taken_error(error))
        if not self.streams.decoupled and not all(answer.ended for answer in answers.values()):
            self.streams.wait_for(lambda: all(answer.ended for answer in answers.values()), even_if_lost=True)

    def _responses_of(self, answers: dict[int, _Answer]) -> list[Response | None]:
        for token in answers:
            del self._answers[token]
        return [self._response_of(answer) for answer in answers.values()]

    def _response_of(self, answer: _Answer) -> Response:
        if answer.failure is not None:
            return self._unsent(answer.response, answer.failure)
        if answer.reschedule:
            response = Response(again=True) if self._iterative else Response(error=NOT_ITERATIVE)
        else:
            assert answer.response is not None
            response = answer.response
        if answer.states and response.error is None:
            try:
                response.outputs = response.outputs + [(state.name, state.array()) for state in answer.states]
            except ServeError as error:
                return self._unsent(response, self._context.failure_of(error))
        return response

    def _run_again(self, token: int, answer: _Answer) -> Response | None:
        """Returns the response of a request of a decoupled model that is to run again; None for any other."""
        if not answer.reschedule:
            return None
        del self._answers[token]
        if answer.stream is None or not self.streams.take_over(answer.request.work.request):
            return None
        return self._response_of(answer)

    def _unsent(self, response: Response | None, failure: Failure) -> Response:
        return Response(error=failure, placed=response.placed if response is not None else None)

    def _fail(self, answers: dict[int, _Answer], error: ServeError) -> None:
        """Fails the requests that the backend did not take from a failed batch."""
        failure = self._context.failure_of(error)
        for token, answer in answers.items():
            if answer.ended:
                continue
            if answer.stream is not None:
                self.streams.fail_all([answer.stream], failure)
                del self._answers[token]
            answer.failure = answer.failure or failure
            answer.released = answer.final = True

    # ------------------------------------------------------------------------------------ events, in any thread

    def _handle_events(self) -> None:
        """Handles what the backend has done so far."""
        host, count = self._library.host, c_uint64()
        with self._order:
            reader = WordReader(host.host_take(byref(count)), count.value)
            while reader.more:
                kind, token, flags = reader.event()
                answer = self._requests.answer_of(token)
                if kind == NativeEvent.SENT:
                    self._sent(answer, reader.response(), bool(flags & FINAL))
                elif kind == NativeEvent.STATE:
                    state = reader.state(self._output_names)
                    if answer is not None:
                        answer.states.append(state)
                elif kind == NativeEvent.DROPPED:
                    self._drop(flags)
                elif answer is not None:
                    self._note(answer, kind, flags)
                if answer is not None and answer.stream is not None and answer.ended and not answer.reschedule:
                    del self._answers[token]
                    self._end_stream(answer.stream, answer.response)
            host.host_taken()

    def _notified(self) -> None:
        """Called by the shim, in the thread in which the backend did something."""
        self._handle_events()
        self.streams.wake()

    def _note(self, answer: _Answer, kind: int, flags: int) -> None:
        if kind == NativeEvent.RELEASED:
            answer.released = True
            answer.reschedule = bool(flags & RESCHEDULE)
            answer.kept.clear()
            return
        answer.final = True
        if kind == NativeEvent.LOST and answer.response is None:
            answer.failure = answer.failure or self._named(_NOT_ANSWERED)
            if answer.stream is not None:
                self.streams.fail_all([answer.stream], answer.failure)
        elif kind == NativeEvent.FINISHED and answer.response is None and answer.stream is None:
            answer.failure = answer.failure or self._named("the backend sent the final flag without a response")

    def _sent(self, answer: _Answer | None, sent: SentResponse, final: bool) -> None:
        placed = self._taken(sent.number)
        response = self._response(sent, placed)
        if answer is None:
            log_message(f"model instance '{self._context.instance}' answered a request that had been answered", "error")
            self._abandon(response)
        elif answer.stream is None:
            if answer.response is not None:  # as in Triton, the first one counts
                log_message(
                    f"model instance '{self._context.instance}' answered a request twice: {SENT_TWICE}", "error"
                )
                self._abandon(response)
            answer.response = answer.response or response
            answer.final = answer.final or final
        elif final:
            answer.final = True
            answer.response = response
        else:
            self._send(answer.stream, response, False)

    def _end_stream(self, stream: ResponseSender, response: Response | None) -> None:
        if not stream.over:
            self._send(stream, response, True)
        elif response is not None:
            self._abandon(response)

    def _send(self, stream: ResponseSender, response: Response | None, final: bool) -> None:
        self.streams.send_soon(stream, response, final, None)
        if response is not None:
            self._abandon(response)

    def _abandon(self, response: Response) -> None:
        """Frees the outputs of a response that was not sent."""
        placed, response.placed = response.placed, None
        if placed is not None:
            with self.streams.turn:
                placed.abandon()

    def _drop(self, number: int) -> None:
        self._abandon(Response(placed=self._taken(number)))

    def _taken(self, number: int) -> ResponseOutputs | None:
        if not self._placed:
            return None
        with self.streams.turn:
            return self._placed.pop(number, None)

    def _response(self, sent: SentResponse, placed: ResponseOutputs | None) -> Response:
        if sent.error:
            text = public(sent.text, str(self._context.folder))
            return Response(error=Failure(triton_code(sent.error - 1), text), placed=placed)
        try:
            for output in sent.outputs:
                if output.index == UNKNOWN_OUTPUT:
                    known = ", ".join(self._output_names[: self._declared])
                    raise ModelFailed(f"unexpected output '{output.name}': the outputs of the model are {known}")
            outputs = [(output.name, output.array()) for output in sent.outputs if output.data is not None]
        except ServeError as error:
            return Response(error=self._context.failure_of(error), placed=placed)
        return Response(outputs, parameters=sent.parameters or None, placed=placed)

    def _place(self, number: int, token: int, output: int, rank: int, dims: Any, size: int, memory: Any) -> int:
        """Returns where the backend is to write an output; 0: anywhere. `memory`: the kind that it prefers, then that
        of the result."""
        preferred, memory[0] = memory[0], CPU
        answer, spec = self._requests.answer_of(token), self._outputs[output]
        shape = tuple(dims[:rank])
        if (
            answer is None
            or output >= self._declared
            or min(shape, default=0) < 0
            or size != elements(shape) * spec.item
        ):
            return 0
        with self.streams.turn:
            placed = self._placed.get(number)
            if placed is None:
                placed = self._placed[number] = answer.request.outputs_of(answer.request.work)
            if preferred == GPU and (address := placed.near_alone(output, shape)) is not None:
                memory[0] = GPU
                return address
            array = placed.place_alone(output, shape)
            return 0 if array is None else address_of(array)

    def _is_cancelled(self, token: int) -> int:
        answer = self._requests.answer_of(token)
        return answer is not None and self.streams.is_cancelled(answer.request.work.request, answer.stream)

    # ------------------------------------------------------------------------------------ errors

    def _named(self, what: str) -> Failure:
        return Failure(ModelFailed.code, failure_text(self._context.instance, what))


def _json_of(config: ModelConfig) -> bytes:
    return msgspec.json.encode(as_triton_json(config))


def _settings_json(context: Context, backend: str) -> bytes:
    """The settings of the backend in the form and with the defaults of Triton's command line."""
    settings = {
        "auto-complete-config": "true" if context.auto_complete else "false",
        "backend-directory": context.settings.get(DIRECTORY, ""),
        "default-max-batch-size": "4",
        "min-compute-capability": "6.0",
    }
    for prefix in (",", f"{backend},"):  # those for this backend override those for all
        values = {key.removeprefix(prefix): text for key, text in context.settings.items() if key.startswith(prefix)}
        settings |= values
    return msgspec.json.encode({"cmdline": settings})
