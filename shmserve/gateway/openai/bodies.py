"""Decodes the JSON of requests. Invariant: every field is used, listed as having no effect, or refused; none is ignored
silently."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from shmserve.errors import InvalidRequest
from shmserve.gateway.kserve.json_scan import check_depth, unreadable
from shmserve.gateway.kserve.plans import RequestOptions, options_of
from shmserve.gateway.openai.errors import BadParameter
from shmserve.llm.tool_choice import ForcedCalls, forced_calls

PROMPTS = 512
CHOICES = 1024
"""Maximum number of choices in one request: prompts times `n`."""
VALUES = 131_072
"""Maximum number of values in a large request, such as the tokens of its prompt."""
TEXTS = 2048
"""Maximum number of inputs in one request for embeddings."""
_INT64 = Meta(ge=-(2**63), le=2**63 - 1)
_Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Tokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_TokensOrNone = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Seed = Annotated[int, _INT64]
TopK = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
MinP = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(gt=0)]
Stop = str | Annotated[list[str], Meta(max_length=64)]
_TextOrList = str | list[Any]
_FIELD = re.compile(r" - at `\$\.?(.*?)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`")
_T = TypeVar("_T")


class StreamOptions(Struct, forbid_unknown_fields=True):
    """`continuous_usage_stats`: of vLLM; the chunks have the number of tokens so far."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Any = None


class Sampling(Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that completions and chat completions share. Sampling parameters have vLLM's names, which include
    OpenAI's. `sampling_parameters`: others that only the engine knows. `priority` and `timeout` apply to the queue."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    max_tokens: _Tokens | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    stop: Stop | None = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, float] | None = None

    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    sampling_parameters: dict[str, Any] | None = None
    priority: _Count | None = None
    timeout: _Count | None = None

    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None


_OF_ENGINES = (
    "allowed_token_ids",
    "bad_words",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
)
"""Fields of vLLM that only some engines know. They may also be in `sampling_parameters`."""
_SAMPLED = (
    "n",
    "temperature",
    "top_p",
    "stop",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "prompt_logprobs",
    *_OF_ENGINES,
)
"""Fields that are passed on as sampling parameters of the same name."""
_OWN = frozenset((*Sampling.__struct_fields__, "logprobs", "max_completion_tokens")).difference(_OF_ENGINES)


class CompletionRequest(Sampling, kw_only=True, forbid_unknown_fields=True):
    prompt: _TextOrList
    max_tokens: _TokensOrNone | None = None
    echo: bool | None = None
    best_of: int | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    suffix: str | None = None


class ChatRequest(Sampling, kw_only=True, forbid_unknown_fields=True):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    max_completion_tokens: _Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    modalities: list[str] | None = None
    verbosity: Any = None
    prediction: Any = None


class TextsRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of all requests for values of texts."""

    model: str
    priority: _Count | None = None
    timeout: _Count | None = None
    user: Any = None


class EmbeddingRequest(TextsRequest, kw_only=True, forbid_unknown_fields=True):
    input: _TextOrList
    encoding_format: str | None = None
    dimensions: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None


_completion = msgspec.json.Decoder(CompletionRequest)
_chat = msgspec.json.Decoder(ChatRequest)
_embedding = msgspec.json.Decoder(EmbeddingRequest)


def completion(text: bytes) -> CompletionRequest:
    request = decoded(_completion, text)
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise BadParameter("best_of", "'best_of' is not supported, unless it is equal to 'n'")
    if request.echo and request.logprobs is not None:
        if request.stream:
            raise BadParameter("echo", "'echo' together with 'logprobs' is not possible with 'stream'")
        if request.prompt_logprobs is None:
            request.prompt_logprobs = request.logprobs
    _check(request)
    return request


def chat(text: bytes) -> ChatRequest:
    request = decoded(_chat, text)
    _replace_functions(request)
    check_chat(request)
    return request


def _replace_functions(request: ChatRequest) -> None:
    """Functions are what tools were first: a request has their calls and results without ids, and one call at most."""
    functions, choice = request.functions, request.function_call
    if functions is None and choice is not None:
        raise BadParameter("function_call", "'function_call' needs 'functions'")
    if functions is not None:
        if request.tools is not None or request.tool_choice is not None:
            raise BadParameter("functions", "'functions' is not possible with 'tools' or 'tool_choice'")
        request.tools = [{"type": "function", "function": function} for function in functions]
        request.tool_choice = {"type": "function", "function": choice} if isinstance(choice, dict) else choice
        request.parallel_tool_calls = False
    call_id = "call_0"
    for number, message in enumerate(request.messages):
        if message.get("function_call") is not None:
            call_id = f"call_{number}"
            message["tool_calls"] = [{"id": call_id, "type": "function", "function": message.pop("function_call")}]
        elif message.get("role") == "function":
            message |= {"role": "tool", "tool_call_id": call_id}


def check_chat(request: ChatRequest) -> None:
    if not request.messages:
        raise BadParameter("messages", "'messages' is empty; expected at least one message")
    for number, message in enumerate(request.messages):
        _check_message(f"messages[{number}]", message)
    if request.top_logprobs is not None and not request.logprobs:
        raise BadParameter("top_logprobs", "'top_logprobs' needs 'logprobs' to be true")
    if any(kind != "text" for kind in request.modalities or ()):
        raise BadParameter("modalities", "the only supported modality is 'text'")
    if request.continue_final_message and (
        request.add_generation_prompt or request.messages[-1]["role"] != "assistant"
    ):
        raise BadParameter(
            "continue_final_message",
            "'continue_final_message' needs a last message of the assistant, without 'add_generation_prompt'",
        )
    _check(request)


def embedding(text: bytes) -> EmbeddingRequest:
    request = decoded(_embedding, text)
    if request.encoding_format not in (None, "float", "base64"):
        raise BadParameter(
            "encoding_format", f"'encoding_format' is {request.encoding_format[:40]!r}; expected 'float' or 'base64'"
        )
    return request


def max_tokens(request: Sampling) -> int | None:
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        return request.max_completion_tokens
    return 1 if request.max_tokens == 0 else request.max_tokens  # engines generate at least one


def sampling(request: Sampling) -> dict[str, Any]:
    """The sampling parameters, without those that are not set."""
    sampled: dict[str, Any] = {name: value for name in _SAMPLED if (value := getattr(request, name)) is not None}
    for name in request.sampling_parameters or {}:
        if name in _OWN:
            raise BadParameter("sampling_parameters", f"'{name}' must be a field of the request itself")
    if request.structured_outputs is not None:  # a string: request parameters cannot be objects
        sampled["structured_outputs"] = msgspec.json.encode(request.structured_outputs).decode()
    return sampled | (request.sampling_parameters or {})


def demanded_calls(request: ChatRequest) -> ForcedCalls | None:
    """The tool calls that the response must consist of; None: the model decides."""
    try:
        return forced_calls(request.tools, request.tool_choice, request.parallel_tool_calls)
    except InvalidRequest as error:
        raise BadParameter("tools" if error.message.startswith("'tools") else "tool_choice", error.message) from None


def request_options(request_id: str, request: Sampling | TextsRequest) -> RequestOptions:
    """The options that the server itself interprets: priority in the queue, and queue timeout in microseconds."""
    extra = {"priority": request.priority, "timeout": request.timeout}
    return options_of(request_id, {name: value for name, value in extra.items() if value is not None})


def texts_or_tokens(param: str, items: str | list[Any], limit: int) -> tuple[list[str], list[list[int]]]:
    """A prompt or input: texts, or lists of token ids. One of the two lists is empty."""
    if isinstance(items, str):
        return [items], []
    if not items:
        raise BadParameter(param, f"'{param}' is an empty list")
    if _is_tokens(items):
        return [], [items]
    if len(items) > limit:
        raise BadParameter(param, f"'{param}' has {len(items)} elements; the limit is {limit}")
    if all(type(one) is str for one in items):
        return items, []
    if all(type(one) is list and one and _is_tokens(one) for one in items):
        return [], items
    text = f"'{param}' is neither a string, a list of strings, a list of token ids, nor a list of such lists"
    raise BadParameter(param, text)


def _is_tokens(items: list[Any]) -> bool:
    return all(type(one) is int and 0 <= one < 2**31 for one in items)


def _check(request: Sampling) -> None:
    if request.stream_options is not None and not request.stream:
        raise BadParameter("stream_options", "'stream_options' needs 'stream' to be true")
    if request.prompt_logprobs is not None and request.stream:
        raise BadParameter("prompt_logprobs", "'prompt_logprobs' is not possible with 'stream'")
    match request.response_format:
        case {"type": "json_object", "schema": dict(schema)}:  # of llama-server
            request.response_format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    if request.response_format is not None and request.structured_outputs is not None:
        raise BadParameter("structured_outputs", "'structured_outputs' is not possible with 'response_format'")
    if request.logit_bias is not None and not all(token.isdecimal() for token in request.logit_bias):
        raise BadParameter("logit_bias", "the keys of 'logit_bias' must be token ids")
    if request.stop == "" or (isinstance(request.stop, list) and "" in request.stop):
        raise BadParameter("stop", "'stop' contains an empty string")


def text_parts(where: str, content: Any, kinds: Collection[str], image: str = "") -> str | list[dict[str, Any]]:
    """The content of a message of a chat, from a text or parts of these types. `image`: the type of images, if they are
    allowed."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadParameter(where, f"'{where}' is neither a string nor a list")
    parts: list[dict[str, Any]] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else part
        if image and kind == image:
            parts.append(part)
        elif isinstance(part, dict) and kind in kinds and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        else:
            allowed = "texts and images" if image else "texts"
            text = f"'{where}' has a part of the type {str(kind)[:40]!r}; only {allowed} are supported"
            raise BadParameter(where, text)
    return parts


def _check_message(param: str, message: dict[str, Any]) -> None:
    if type(message.get("role")) is not str:
        raise BadParameter(f"{param}.role", f"'{param}.role' is not a string")
    if message["role"] == "developer":  # which few chat templates know
        message["role"] = "system"
    if "reasoning" in message:  # of vLLM and ollama
        message.setdefault("reasoning_content", message.pop("reasoning"))
    content = message.get("content")
    if not (content is None or type(content) is str or type(content) is list):
        raise BadParameter(f"{param}.content", f"'{param}.content' is neither a string nor a list")


def converted(fields: Mapping[str, Any], kind: type[_T]) -> _T:
    """A request from the texts of a form."""
    try:
        return msgspec.convert(fields, kind, strict=False)
    except msgspec.ValidationError as error:
        raise _explained(str(error)) from None


def decoded(decoder: msgspec.json.Decoder[_T], text: bytes) -> _T:
    check_depth(text)
    try:
        return decoder.decode(text)
    except msgspec.ValidationError as error:
        raise _explained(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise unreadable(error) from None


def _explained(text: str) -> BadParameter:
    unknown = _UNKNOWN.match(text)
    if unknown is not None:
        name = unknown[1][:80]
        return BadParameter(name, f"Unrecognized request argument supplied: {name}", "unknown_parameter")
    place = _FIELD.search(text)
    if place is None:
        return BadParameter(None, f"Invalid request: {text}")
    return BadParameter(place[1], f"Invalid value for '{place[1]}': {text[: place.start()]}")


def check_scalars(values: Mapping[str, Any]) -> None:
    """Used for models that get sampling parameters as request parameters, which cannot be lists."""
    for name, value in values.items():
        if type(value) not in (str, int, float, bool):
            raise BadParameter(name, f"the model has no input 'sampling_parameters', which '{name[:80]}' needs")
