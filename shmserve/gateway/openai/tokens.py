"""vLLM's /tokenize and /detokenize: a language model converts its prompt instead of continuing it."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from shmserve.gateway.kserve.answers import Buffer
from shmserve.gateway.openai import bodies
from shmserve.gateway.openai.bodies import ChatRequest, CompletionRequest
from shmserve.gateway.openai.errors import BadParameter
from shmserve.gateway.openai.formats import Choice
from shmserve.gateway.openai.texts import Delta, TokenUsage
from shmserve.gateway.upstream.exchange import JSON

PROMPT_BYTES = 1 << 20
"""Maximum size of a prompt that is converted: the tokens of the response are decoded at once."""
_encode = msgspec.json.Encoder().encode


class TokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """The tokens are those that the model sees, so that a client can only confirm `add_special_tokens`."""

    model: str
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    model: str
    tokens: Annotated[list[Annotated[int, Meta(ge=0, lt=2**31)]], Meta(min_length=1, max_length=bodies.VALUES)]


_tokenize = msgspec.json.Decoder(TokenizeRequest)
_detokenize = msgspec.json.Decoder(DetokenizeRequest)


def tokenize_request(text: bytes) -> CompletionRequest | ChatRequest:
    """The completion or chat whose prompt is converted."""
    request = bodies.decoded(_tokenize, text)
    if (request.prompt is None) == (request.messages is None):
        raise BadParameter("prompt", "either 'prompt' or 'messages' is required")
    if request.add_special_tokens not in (None, request.messages is None):
        raise BadParameter(
            "add_special_tokens", "'add_special_tokens' is supported as true for a prompt and false for messages only"
        )
    if request.prompt is not None:
        return CompletionRequest(model=request.model, prompt=request.prompt)
    chat = ChatRequest(
        model=request.model,
        messages=request.messages or [],
        tools=request.tools,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        chat_template_kwargs=request.chat_template_kwargs,
    )
    bodies.check_chat(chat)
    return chat


def detokenize_request(text: bytes) -> CompletionRequest:
    request = bodies.decoded(_detokenize, text)
    return CompletionRequest(model=request.model, prompt=request.tokens)


class TokenizeFormat:
    kind = JSON

    def __init__(self) -> None:
        self._count = 0
        self._tokens: list[Buffer] = []

    def add(self, choice: Choice, delta: Delta) -> int:
        if not delta.token_ids:
            return 0
        self._tokens += [b","] * bool(self._tokens) + [_encode(delta.token_ids)[1:-1]]
        self._count += len(delta.token_ids)
        return len(self._tokens[-1])

    def whole(self, choices: list[Choice], usage: TokenUsage) -> list[Buffer]:
        head = _encode({"count": self._count, "max_model_len": usage.context, "token_strs": None})
        return [head[:-1] + b',"tokens":[', *self._tokens, b"]}"]


class CountFormat:
    """The answer of the endpoints of Anthropic and OpenAI. `more`: fields besides the number."""

    kind = JSON

    def __init__(self, **more: str) -> None:
        self._more = more
        self._count = 0

    def add(self, choice: Choice, delta: Delta) -> int:
        self._count += len(delta.token_ids or ())
        return 0

    def whole(self, choices: list[Choice], usage: TokenUsage) -> list[Buffer]:
        return [_encode({**self._more, "input_tokens": self._count})]


class DetokenizeFormat:
    kind = JSON

    def add(self, choice: Choice, delta: Delta) -> int:
        return choice.add_text(delta.text)

    def whole(self, choices: list[Choice], usage: TokenUsage) -> list[Buffer]:
        return [b'{"prompt":"', *choices[0].texts, b'"}']
