"""Converts a request's tensors to the engine's request, and determines what its responses contain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, Struct

from shmserve.errors import InvalidRequest
from shmserve.llm.tool_choice import ForcedCalls, forced_calls
from shmserve.workers.backends.llamacpp.sampling import (
    TEXT_MAX_TOKENS,
    Sampling,
    engine_parameters,
    merged,
    sampling_in,
    sampling_of,
)
from shmserve.workers.backends.llamacpp.schemas import check_chat, check_schema

if TYPE_CHECKING:
    from shmserve.workers.backends.llamacpp.settings import Settings

PROMPT, MESSAGES, TOKENS, SAMPLING = "text_input", "messages", "prompt_token_ids", "sampling_parameters"
STREAM, EXCLUDE = "stream", "exclude_input_in_output"
IMAGE = "image"
RETURNED = {
    "return_finish_reason": "finish_reason",
    "return_cumulative_logprob": "cumulative_logprob",
    "return_logprobs": "logprobs",
    "return_token_ids": "token_ids",
    "return_num_input_tokens": "num_input_tokens",
    "return_num_output_tokens": "num_output_tokens",
}
"""Input -> the output that it requests."""
_SCORED = frozenset({"cumulative_logprob", "logprobs", "token_ids"})
"""Outputs for which the engine has to return log probabilities."""
_CHAT = (
    "messages",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
)
_OWN = frozenset({STREAM, EXCLUDE, *RETURNED})
_RESERVED = "triton_"
_encode = msgspec.json.Encoder().encode


class Generation(Struct):
    """A request to the engine. `chat`: it contains messages. `prefix`: the prompt, if texts begin with it. `top`:
    number of alternatives for each token. `returned`: optional outputs."""

    chat: bool
    body: bytes
    count: int
    stream: bool
    prefix: str
    top: int
    returned: tuple[str, ...]
    forced: ForcedCalls | None = None
    """Tool calls that the texts must consist of."""


def generation_of(inputs: Mapping[str, Any], parameters: Mapping[str, Any], settings: Settings) -> Generation:
    """`inputs`: arrays by name, None for absent inputs. `parameters`: those of the request, which are sampling
    parameters if the input for these is absent."""
    stream = _flag(inputs, parameters, STREAM)
    returned = tuple(output for name, output in RETURNED.items() if _flag(inputs, parameters, name))
    body: dict[str, Any] = {"stream": True, "return_progress": True, "cache_prompt": settings.prompt_cache}
    body["repeat_last_n"] = settings.context  # penalties apply to all tokens of a sequence
    messages, tokens = inputs.get(MESSAGES), inputs.get(TOKENS)
    chat = messages is not None
    sampling = merged(settings.sampling, _sampling(inputs.get(SAMPLING), parameters))
    limit = settings.max_tokens or (0 if chat else TEXT_MAX_TOKENS)
    body |= engine_parameters(sampling, limit, settings.grammars)
    top = sampling.logprobs or 0
    scored = not _SCORED.isdisjoint(returned)
    prefix, forced = "", None
    if messages is not None:
        chat_body, forced = chat_in(text_in(messages, MESSAGES), inputs.get(IMAGE))
        body |= {**chat_body, "reasoning_format": "none"}
        body |= {"logprobs": True, "top_logprobs": max(1, top)} if scored else {}
    else:
        if tokens is not None and tokens.size:
            body["prompt"] = tokens.tolist()
        else:
            body["prompt"] = text_in(inputs[PROMPT], PROMPT)
            prefix = _prefix(inputs, parameters, stream, body["prompt"])
        body |= {"logprobs": max(1, top)} if scored else {}
        if not body["prompt"]:
            raise InvalidRequest(f"input '{PROMPT}' is empty; give a prompt, or the input '{MESSAGES}'")
    count = 1 if sampling.n is UNSET else sampling.n
    if count > settings.slots:
        raise InvalidRequest(
            f"'n' is {count}, and the model runs at most {settings.slots} sequences at once; its parameter 'slots' "
            "sets this number"
        )
    if count > 1:
        body["n"] = count
    return Generation(chat, _encode(body), count, stream, prefix, top, returned, forced)


def _sampling(given: Any, parameters: Mapping[str, Any]) -> Sampling:
    if given is not None:
        return sampling_in(text_in(given, SAMPLING))
    own = {name: value for name, value in parameters.items() if name not in _OWN and not name.startswith(_RESERVED)}
    return sampling_of(own, "parameters of the request") if own else Sampling()


def _prefix(inputs: Mapping[str, Any], parameters: Mapping[str, Any], stream: bool, prompt: str) -> str:
    given = inputs.get(EXCLUDE) is not None or EXCLUDE in parameters
    exclude = _flag(inputs, parameters, EXCLUDE) if given else stream
    if stream and not exclude:
        raise InvalidRequest("When streaming, `exclude_input_in_output` = False is not allowed.")
    return "" if exclude else prompt


def _flag(inputs: Mapping[str, Any], parameters: Mapping[str, Any], name: str) -> bool:
    array = inputs.get(name)
    if array is not None:
        return bool(array.reshape(-1)[0])
    value = parameters.get(name, False)
    return value.lower() in ("true", "1") if isinstance(value, str) else bool(value)


def text_in(array: Any, name: str) -> str:
    raw: bytes = array.reshape(-1)[0]
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise InvalidRequest(f"input '{name}' is not UTF-8") from None


def chat_in(text: str, images: Any = None) -> tuple[dict[str, Any], ForcedCalls | None]:
    """`images`: the array of those in the chat, in base64."""
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"input '{MESSAGES}' is not JSON: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("messages"), list):
        raise InvalidRequest(f"input '{MESSAGES}' must be a JSON object with a list 'messages'")
    unknown = sorted(found.keys() - set(_CHAT))
    if unknown:
        raise InvalidRequest(f"input '{MESSAGES}' has '{unknown[0][:80]}'; known are: {', '.join(_CHAT)}")
    check_chat(found)
    _place_images(found["messages"], [] if images is None else images.reshape(-1).tolist())
    forced = forced_calls(found.get("tools"), found.get("tool_choice"), found.get("parallel_tool_calls"))
    if forced is not None:  # the engine does not enforce `tool_choice`, but a schema
        check_schema(forced.schema, "the schema of the tool calls")
        del found["tool_choice"]
        found["response_format"] = {"type": "json_schema", "json_schema": {"schema": forced.schema}}
    body = {name: value for name, value in found.items() if value is not None}
    if body.get("continue_final_message"):
        body.setdefault("add_generation_prompt", False)
    return body, forced


def _place_images(messages: list[Any], images: list[bytes]) -> None:
    """Puts the images in the places of the parts {"type": "image"}. Parts that refer to other files are refused: the
    engine would read them, or fetch them from other hosts."""
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    remaining = iter(images)
    for content in [content for content in contents if isinstance(content, list)]:
        for number, part in enumerate(content):
            kind = part.get("type") if isinstance(part, dict) else part
            if kind == "image":
                image = next(remaining, None)
                if image is None:
                    raise InvalidRequest(f"input '{MESSAGES}' has more images than the input '{IMAGE}'")
                content[number] = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{_base64(image)}"}}
            elif kind != "text":
                raise InvalidRequest(f"input '{MESSAGES}' has a part of the type {str(kind)[:40]!r}")
    if next(remaining, None) is not None:
        raise InvalidRequest(f"input '{IMAGE}' has more images than the input '{MESSAGES}'")


def _base64(image: bytes) -> str:
    try:
        return image.decode("ascii")
    except UnicodeDecodeError:
        raise InvalidRequest(f"input '{IMAGE}' is not base64") from None
