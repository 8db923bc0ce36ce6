"""Reads the engine's output for a request: pieces of JSON, which become steps."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from shmserve.errors import InvalidRequest, ModelFailed, ServeError, Unavailable
from shmserve.workers.backends.language.engine import Step


class _Alternative(Struct):
    id: int
    token: str
    logprob: float


class _Token(_Alternative):
    top_logprobs: list[_Alternative] = []


class _Logprobs(Struct):
    content: list[_Token] | None = None


class _Delta(Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(Struct):
    """`text` of a prompt that was continued, `delta` of a chat."""

    index: int = 0
    text: str = ""
    delta: _Delta | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _Progress(Struct):
    total: int


class _Timings(Struct):
    """Token counts: prompt tokens computed and found in the cache, and output tokens."""

    prompt_n: int = 0
    cache_n: int = 0
    predicted_n: int = 0


class _EngineError(Struct):
    message: str = ""
    code: int = 500
    type: str = ""


class _Details(Struct):
    stopping_word: str = ""


class _Piece(Struct, rename={"details": "__verbose"}):
    """`details`: if the request asked for them."""

    choices: list[_Choice] = []
    prompt_progress: _Progress | None = None
    timings: _Timings | None = None
    error: _EngineError | None = None
    details: _Details | None = None


_decode = msgspec.json.Decoder(_Piece).decode


def _piece_of(data: bytes) -> _Piece:
    """Parses a piece. Raises the engine's error, or ModelFailed if the piece cannot be parsed."""
    try:
        piece = _decode(data)
    except msgspec.DecodeError as error:
        raise ModelFailed(f"llama.cpp sent what cannot be read: {error}") from error
    if piece.error is not None:
        raise _error(piece.error)
    return piece


def _error(error: _EngineError) -> ServeError:
    text = " ".join(error.message.split()).rstrip(".")
    if error.type == "exceed_context_size_error":
        return InvalidRequest(f"{text}: the parameter context_length of the model sets it")
    if error.code == 503:
        return Unavailable(text)
    return InvalidRequest(text) if 400 <= error.code < 500 else ModelFailed(text)


class Pieces:
    """Reads the pieces of one request. `top`: number of alternatives for each token. `texts`: number of texts.
    `thinks` false: a grammar has made the whole text, also what the engine takes for thinking."""

    def __init__(self, top: int, texts: int, thinks: bool = True) -> None:
        self._top = top
        self._thinks = thinks
        self._generated = [0] * texts

    def steps(self, data: bytes) -> list[Step]:
        """Raises the engine's error, or ModelFailed if the piece cannot be parsed."""
        piece = _piece_of(data)
        steps = [self._step(choice, piece) for choice in piece.choices]
        if piece.prompt_progress is not None:
            steps.append(Step(prompt=piece.prompt_progress.total))
        return steps

    def _step(self, choice: _Choice, piece: _Piece) -> Step:
        delta = choice.delta
        content = choice.text if delta is None else delta.content or ""
        calls = delta.tool_calls if delta is not None else None
        thought = "" if delta is None else delta.reasoning_content or ""
        if not self._thinks:
            thought, content = "", thought + content
        step = Step(choice.index, content, thought, calls, finish=choice.finish_reason or "")
        if choice.finish_reason is None:
            step.generated = 1 if content or step.thought or calls else 0
            self._generated[choice.index] += step.generated
        elif piece.timings is not None:  # also tokens without a piece: the end mark, a stop text
            step.generated = piece.timings.predicted_n - self._generated[choice.index]
            step.prompt = piece.timings.prompt_n + piece.timings.cache_n
            step.cached = piece.timings.cache_n
        if step.finish and piece.details is not None:
            step.stop = piece.details.stopping_word
        if choice.logprobs is not None and choice.logprobs.content:
            for token in choice.logprobs.content:
                step.ids.append(token.id)
                step.scores.append(self._score(token))
                step.logprob += token.logprob
        return step

    def _score(self, token: _Token) -> dict[str, Any]:
        ranks = {other.id: rank for rank, other in enumerate(token.top_logprobs, 1)}
        scores = {str(token.id): _described(token, ranks.get(token.id, len(ranks) + 1))}
        for rank, other in enumerate(token.top_logprobs[: self._top], 1):
            scores.setdefault(str(other.id), _described(other, rank))
        return scores


def _described(token: _Alternative, rank: int) -> dict[str, Any]:
    return {"logprob": token.logprob, "rank": rank, "decoded_token": token.token}
