"""Serves language models, whichever engine runs them.

Invariants: each request in the engine occupies slots of its batch, one for each of its texts, so that requests beyond
the number of slots wait in the server's queue. A slow caller delays nothing: its pending output becomes one response,
bounded by the context length, and the slot is free once the text has ended.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from shmserve.errors import InvalidRequest
from shmserve.repo.config.schema import ModelInput, ModelOutput, ModelTransactionPolicy
from shmserve.workers.backends.base import Backend, Context, SeparateModel
from shmserve.workers.backends.language import replies, requests
from shmserve.workers.backends.language.conversions import TASK, Detokenization, Tokenization, conversion_of
from shmserve.workers.backends.language.metrics import LanguageMetrics
from shmserve.workers.backends.language.replies import GenerationReply
from shmserve.workers.backends.language.requests import GenerationRequest, generation_of
from shmserve.workers.batch.specs import request_inputs_of
from shmserve.workers.model_calls.answer import Request, Response
from shmserve.workers.model_calls.responses import CANCELLED, OpenResponses

if TYPE_CHECKING:
    from shmserve.repo.config.schema import ModelConfig
    from shmserve.workers.backends.language.engine import Engine, Run, Step
    from shmserve.workers.backends.language.metrics import Count
    from shmserve.workers.backends.language.sampling import Defaults
    from shmserve.workers.model_calls.stream import ResponseSender

INPUTS = (
    ModelInput(name=requests.PROMPT, data_type="TYPE_STRING", dims=(1,)),
    ModelInput(name=requests.TOKENS, data_type="TYPE_UINT32", dims=(-1,), optional=True),
    ModelInput(name=requests.MESSAGES, data_type="TYPE_STRING", dims=(1,), optional=True),
    ModelInput(name=requests.SAMPLING, data_type="TYPE_STRING", dims=(1,), optional=True),
    ModelInput(name=TASK, data_type="TYPE_STRING", dims=(1,), optional=True),
    *(
        ModelInput(name=name, data_type="TYPE_BOOL", dims=(1,), optional=True)
        for name in (requests.STREAM, requests.EXCLUDE, *requests.RETURNED)
    ),
)
IMAGE = ModelInput(name=requests.IMAGE, data_type="TYPE_STRING", dims=(-1,), optional=True)
"""An input of models that see images."""
SUFFIX = ModelInput(name=requests.SUFFIX, data_type="TYPE_STRING", dims=(1,), optional=True)
"""An input of models that fill in the middle of a text."""
OUTPUTS = (
    ModelOutput(name="text_output", data_type="TYPE_STRING", dims=(-1,)),
    ModelOutput(name="tool_calls", data_type="TYPE_STRING", dims=(-1,)),
    ModelOutput(name="finish_reason", data_type="TYPE_STRING", dims=(-1,)),
    ModelOutput(name="stop_reason", data_type="TYPE_STRING", dims=(-1,)),
    ModelOutput(name="cumulative_logprob", data_type="TYPE_FP32", dims=(-1,)),
    ModelOutput(name="logprobs", data_type="TYPE_STRING", dims=(-1,)),
    ModelOutput(name="token_ids", data_type="TYPE_STRING", dims=(-1,)),
    ModelOutput(name="num_input_tokens", data_type="TYPE_UINT32", dims=(1,)),
    ModelOutput(name="num_output_tokens", data_type="TYPE_UINT32", dims=(-1,)),
    ModelOutput(name="num_cached_tokens", data_type="TYPE_UINT32", dims=(1,)),
    ModelOutput(name="max_model_len", data_type="TYPE_UINT32", dims=(1,)),
)
THINKING = ModelOutput(name=replies.THINKING, data_type="TYPE_STRING", dims=(-1,))
"""An output of models whose engine separates the thinking from the text of a chat."""
PROMPT_LOGPROBS = ModelOutput(name="prompt_logprobs", data_type="TYPE_STRING", dims=(-1,))
"""An output of models that return the log probabilities of prompts."""

_Start = Callable[[int, "ResponseSender"], object]
"""Starts a request that occupies this number of slots."""


class LanguageBackend(Backend):
    asks = True  # so that orders are received while `execute` waits

    def inputs_of(self, config: ModelConfig) -> tuple[ModelInput, ...]:
        return INPUTS

    def outputs_of(self, config: ModelConfig) -> tuple[ModelOutput, ...]:
        return OUTPUTS

    @abstractmethod
    def start(self, config: ModelConfig) -> tuple[Engine, Defaults]:
        """Loads the model in an engine. Raises if it cannot be loaded."""

    def complete(self, config: ModelConfig) -> ModelConfig:
        inputs, outputs = {entry.name for entry in config.input}, {entry.name for entry in config.output}
        return replace(
            config,
            input=config.input + tuple(entry for entry in self.inputs_of(config) if entry.name not in inputs),
            output=config.output + tuple(entry for entry in self.outputs_of(config) if entry.name not in outputs),
            model_transaction_policy=config.model_transaction_policy or ModelTransactionPolicy(decoupled=True),
        )

    def load(self, config: ModelConfig) -> LanguageInstance:
        _check(config, self.inputs_of(config), self.outputs_of(config))
        streams = OpenResponses(decoupled=True)
        if self.context.calls is not None:
            self.context.calls.connect(streams)
        with ExitStack() as undo:
            undo.callback(streams.close)
            undo.callback(streams.stop, False)
            engine, defaults = self.start(config)
            undo.callback(engine.close)
            instance = LanguageInstance(self.context, config, streams, engine, defaults)
            undo.pop_all()
        return instance


class LanguageInstance(SeparateModel):
    strict = False  # outputs that are not requested are absent
    streams: OpenResponses

    def __init__(
        self, context: Context, config: ModelConfig, streams: OpenResponses, engine: Engine, defaults: Defaults
    ) -> None:
        self.streams = streams
        self.slots = engine.limits.slots
        self._context = context
        self._engine = engine
        self._defaults = defaults
        self._names = [spec.name for spec in request_inputs_of(config)]
        self._outputs = frozenset(entry.name for entry in config.output)
        self._metrics = self._metrics_of(config.name, context.calls.count) if context.calls is not None else None
        self._free = self.slots
        """Number of free slots. Guarded by the turn."""
        self._threads: set[threading.Thread] = set()
        """Threads that run a request; an engine with a loop ends its own coroutines. Guarded by the turn."""
        self._begun: list[Coroutine[Any, Any, None]] = []
        """Requests of the batch that the loop of the engine gets together, so that they share its first step."""
        self._full = False
        """A request waits for slots. Guarded by the turn."""

    def _metrics_of(self, model: str, count: Count) -> LanguageMetrics:
        context = self._context
        self.streams.turn.release()
        try:
            return LanguageMetrics(count, model, context.version, context.instance, self._engine.limits)
        finally:
            self.streams.turn.acquire()

    def close(self) -> None:
        self.streams.stop(False)
        for thread in list(self._threads):
            thread.join()
        self._engine.close()
        self.streams.close()

    # ------------------------------------------------------------------------------------ batches

    def execute(self, requests: list[Request]) -> list[Response | None]:
        streams = [self._begin(request) for request in requests]
        self._start_begun()
        if self.streams.connected:
            return [None] * len(requests)
        responses = [self.streams.collect(stream) for stream in streams]  # a warm-up sample: only its failure matters
        return [response if response is not None and response.error is not None else None for response in responses]

    def _begin(self, request: Request) -> ResponseSender:
        """Starts a request; waits until the engine has room for it."""
        host, work = self.streams, request.work
        stream = host.begin(work)
        parameters = work.options.parameters if work.options is not None else {}
        try:
            inputs = dict(zip(self._names, request.arrays, strict=True))
            start, count = self._plan(inputs, parameters)
            self._take_slots(count, stream)
        except Exception as error:
            host.fail(stream, self._context.failure_of(error))
            return stream
        if stream.over or stream.cancelled:
            self._free += count
            host.fail(stream, CANCELLED)
            return stream
        try:
            start(count, stream)
        except RuntimeError as error:  # the thread limit was reached
            self._free += count
            host.fail(stream, self._context.failure_of(error))
        return stream

    def _plan(self, inputs: dict[str, Any], parameters: Mapping[str, Any]) -> tuple[_Start, int]:
        """What starts a request, and the number of slots that it occupies."""
        conversion = conversion_of(inputs)
        if conversion is not None:
            return partial(self._start_thread, partial(self._convert, conversion)), 1
        engine = self._engine
        generation = generation_of(inputs, parameters, self._defaults, engine.limits.slots)
        run = engine.prepared(generation)
        if engine.coroutines is None:
            return partial(self._start_thread, partial(self._generate, generation, run)), generation.count
        return partial(self._start_coroutine, generation, run), generation.count

    def _start_thread(
        self, run: Callable[[ResponseSender], Exception | None], count: int, stream: ResponseSender
    ) -> None:
        thread = threading.Thread(target=self._run, args=(run, count, stream), name="sequence", daemon=True)
        thread.start()
        self._threads.add(thread)

    def _start_coroutine(self, generation: GenerationRequest, run: Run, count: int, stream: ResponseSender) -> None:
        self._begun.append(self._generate_in_loop(generation, run, count, stream))

    def _start_begun(self) -> None:
        begun, self._begun = self._begun, []
        coroutines = self._engine.coroutines
        if begun and coroutines is not None:
            coroutines.start_all(begun)

    def _take_slots(self, count: int, stream: ResponseSender) -> None:
        if self._free < count and not stream.cancelled:
            self._start_begun()
            self._full = True
            self.streams.turn.release()
            try:
                with self._metrics.waiting() if self._metrics is not None else nullcontext():
                    self.streams.wait_for(lambda: self._free >= count or stream.dropped)
            finally:
                self.streams.turn.acquire()
                self._full = False
        self._free -= count

    # ------------------------------------------------------------------------------------ in the thread of a request

    def _run(self, run: Callable[[ResponseSender], Exception | None], count: int, stream: ResponseSender) -> None:
        self._end(run(stream), count, stream)

    async def _generate_in_loop(
        self, generation: GenerationRequest, run: Run, count: int, stream: ResponseSender
    ) -> None:
        with self._replying(generation, stream) as replying:
            running = run(replying)
            assert running is not None
            await running
        self._end(replying.error, count, stream)

    def _end(self, error: Exception | None, count: int, stream: ResponseSender) -> None:
        host = self.streams
        try:
            if error is not None:
                host.fail_all([stream], self._context.failure_of(error))
            elif not stream.final and not stream.over:
                host.send_soon(stream, None, True, None)
        finally:
            with host.turn:
                self._free += count
                self._threads.discard(threading.current_thread())
                full = self._full
            if full:
                host.wake()

    def _generate(self, generation: GenerationRequest, run: Run, stream: ResponseSender) -> Exception | None:
        with self._replying(generation, stream) as replying:
            run(replying)
        return replying.error

    @contextmanager
    def _replying(self, generation: GenerationRequest, stream: ResponseSender) -> Iterator[_Replying]:
        """The listener of a request, which runs during the block. It keeps the error with which the block ends."""
        metrics = self._metrics
        reply = GenerationReply(
            generation, [] if metrics is None else [metrics.began() for _ in range(generation.count)]
        )
        replying = _Replying(reply, stream, self.streams, self._outputs)
        try:
            yield replying
        except Exception as error:
            replying.error = replying.error or error
        reply.ended("cancelled" if stream.cancelled else "" if replying.error is None else "error")

    def _convert(self, conversion: Tokenization | Detokenization, stream: ResponseSender) -> Exception | None:
        try:
            outputs = conversion.outputs(self._engine)
            response = Response([pair for pair in outputs if pair[0] in self._outputs])
            self.streams.send_soon(stream, response, True, None)
        except Exception as error:
            return error
        return None


class _Replying:
    """The listener of a request: sends the output of the engine. `error`: the reason why the request was stopped."""

    def __init__(
        self, reply: GenerationReply, stream: ResponseSender, host: OpenResponses, outputs: frozenset[str]
    ) -> None:
        self.error: Exception | None = None
        self._reply = reply
        self._stream = stream
        self._host = host
        self._outputs = outputs

    def abort_with(self, abort: Callable[[], object]) -> None:
        self._stream.answered_by(abort)
        if self._stream.dropped:
            abort()

    def announce(self) -> Callable[[], None]:
        return self._host.announce()

    def step(self, steps: list[Step]) -> bool:
        """While the caller's window has no room, only the last response is sent, which is queued."""
        stream, reply = self._stream, self._reply
        if stream.dropped:
            return True
        try:
            if reply.prompt_tokens == 0 and (tokens := max([step.prompt for step in steps], default=0)):
                self._host.report_prefilled(stream, tokens)
            due = [reply.add(step) for step in steps]
            if True in due and (stream.room > 0 or reply.complete):
                outputs = [pair for pair in reply.outputs() if pair[0] in self._outputs]
                self._host.send_soon(stream, Response(outputs), reply.complete, None)
        except Exception as error:
            self.error = error
            return True
        return stream.dropped


def _check(config: ModelConfig, inputs: tuple[ModelInput, ...], outputs: tuple[ModelOutput, ...]) -> None:
    """Raises unless the configuration describes a language model."""
    failed = f"unable to load model '{config.name}'"
    if config.max_batch_size:
        raise InvalidRequest(f"{failed}: max_batch_size must be 0, as the engine forms its batches itself")
    if not config.decoupled:
        raise InvalidRequest(f"{failed}: a language model needs model_transaction_policy {{ decoupled: true }}")
    for what, entries, known in (("input", config.input, inputs), ("output", config.output, outputs)):
        types = {entry.name: entry.data_type for entry in known}
        for entry in entries:
            if entry.name not in types:
                raise InvalidRequest(f"{failed}: unexpected {what} '{entry.name}', allowed are: {', '.join(types)}")
            if entry.data_type != types[entry.name]:
                raise InvalidRequest(
                    f"{failed}: {what} '{entry.name}' must be {types[entry.name]}, not {entry.data_type}"
                )
    if all(entry.name != requests.PROMPT for entry in config.input):
        raise InvalidRequest(f"{failed}: it has no input '{requests.PROMPT}'")
