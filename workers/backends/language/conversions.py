"""Requests to convert a prompt between text and tokens, instead of continuing it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec import Struct

from shmserve.errors import InvalidRequest
from shmserve.workers.backends.language.replies import Array, strings
from shmserve.workers.backends.language.requests import IMAGE, MESSAGES, PROMPT, TOKENS, chat_in, text_in

if TYPE_CHECKING:
    from shmserve.workers.backends.language.engine import Engine

TASK = "task"
_encode = msgspec.json.Encoder().encode


class Tokenization(Struct):
    """A request for the tokens of a prompt. `chat`: the prompt is made from it by the chat template."""

    text: str
    chat: dict[str, Any] | None

    def outputs(self, engine: Engine) -> list[tuple[str, Array]]:
        tokens = engine.tokens(self.text) if self.chat is None else engine.chat_tokens(self.chat)
        return [
            ("text_output", strings([""])),
            ("token_ids", strings([_encode(tokens)])),
            ("num_input_tokens", np.array([len(tokens)], np.uint32)),
            ("max_model_len", np.array([engine.limits.context], np.uint32)),
        ]


class Detokenization(Struct):
    """A request for the text of tokens."""

    tokens: list[int]

    def outputs(self, engine: Engine) -> list[tuple[str, Array]]:
        return [("text_output", strings([engine.text(self.tokens)]))]


def conversion_of(inputs: Mapping[str, Any]) -> Tokenization | Detokenization | None:
    """Returns the conversion; None if the request is for a generation."""
    if inputs.get(TASK) is None:
        return None
    messages, tokens = inputs.get(MESSAGES), inputs.get(TOKENS)
    match text_in(inputs[TASK], TASK):
        case "tokenize" if inputs.get(IMAGE) is not None:
            raise InvalidRequest("images have no tokens; tokenize the chat without them")
        case "tokenize":
            chat = None if messages is None else chat_in(text_in(messages, MESSAGES))[0]
            return Tokenization(text_in(inputs.get(PROMPT), PROMPT), chat)
        case "detokenize" if tokens is not None:
            return Detokenization(tokens.tolist())
        case "detokenize":
            raise InvalidRequest(f"the task 'detokenize' needs the input '{TOKENS}'")
        case other:
            raise InvalidRequest(f"input '{TASK}' is {other[:40]!r}; expected 'tokenize' or 'detokenize'")
