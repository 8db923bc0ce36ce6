"""Handles the requests of the OpenAI-compatible endpoints: decodes them, queries the model's configuration, and sends
requests to the model."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any

import msgspec
from msgspec import Struct

from shmserve.errors import InvalidRequest, NotFound, ServeError, Unavailable, Unsupported
from shmserve.gateway.auth.actions import FORMS
from shmserve.gateway.kserve import json_strings
from shmserve.gateway.kserve.answers import Buffer
from shmserve.gateway.kserve.forms import Form, form_of
from shmserve.gateway.kserve.json_strings import CutStrings
from shmserve.gateway.kserve.plans import InputPlan, RequestPlan
from shmserve.gateway.limits.body_budget import Budget
from shmserve.gateway.limits.caller_shares import ShareExceeded
from shmserve.gateway.limits.turns import COPY_BYTES, SLICE_BYTES
from shmserve.gateway.openai import bodies, images, inputs, messages, models, responses, scores, speech, tokens
from shmserve.gateway.openai.bodies import ChatRequest, CompletionRequest, EmbeddingRequest, Sampling, TextsRequest
from shmserve.gateway.openai.embeddings import Embeddings
from shmserve.gateway.openai.errors import BadParameter
from shmserve.gateway.openai.formats import ChatFormat, CompletionFormat, Echo, ResponseOptions
from shmserve.gateway.openai.generation import Generation, ResponseFormat, StreamFormat
from shmserve.gateway.openai.inputs import SamplingInputs
from shmserve.gateway.openai.messages import MessagesFormat
from shmserve.gateway.openai.models import MESSAGES, TOOL_CALLS, LanguageModel
from shmserve.gateway.openai.reading import TextReading, tags_of
from shmserve.gateway.openai.responses import ResponsesFormat, ResponsesRequest
from shmserve.gateway.openai.scores import RerankRequest, ScoreRequest, Scores
from shmserve.gateway.openai.speech import TranscriptionFormat, TranscriptionRequest
from shmserve.gateway.openai.templates import WAITING_BYTES, ChatTemplates, continued_prompt, template_values
from shmserve.gateway.openai.tokens import PROMPT_BYTES, CountFormat, DetokenizeFormat, TokenizeFormat
from shmserve.gateway.upstream.documents import BrokerQuery
from shmserve.gateway.upstream.exchange import Exchange, ask_for, ask_for_config
from shmserve.gateway.upstream.requests import RequestSender
from shmserve.llm.tool_choice import ForcedCalls
from shmserve.protocol.actions import Action

CHAT_TEMPLATE = "chat_template"
"""Model parameter."""
OWNER = "shmserve"
_PROCESS = secrets.token_hex(12)
"""Prefix of all response ids: unlike a random id per response, it needs no system call."""
_encode = msgspec.json.Encoder().encode


class _PromptTensors(Struct):
    """The prompts of a request: the tensors of each, their size in total, and the text that the choices of each begin
    with."""

    tensors: Iterator[list[InputPlan]]
    size: int
    echoes: list[Echo | None]


class OpenAiRequests:
    """The handler of the endpoints, for all connections."""

    def __init__(self, sender: RequestSender) -> None:
        self._sender = sender
        self._templates = ChatTemplates(Budget(WAITING_BYTES, sender.link.shares.bounds.share))
        self._ids = count(1)

    def begin(self, exchange: Exchange, body: Buffer) -> None:
        """Answers the request locally or queries the broker. Raises the errors that the client receives."""
        action = exchange.head.route.action
        if action is Action.OPENAI_MODELS:
            self._list_models(exchange)
        elif action is Action.OPENAI_MODEL:
            self._show_model(exchange)
        elif action in FORMS:
            exchange.work(form_of(body), partial(self._begin_speech, exchange))
        elif len(body) > SLICE_BYTES:
            exchange.work(
                json_strings.cut(bytes(body), bodies.VALUES),
                lambda strings: self._begin(exchange, strings.around, strings),
            )
        else:
            self._begin(exchange, bytes(body))

    def _begin(self, exchange: Exchange, text: bytes, strings: CutStrings | None = None) -> None:
        """`strings`: the long strings that were cut out of `text`."""
        request: Sampling | TextsRequest
        proceed: Callable[[Any], None]
        match exchange.head.route.action:
            case Action.COMPLETIONS:
                request = completion = bodies.completion(text)
                proceed = partial(self._complete, exchange, completion)
            case Action.CHAT_COMPLETIONS:
                request = chat = bodies.chat(text)
                proceed = partial(self._chat, exchange, chat, strings, _chat_format)
            case Action.MESSAGES:
                request, shows = messages.request_of(text)
                proceed = partial(self._chat, exchange, request, strings, partial(_messages_format, shows))
            case Action.RESPONSES:
                shown, request = responses.request_of(text)
                if strings is not None:
                    shown = responses.without_long_strings(shown)
                proceed = partial(self._chat, exchange, request, strings, partial(_responses_format, shown))
            case Action.TOKENIZE:
                request = prompt = tokens.tokenize_request(text)
                response: ResponseFormat = TokenizeFormat()
                proceed = partial(self._convert, exchange, prompt, strings, "tokenize", response)
            case Action.COUNT_TOKENS:
                request = chat = messages.counted(text)
                proceed = partial(self._convert, exchange, chat, strings, "tokenize", CountFormat())
            case Action.COUNT_INPUT_TOKENS:
                request = chat = responses.counted(text)
                response = CountFormat(object="response.input_tokens")
                proceed = partial(self._convert, exchange, chat, strings, "tokenize", response)
            case Action.DETOKENIZE:
                request = prompt = tokens.detokenize_request(text)
                response = DetokenizeFormat()
                proceed = partial(self._convert, exchange, prompt, strings, "detokenize", response)
            case Action.SCORE:
                request = score = scores.score_request(text)
                proceed = partial(self._score, exchange, score, "score")
            case Action.RERANK:
                request = rerank = scores.rerank_request(text)
                proceed = partial(self._score, exchange, rerank, "rerank")
            case _:
                request = embedding = bodies.embedding(text)
                proceed = partial(self._embed, exchange, embedding)
        if exchange.head.old and isinstance(request, Sampling) and request.stream:
            raise Unsupported("a stream requires HTTP/1.1")

        def ask_config(_: None = None) -> None:
            """The model's configuration decides how the request continues."""
            self._ask_config(exchange, models.check_name(request.model), proceed)

        if strings is None or isinstance(request, ChatRequest):  # a chat is encoded before they are put back
            ask_config()
        else:
            exchange.work(strings.restore(request), ask_config)

    def _begin_speech(self, exchange: Exchange, form: Form) -> None:
        request, completion = speech.request_of(form)
        if exchange.head.old and request.stream:
            raise Unsupported("a stream requires HTTP/1.1")
        transcribe = partial(self._transcribe, exchange, request, completion, form.files["file"][-1])
        self._ask_config(exchange, models.check_name(request.model), transcribe)

    def _transcribe(
        self,
        exchange: Exchange,
        request: TranscriptionRequest,
        completion: CompletionRequest,
        audio: memoryview,
        config: Any,
    ) -> None:
        model = models.language_model(request.model, config)
        speech.check_model(model, request)
        response = TranscriptionFormat(request, self._new_id("trsc-"))
        exchange.work(
            speech.speech_tensors(model, request.prompt, audio),
            lambda tensors: self._generate(exchange, model, completion, _one_prompt(tensors), response),
        )

    def _new_id(self, prefix: str) -> str:
        return f"{prefix}{_PROCESS}{next(self._ids):08x}"

    def _ask_config(self, exchange: Exchange, name: str, then: Callable[[Any], None]) -> None:
        """A name with a colon is that of a model, or of a model and its adapter."""
        link, model = self._sender.link, models.without_adapter(name)

        def failed(error: ServeError) -> None:
            if isinstance(error, NotFound) and model not in ("", name):
                ask_for_config(exchange, link, model, "", then)
            else:
                exchange.fail(error)

        ask_for_config(exchange, link, name, "", then, failed)

    # ------------------------------------------------------------------------------------ models

    def _list_models(self, exchange: Exchange) -> None:
        def show(answer: Any) -> None:
            exchange.answer(200, [_encode({"object": "list", "data": _listed(answer)})])

        ask_for(exchange, self._sender.link, BrokerQuery("text_models"), show)

    def _show_model(self, exchange: Exchange) -> None:
        name = exchange.head.route.model

        def show(answer: Any) -> None:
            listed = [one for one in _listed(answer) if one["id"] == name]
            if not listed:
                raise NotFound(
                    f"The model '{name[:80]}' does not exist, is not READY, or is declared neither as a language model "
                    "nor as one for embeddings"
                )
            exchange.answer(200, [_encode(listed[0])])

        asked = "" if models.ADAPTER in name else name
        ask_for(exchange, self._sender.link, BrokerQuery("text_models", model=asked), show)

    # ------------------------------------------------------------------------------------ completions

    def _complete(self, exchange: Exchange, request: CompletionRequest, config: Any) -> None:
        model = models.language_model(request.model, config)
        prompts = inputs.Prompts(model, request)
        if len(prompts) * (request.n or 1) > bodies.CHOICES:
            raise BadParameter(
                "n", f"{len(prompts)} prompts with {request.n} choices each; the limit is {bodies.CHOICES} choices"
            )
        options = _options(request, self._new_id("cmpl-"), request.logprobs)
        echoes = [Echo(text) if request.echo else None for text in prompts.texts] or [None] * len(prompts)
        prompt_tensors = _PromptTensors(prompts.tensors(), prompts.bytes, echoes)
        self._generate(exchange, model, request, prompt_tensors, CompletionFormat(options, request.max_tokens == 0))

    def _chat(
        self,
        exchange: Exchange,
        request: ChatRequest,
        strings: CutStrings | None,
        make_format: Callable[[ChatRequest, str, TextReading], ChatFormat],
        config: Any,
    ) -> None:
        model = models.language_model(request.model, config)
        forced = bodies.demanded_calls(request)
        inputs.check_tools(model, request, forced)
        free = forced is None and request.response_format is None and request.structured_outputs is None
        reading = TextReading(forced, TOOL_CALLS not in model.outputs, tags_of(model) if free else None)
        response = make_format(request, self._new_id(""), reading)

        def generate(tensors: list[InputPlan]) -> None:
            self._generate(exchange, model, request, _one_prompt(tensors), response, forced)

        self._make_chat(exchange, model, request, strings, generate)

    def _make_chat(
        self,
        exchange: Exchange,
        model: LanguageModel,
        request: ChatRequest,
        strings: CutStrings | None,
        then: Callable[[list[InputPlan]], None],
    ) -> None:
        """`then` gets the tensors of the prompt."""
        taken = images.take_images(request.messages, strings)
        if taken:
            then = partial(self._add_images, exchange, model, taken, then)
        if MESSAGES not in model.inputs:
            render = partial(self._render, exchange, model, request, then)
            if strings is None:
                render()
            else:
                exchange.work(strings.restore(request), render)
        elif strings is None:
            then(inputs.chat_tensors(model, request))
        else:
            exchange.work(inputs.large_chat_tensors(model, request, strings), then)

    def _add_images(
        self,
        exchange: Exchange,
        model: LanguageModel,
        taken: list[str],
        then: Callable[[list[InputPlan]], None],
        prompt: list[InputPlan],
    ) -> None:
        exchange.work(images.image_tensor(model, taken), lambda tensor: then([*prompt, tensor]))

    def _render(
        self,
        exchange: Exchange,
        model: LanguageModel,
        request: ChatRequest,
        then: Callable[[list[Any]], None],
        _: None = None,
    ) -> None:
        template = model.parameters.get(CHAT_TEMPLATE)
        if template is None:
            raise InvalidRequest(
                f"model '{model.name[:80]}' cannot chat: it has neither an input '{MESSAGES}' nor the parameter "
                f"{CHAT_TEMPLATE} in its configuration; use /v1/completions"
            )
        tools = None if request.tool_choice == "none" else request.tools
        arguments = inputs.template_arguments(model, request)
        prompted, continued = request.add_generation_prompt, bool(request.continue_final_message)
        if prompted is not None or continued:
            arguments = {"add_generation_prompt": bool(prompted), **arguments}

        def rendered(text: str) -> None:
            prompt = continued_prompt(text, request.messages[-1]) if continued else text
            then([model.inputs[models.PROMPT].text(prompt.encode())])

        values = _encode(template_values(request.messages, tools, arguments, model.parameters))
        self._templates.render(exchange, template, values, rendered)

    def _generate(
        self,
        exchange: Exchange,
        model: LanguageModel,
        request: Sampling,
        prompts: _PromptTensors,
        response: StreamFormat,
        forced: ForcedCalls | None = None,
    ) -> None:
        stream, shows_usage, n = bool(request.stream), response.shows_usage, request.n or 1
        options = bodies.request_options(response.id, request)
        together, apart = (n, 1) if MESSAGES in model.inputs else (1, n)
        chosen = inputs.sampling_of(model, request, response.top, forced)
        sampling = inputs.SamplingInputs(model, chosen, options, apart)
        shows_stop = response.shows_stop and request.stop is not None
        names = inputs.wanted_flags(model, stream, shows_usage or not stream, response.top is not None, shows_stop)
        echoes = [echo for echo in prompts.echoes for _ in range(apart)]
        echoed = n * prompts.size if any(echoes) else 0
        _hold(exchange, len(echoes), apart * prompts.size + len(echoes) * sampling.bytes, echoed)
        plans = self._plans(prompts.tensors, sampling, inputs.flag_tensors(model, names), apart)
        events = response if stream else None
        Generation(exchange, self._sender, model.name, response, events, echoes, together, apart).begin(plans)

    def _plans(
        self, prompts: Iterator[list[InputPlan]], sampling: SamplingInputs, flags: list[InputPlan], apart: int
    ) -> Iterator[RequestPlan | None]:
        """The requests to the model, each made when it is sent. They share the memory of equal tensors. None: see
        `Planned`."""
        placed = self._sender.placed_tensors
        shared = None if sampling.differ else (yield from placed(sampling.tensors(0)))
        copied = 0
        for prompt in prompts:
            tensors = yield from placed(prompt)
            copied += sum([spec.size for spec in tensors])
            for number in range(apart):
                own = (yield from placed(sampling.tensors(number))) if shared is None else shared
                copied += sampling.bytes if sampling.is_copied else 0
                if copied > COPY_BYTES:
                    copied = 0
                    yield None
                yield RequestPlan((*tensors, *own, *flags), 0, sampling.options(number))

    def _convert(
        self,
        exchange: Exchange,
        request: CompletionRequest | ChatRequest,
        strings: CutStrings | None,
        task: str,
        response: ResponseFormat,
        config: Any,
    ) -> None:
        """Has the model convert the prompt between text and tokens."""
        model = models.language_model(request.model, config)
        flags = [inputs.task_tensor(model, task)]

        def convert(tensors: list[InputPlan]) -> None:
            prompt = _one_prompt(tensors)
            if prompt.size > PROMPT_BYTES:
                raise InvalidRequest(f"the prompt has {prompt.size} bytes; the limit to {task} is {PROMPT_BYTES}")
            _hold(exchange, 1, prompt.size, 0)
            unset = SamplingInputs(model, {}, bodies.request_options("", request), 1)
            generation = Generation(exchange, self._sender, model.name, response, None, prompt.echoes)
            generation.begin(self._plans(prompt.tensors, unset, flags, 1))

        if isinstance(request, ChatRequest):
            self._make_chat(exchange, model, request, strings, convert)
        else:
            convert(next(inputs.Prompts(model, request).tensors()))

    # ------------------------------------------------------------------------------------ embeddings and scores

    def _embed(self, exchange: Exchange, request: EmbeddingRequest, config: Any) -> None:
        model = models.embedding_model(request.model, config)
        texts, tokens = bodies.texts_or_tokens("input", request.input, bodies.TEXTS)
        if tokens:
            raise BadParameter(
                "input", f"model '{model.name[:80]}' takes no token ids for embeddings; send the text instead"
            )
        Embeddings(exchange, self._sender, model, request, texts).begin()

    def _score(self, exchange: Exchange, request: ScoreRequest | RerankRequest, kind: str, config: Any) -> None:
        model = models.score_model(request.model, config)
        pairs = request.pairs()
        _hold(exchange, len(pairs[0]), sum([len(text) for texts in pairs for text in texts]), 0)
        common: dict[str, Any] = {"id": self._new_id(f"{kind}-"), "model": request.model}
        if kind == "score":
            common |= {"object": "list", "created": int(time.time())}
        Scores(exchange, self._sender, model, request, pairs, common).begin()


def _one_prompt(tensors: list[InputPlan]) -> _PromptTensors:
    return _PromptTensors(iter([tensors]), sum([spec.size for spec in tensors]), [None])


def _chat_format(request: ChatRequest, number: str, reading: TextReading) -> ChatFormat:
    top = (request.top_logprobs or 0) if request.logprobs else None
    return ChatFormat(_options(request, f"chatcmpl-{number}", top), reading, request.functions is not None)


def _messages_format(shows_thinking: bool, request: ChatRequest, number: str, reading: TextReading) -> ChatFormat:
    return MessagesFormat(f"msg_{number}", request.model, shows_thinking, reading)


def _responses_format(shown: ResponsesRequest, request: ChatRequest, number: str, reading: TextReading) -> ChatFormat:
    return ResponsesFormat(f"resp_{number}", int(time.time()), shown, reading)


def _hold(exchange: Exchange, requests: int, size: int, echoed: int) -> None:
    """Counts what a request becomes, before any of it is made: `size` bytes for the model and `echoed` bytes for the
    client."""
    if size + echoed <= SLICE_BYTES:
        return
    try:
        exchange.hold(size + echoed)
    except Unavailable as error:
        raise ShareExceeded(
            f"{requests} requests to the model have {size} bytes of prompts and sampling parameters, and the response "
            f"{echoed} bytes of prompts, which is too much: {error}"
        ) from None


def _options(request: CompletionRequest | ChatRequest, response_id: str, top: int | None) -> ResponseOptions:
    options = request.stream_options
    shows_usage = options is not None and bool(options.include_usage)
    continuous = shows_usage and options is not None and bool(options.continuous_usage_stats)
    return ResponseOptions(response_id, request.model, int(time.time()), top, shows_usage, continuous)


def _listed(answer: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adapters follow their models. `max_model_len` is vLLM's."""
    return [
        {
            "id": name,
            "object": "model",
            "created": one["created"],
            "owned_by": OWNER,
            **parent,
            **({"max_model_len": int(one["context"])} if one.get("context") else {}),
        }
        for one in answer
        if models.is_listed(one["name"], one["config"])
        for name, parent in _names(one["name"], one["config"])
    ]


def _names(model: str, config: dict[str, Any]) -> list[tuple[str, dict[str, str]]]:
    adapters = [f"{model}{models.ADAPTER}{adapter}" for adapter in models.adapters_of(config)]
    return [(model, {}), *((name, {"parent": model}) for name in adapters)]
