"""Converts the engine's output for a request into responses of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec import Struct

from shmserve.errors import InvalidRequest, ModelFailed, ServeError, Unavailable

if TYPE_CHECKING:
    from shmserve.llm.tool_choice import CallReader
    from shmserve.workers.backends.language_metrics import TextMetrics
    from shmserve.workers.backends.llamacpp.requests import Generation

Array = np.ndarray[Any, np.dtype[Any]]
NOT_FINISHED = "None"
"""The finish reason of a text that has not ended, as in vLLM's backend."""


class Alternative(Struct):
    id: int
    token: str
    logprob: float


class Token(Alternative):
    top_logprobs: list[Alternative] = []


class Logprobs(Struct):
    content: list[Token] | None = None


class Delta(Struct):
    content: str | None = None
    tool_calls: list[Any] | None = None


class Choice(Struct):
    """`text` of a prompt that was continued, `delta` of a chat."""

    index: int = 0
    text: str = ""
    delta: Delta | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None


class Progress(Struct):
    total: int


class Timings(Struct):
    """Token counts: prompt tokens computed and found in the cache, and output tokens."""

    prompt_n: int = 0
    cache_n: int = 0
    predicted_n: int = 0


class EngineError(Struct):
    message: str = ""
    code: int = 500
    type: str = ""


class Piece(Struct):
    choices: list[Choice] = []
    prompt_progress: Progress | None = None
    timings: Timings | None = None
    error: EngineError | None = None


_decode = msgspec.json.Decoder(Piece).decode
_encode = msgspec.json.Encoder().encode


def piece_of(data: bytes) -> Piece:
    """Parses a piece. Raises the engine's error, or ModelFailed if the piece cannot be parsed."""
    try:
        piece = _decode(data)
    except msgspec.DecodeError as error:
        raise ModelFailed(f"llama.cpp sent what cannot be read: {error}") from error
    if piece.error is not None:
        raise _error(piece.error)
    return piece


def _error(error: EngineError) -> ServeError:
    text = " ".join(error.message.split()).rstrip(".")
    if error.type == "exceed_context_size_error":
        return InvalidRequest(f"{text}: the parameter context_length of the model sets it")
    if error.code == 503:
        return Unavailable(text)
    return InvalidRequest(text) if 400 <= error.code < 500 else ModelFailed(text)


class Text:
    """The unsent output of one of a request's texts."""

    __slots__ = ("calls", "cumulative", "finish", "forced", "ids", "parts", "scores", "sent", "tokens")

    def __init__(self, forced: CallReader | None) -> None:
        self.forced = forced
        """Reads the tool calls that the text consists of."""
        self.parts: list[str] = []
        self.calls: list[Any] = []
        self.scores: list[dict[str, Any]] = []
        self.ids: list[int] = []
        self.tokens = 0
        self.sent = 0
        """Number of tokens sent."""
        self.cumulative = 0.0
        self.finish = NOT_FINISHED

    def clear(self) -> None:
        """Called when the output has been sent."""
        self.parts, self.calls, self.scores, self.ids = [], [], [], []
        self.sent += self.tokens
        self.tokens = 0


class Reply:
    """Collects pieces into responses: one for each piece with output if the request is streamed, otherwise one at the
    end."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        forced = generation.forced
        self._texts = [Text(None if forced is None else forced.reader()) for _ in range(generation.count)]
        self._open = generation.count
        self._prompt_tokens = 0
        self._measured: list[TextMetrics] = []

    def measure(self, texts: list[TextMetrics]) -> None:
        self._measured = texts

    def ended(self, reason: str) -> None:
        for text, measured in zip(self._texts, self._measured, strict=False):
            measured.ended(reason or text.finish)

    @property
    def complete(self) -> bool:
        """Whether all texts have ended."""
        return self._open == 0

    def add(self, piece: Piece) -> bool:
        """Returns whether a response is due."""
        due = False
        if piece.prompt_progress is not None:
            self._prompt_tokens = piece.prompt_progress.total
            for measured in self._measured:
                measured.prompted(self._prompt_tokens)
        for choice in piece.choices:
            due = self._add(choice, piece) or due
        return due and (self._generation.stream or self.complete)

    def _add(self, choice: Choice, piece: Piece) -> bool:
        text = self._texts[choice.index]
        delta = choice.delta
        content = choice.text if delta is None else delta.content or ""
        calls = delta.tool_calls if delta is not None else None
        tokens = choice.logprobs.content if choice.logprobs is not None else None
        generated = 1 if content or calls else 0
        if content and text.forced is not None:
            content, calls = "", text.forced.feed(content)
        if content:
            text.parts.append(content)
        if calls:
            text.calls = _with(text.calls, calls)
        if tokens:
            self._score(text, tokens)
        measured = self._measured[choice.index] if self._measured else None
        if choice.finish_reason is None:
            if measured is not None and generated:
                measured.generated(1)
            text.tokens += generated
            return bool(content or calls)
        text.finish = choice.finish_reason
        self._open -= 1
        if piece.timings is not None:  # also tokens without a piece: the end mark, a stop text
            text.tokens = piece.timings.predicted_n - text.sent
            self._prompt_tokens = piece.timings.prompt_n + piece.timings.cache_n
            if measured is not None:
                measured.prompted(self._prompt_tokens)
                measured.finished(piece.timings.predicted_n, piece.timings.cache_n)
        return True

    def _score(self, text: Text, tokens: list[Token]) -> None:
        top = self._generation.top
        for token in tokens:
            text.ids.append(token.id)
            text.cumulative += token.logprob
            ranks = {other.id: rank for rank, other in enumerate(token.top_logprobs, 1)}
            found = {str(token.id): _described(token, ranks.get(token.id, len(ranks) + 1))}
            for rank, other in enumerate(token.top_logprobs[:top], 1):
                found.setdefault(str(other.id), _described(other, rank))
            text.scores.append(found)

    def outputs(self) -> list[tuple[str, Array]]:
        """The outputs of a response, with all unsent output."""
        returned, texts = self._generation.returned, self._texts
        prefix = self._generation.prefix
        found = [("text_output", strings([prefix + "".join(text.parts) for text in texts]))]
        if any(text.calls for text in texts):
            found.append(("tool_calls", strings([_encode(text.calls) for text in texts])))
        found += [(name, self._optional(name)) for name in returned]
        for text in texts:
            text.clear()
        return found

    def _optional(self, name: str) -> Array:
        texts = self._texts
        match name:
            case "finish_reason":
                return strings([text.finish for text in texts])
            case "cumulative_logprob":
                return np.array([text.cumulative for text in texts], np.float32)
            case "logprobs":
                return strings([_encode(text.scores) for text in texts])
            case "token_ids":
                return strings([_encode(text.ids) for text in texts])
            case "num_input_tokens":
                return np.array([self._prompt_tokens], np.uint32)
            case _:
                return np.array([text.tokens for text in texts], np.uint32)


def strings(values: list[Any]) -> Array:
    array = np.empty(len(values), np.object_)
    array[:] = values
    return array


def _described(token: Alternative, rank: int) -> dict[str, Any]:
    return {"logprob": token.logprob, "rank": rank, "decoded_token": token.token}


def _with(calls: list[Any], more: list[Any]) -> list[Any]:
    """Merges pieces of tool calls by the index of the call."""
    found = list(calls)
    for piece in more:
        same = next((one for one in found if one.get("index") == piece.get("index")), None)
        if same is None:
            found.append({**piece, "function": dict(piece.get("function") or {})})
            continue
        function = same["function"]
        for name, value in (piece.get("function") or {}).items():
            function[name] = function.get(name, "") + value if name == "arguments" else value
        same |= {name: value for name, value in piece.items() if name not in ("function", "index")}
    return found
