"""Reads a request's tensors, and determines what its responses contain."""

from __future__ import annotations

import binascii
import re
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, Struct
from msgspec.structs import replace

from shmserve.errors import InvalidRequest
from shmserve.llm.tool_choice import ForcedCalls, forced_calls
from shmserve.workers.backends.language.image_headers import KNOWN, pixels_in
from shmserve.workers.backends.language.sampling import (
    TEXT_MAX_TOKENS,
    SamplingParameters,
    check_supported,
    merged,
    sampling_in,
    sampling_of,
)

if TYPE_CHECKING:
    from shmserve.workers.backends.language.sampling import Defaults

PROMPT, MESSAGES, TOKENS, SAMPLING = "text_input", "messages", "prompt_token_ids", "sampling_parameters"
SUFFIX = "suffix"
STREAM, EXCLUDE = "stream", "exclude_input_in_output"
IMAGE = "image"
PIXELS = 64 << 20
"""Maximum number of pixels of all images of a chat together. The engine decodes them all before it looks at one."""
_BASE64 = re.compile(rb"[A-Za-z0-9+/]*={0,2}")
RETURNED = {
    "return_finish_reason": "finish_reason",
    "return_stop_reason": "stop_reason",
    "return_cumulative_logprob": "cumulative_logprob",
    "return_logprobs": "logprobs",
    "return_token_ids": "token_ids",
    "return_num_input_tokens": "num_input_tokens",
    "return_num_output_tokens": "num_output_tokens",
    "return_num_cached_tokens": "num_cached_tokens",
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


class GenerationRequest(Struct, frozen=True):
    """A request to the engine, for a prompt or a chat. `prefix`: the prompt, if texts begin with it. `suffix`: what
    follows the text, which fills in the middle. `returned`: optional outputs."""

    sampling: SamplingParameters
    count: int
    stream: bool
    returned: tuple[str, ...]
    prompt: str | list[int] = ""
    chat: dict[str, Any] | None = None
    prefix: str = ""
    suffix: str = ""
    forced: ForcedCalls | None = None
    """Tool calls that the texts must consist of. The chat then has a `response_format` that demands them."""

    @property
    def scored(self) -> bool:
        """True if the engine has to return log probabilities."""
        return not _SCORED.isdisjoint(self.returned)


def generation_of(
    inputs: Mapping[str, Any], parameters: Mapping[str, Any], defaults: Defaults, slots: int
) -> GenerationRequest:
    """`inputs`: arrays by name, None for absent inputs. `parameters`: those of the request, which are sampling
    parameters if the input for these is absent."""
    stream = _flag(inputs, parameters, STREAM)
    returned = tuple(output for name, output in RETURNED.items() if _flag(inputs, parameters, name))
    messages, tokens = inputs.get(MESSAGES), inputs.get(TOKENS)
    suffix = inputs.get(SUFFIX)
    if suffix is not None and messages is not None:
        raise InvalidRequest(f"input '{SUFFIX}' is for prompts, and not for input '{MESSAGES}'")
    sampling = merged(defaults.sampling, _sampling(inputs.get(SAMPLING), parameters))
    if messages is not None:
        sampling = merged(defaults.chat, sampling)
    check_supported(sampling, defaults)
    if not sampling.max_tokens:
        limit = defaults.max_tokens or (TEXT_MAX_TOKENS if messages is None else None)
        sampling = replace(sampling, max_tokens=limit)
    count = 1 if sampling.n is UNSET else sampling.n
    if count > slots:
        raise InvalidRequest(
            f"'n' is {count}, and the model runs at most {slots} sequences at once; its parameter 'slots' sets this "
            "number"
        )
    generation = partial(GenerationRequest, sampling, count, stream, returned)
    if messages is not None:
        chat, forced = chat_in(text_in(messages, MESSAGES), inputs.get(IMAGE))
        return generation(chat=chat, forced=forced)
    following = text_in(suffix, SUFFIX)
    if tokens is not None and tokens.size:
        return generation(tokens.tolist(), suffix=following)
    text = text_in(inputs.get(PROMPT), PROMPT)
    prefix = _prefix(inputs, parameters, stream, text)
    if not (text or following):
        raise InvalidRequest(f"input '{PROMPT}' is empty; give a prompt, or the input '{MESSAGES}'")
    return generation(text, prefix=prefix, suffix=following)


def _sampling(array: Any, parameters: Mapping[str, Any]) -> SamplingParameters:
    if array is not None:
        return sampling_in(text_in(array, SAMPLING))
    own = {name: value for name, value in parameters.items() if name not in _OWN and not name.startswith(_RESERVED)}
    return sampling_of(own, "parameters of the request") if own else SamplingParameters()


def _prefix(inputs: Mapping[str, Any], parameters: Mapping[str, Any], stream: bool, prompt: str) -> str:
    is_set = inputs.get(EXCLUDE) is not None or EXCLUDE in parameters
    exclude = _flag(inputs, parameters, EXCLUDE) if is_set else stream
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
    """Returns the text of an input; "" if it is absent."""
    raw: bytes = b"" if array is None else array.reshape(-1)[0]
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise InvalidRequest(f"input '{name}' is not UTF-8") from None


def chat_in(text: str, images: Any = None) -> tuple[dict[str, Any], ForcedCalls | None]:
    """`images`: the array of those in the chat, in base64."""
    try:
        chat = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"input '{MESSAGES}' is not JSON: {error}") from None
    if not isinstance(chat, dict) or not isinstance(chat.get("messages"), list):
        raise InvalidRequest(f"input '{MESSAGES}' must be a JSON object with a list 'messages'")
    unknown = sorted(chat.keys() - set(_CHAT))
    if unknown:
        raise InvalidRequest(f"input '{MESSAGES}' has '{unknown[0][:80]}'; known are: {', '.join(_CHAT)}")
    _place_images(chat["messages"], [] if images is None else images.reshape(-1).tolist())
    forced = forced_calls(chat.get("tools"), chat.get("tool_choice"), chat.get("parallel_tool_calls"))
    if forced is not None:  # engines do not enforce `tool_choice`, but a schema
        del chat["tool_choice"]
        chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": forced.schema}}
    body = {name: value for name, value in chat.items() if value is not None}
    if body.get("continue_final_message"):
        body.setdefault("add_generation_prompt", False)
    return body, forced


def _place_images(messages: list[Any], images: list[bytes]) -> None:
    """Puts the images in the places of the parts {"type": "image"}. Parts that refer to other files are refused: the
    engine would read them, or fetch them from other hosts."""
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    remaining = iter(images)
    pixels = 0
    for content in [content for content in contents if isinstance(content, list)]:
        for number, part in enumerate(content):
            kind = part.get("type") if isinstance(part, dict) else part
            if kind == "image":
                image = next(remaining, None)
                if image is None:
                    raise InvalidRequest(f"input '{MESSAGES}' has more images than the input '{IMAGE}'")
                pixels += _pixels(image)
                if pixels > PIXELS:
                    text = f"the images of a chat have {pixels} pixels or more; the limit is {PIXELS}"
                    raise InvalidRequest(text)
                url = f"data:image/png;base64,{image.decode()}"
                content[number] = {"type": "image_url", "image_url": {"url": url}}
            elif kind != "text":
                raise InvalidRequest(f"input '{MESSAGES}' has a part of the type {str(kind)[:40]!r}")
    if next(remaining, None) is not None:
        raise InvalidRequest(f"input '{IMAGE}' has more images than the input '{MESSAGES}'")


def _pixels(image: bytes) -> int:
    try:
        if _BASE64.fullmatch(image) is None:
            raise InvalidRequest(f"input '{IMAGE}' is not base64")
        return pixels_in(binascii.a2b_base64(image + b"=" * (-len(image) % 4)))
    except binascii.Error:
        raise InvalidRequest(f"input '{IMAGE}' is not base64") from None
    except ValueError as error:
        raise InvalidRequest(f"an image is not a {KNOWN} file that can be read: {error}") from None
