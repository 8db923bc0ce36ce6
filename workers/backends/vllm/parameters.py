"""Converts a request to vLLM's sampling parameters and prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET

from shmserve.errors import InvalidRequest, Unsupported
from shmserve.workers.backends.language.sampling import SAMPLERS, biases_in, stops_in, structured_in
from shmserve.workers.backends.language.schemas import check_regex, check_schema

if TYPE_CHECKING:
    from shmserve.workers.backends.language.requests import GenerationRequest
    from shmserve.workers.backends.language.sampling import Defaults

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "detokenize": (True,),
    "truncate_prompt_tokens": (None,),
    **dict.fromkeys(SAMPLERS, ()),
}
_SAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
    "min_tokens",
    "stop_token_ids",
    "bad_words",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "prompt_logprobs",
)
"""Parameters that have the same name and values in the engine."""
STRUCTURED = ("json", "json_object", "choice", "grammar", "regex", "structural_tag")


def parameters_of(generation: GenerationRequest, defaults: Defaults) -> tuple[dict[str, Any], dict[str, Any]]:
    """The engine's sampling parameters, and those of its structured outputs."""
    sampling = generation.sampling
    values = {name: value for name in _SAME if (value := getattr(sampling, name)) not in (UNSET, None)}
    values.setdefault("max_tokens", None)  # as far as the context reaches
    values["n"] = generation.count
    if generation.count > 1 and values.get("temperature") == 0:  # which vLLM does not accept
        values |= {"temperature": 1.0, "top_k": 1}
    if stops := stops_in(sampling):
        values["stop"] = stops
    if biases := biases_in(sampling):
        values["logit_bias"] = biases
    if generation.scored:
        values["logprobs"] = sampling.logprobs or 0
    return values, _structured(generation, defaults)


def _structured(generation: GenerationRequest, defaults: Defaults) -> dict[str, Any]:
    wanted = structured_in(generation.sampling, defaults)
    form = generation.chat.get("response_format") if generation.chat is not None else None
    if form is not None:
        wanted = _format(form) or wanted
    if wanted is None:
        return {}
    name, value = wanted
    if name not in STRUCTURED:
        raise Unsupported(f"'structured_outputs' with '{name[:40]}' is not supported by the engine of this model")
    if name == "json":
        check_schema(value, "the schema of the text")
    elif name == "regex":
        check_regex(value, "the regular expression of the text")
    return {name: value}


def _format(form: Any) -> tuple[str, Any] | None:
    """What a `response_format` demands."""
    match form:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return "json_object", True
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return "json", schema
        case _:
            raise InvalidRequest("'response_format' must have the type text, json_object, or json_schema with a schema")


def messages_of(chat: dict[str, Any]) -> list[dict[str, Any]]:
    """Messages as chat templates expect them: with plain texts, and tool calls with objects as arguments."""
    return [_message(message) for message in chat["messages"]]


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise InvalidRequest("a message must be an object with a 'role'")
    content = message.get("content")
    converted = {**message, "content": _text(content) if isinstance(content, list) else content}
    if converted["content"] is not None and not isinstance(converted["content"], str):
        raise InvalidRequest("the 'content' of a message must be a text, or a list of parts")
    if message.get("tool_calls"):
        converted["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    return converted


def _text(parts: list[Any]) -> str:
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        raise Unsupported("the model takes parts of the type 'text' only")
    return "\n".join(map(str, texts))  # as vLLM's own server


def _call(call: Any) -> Any:
    try:
        function = call["function"]
        return {**call, "function": {**function, "arguments": msgspec.json.decode(function["arguments"] or "{}")}}
    except (KeyError, TypeError, msgspec.DecodeError):
        raise InvalidRequest("a tool call must have a 'function' with JSON as 'arguments'") from None
