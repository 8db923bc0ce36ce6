"""Turns the steps of the engine for a request into responses of the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec import Struct

if TYPE_CHECKING:
    from shmserve.llm.tool_choice import CallReader
    from shmserve.workers.backends.language.engine import Step
    from shmserve.workers.backends.language.metrics import TextMetrics
    from shmserve.workers.backends.language.requests import GenerationRequest

Array = np.ndarray[Any, np.dtype[Any]]
THINKING = "reasoning_content"
"""The output with what the model thinks before its answer."""
NOT_FINISHED = "None"
"""The finish reason of a text that has not ended, as in vLLM's backend."""
_encode = msgspec.json.Encoder().encode


class Text(Struct, eq=False):
    """The unsent output of one of a request's texts."""

    forced: CallReader | None
    """Reads the tool calls that the text consists of."""
    parts: list[str] = []
    thoughts: list[str] = []
    calls: list[Any] = []
    scores: list[dict[str, Any]] = []
    ids: list[int] = []
    tokens: int = 0
    cumulative: float = 0.0
    finish: str = NOT_FINISHED
    stop: str = ""

    def clear(self) -> None:
        """Called when the output has been sent."""
        self.parts, self.thoughts, self.calls, self.scores, self.ids = [], [], [], [], []
        self.tokens = 0


class GenerationReply:
    """Collects steps into responses: one for each step with output if the request is streamed, otherwise one at the
    end. `measured`: the counts of each text; empty without metrics."""

    def __init__(self, generation: GenerationRequest, measured: Sequence[TextMetrics]) -> None:
        self._generation = generation
        forced = generation.forced
        self._texts = [Text(None if forced is None else forced.reader()) for _ in range(generation.count)]
        self._open = generation.count
        self.prompt_tokens = 0
        """0: not known yet."""
        self._cached = 0
        """Tokens of the prompt that were in the engine's cache. 0: not known before the first text ends."""
        self._prompt_scores: list[dict[str, Any] | None] | None = None
        """Until they are sent."""
        self._measured = measured

    def ended(self, reason: str) -> None:
        """Ends the measurements. `reason`: why texts were stopped that the engine has not finished."""
        for text, measured in zip(self._texts, self._measured, strict=False):
            measured.ended(reason if reason and text.finish == NOT_FINISHED else text.finish)

    @property
    def complete(self) -> bool:
        """Whether all texts have ended."""
        return self._open == 0

    def add(self, step: Step) -> bool:
        """Returns whether a response is due."""
        text = self._texts[step.index]
        measured = self._measured[step.index] if self._measured else None
        if step.prompt:
            self.prompt_tokens = step.prompt
            for one in self._measured:
                one.prompted(step.prompt)
        if step.prompt_scores is not None:
            self._prompt_scores = step.prompt_scores
        content, calls = step.text, step.calls
        if content and text.forced is not None:
            content, calls = "", text.forced.feed(content)
        if content:
            text.parts.append(content)
        if step.thought:
            text.thoughts.append(step.thought)
        if calls:
            text.calls = _with(text.calls, calls)
        text.tokens += step.generated
        text.ids += step.ids
        text.scores += step.scores
        text.cumulative += step.logprob
        if measured is not None and step.generated:
            measured.generated(step.generated)
        if step.finish:
            text.finish, text.stop = step.finish, step.stop
            self._open -= 1
            if step.index == 0:  # the texts after it share its prompt
                self._cached = step.cached
            if measured is not None:
                measured.finished(step.cached)
        due = bool(content or step.thought or calls or step.finish)
        return due and (self._generation.stream or self.complete)

    def outputs(self) -> list[tuple[str, Array]]:
        """The outputs of a response, with all unsent output."""
        texts, prefix = self._texts, self._generation.prefix
        outputs = [("text_output", strings([prefix + "".join(text.parts) for text in texts]))]
        if any(text.thoughts for text in texts):
            outputs.append((THINKING, strings(["".join(text.thoughts) for text in texts])))
        if any(text.calls for text in texts):
            outputs.append(("tool_calls", strings([_encode(text.calls) for text in texts])))
        outputs += [(name, self._optional(name)) for name in self._generation.returned]
        if self._prompt_scores is not None:
            outputs.append(("prompt_logprobs", strings([_encode(self._prompt_scores)] * len(texts))))
            self._prompt_scores = None
        for text in texts:
            text.clear()
        return outputs

    def _optional(self, name: str) -> Array:
        texts = self._texts
        match name:
            case "finish_reason":
                return strings([text.finish for text in texts])
            case "stop_reason":
                return strings([text.stop for text in texts])
            case "cumulative_logprob":
                return np.array([text.cumulative for text in texts], np.float32)
            case "logprobs":
                return strings([_encode(text.scores) for text in texts])
            case "token_ids":
                return strings([_encode(text.ids) for text in texts])
            case "num_input_tokens":
                return np.array([self.prompt_tokens], np.uint32)
            case "num_cached_tokens":
                return np.array([self._cached], np.uint32)
            case _:
                return np.array([text.tokens for text in texts], np.uint32)


def strings(values: list[Any]) -> Array:
    array = np.empty(len(values), np.object_)
    array[:] = values
    return array


def _with(calls: list[Any], more: list[Any]) -> list[Any]:
    """Merges pieces of tool calls by the index of the call."""
    merged = list(calls)
    for piece in more:
        same = next((one for one in merged if one.get("index") == piece.get("index")), None)
        if same is None:
            merged.append({**piece, "function": dict(piece.get("function") or {})})
            continue
        function = same["function"]
        for name, value in (piece.get("function") or {}).items():
            function[name] = function.get(name, "") + value if name == "arguments" else value
        same |= {name: value for name, value in piece.items() if name not in ("function", "index")}
    return merged
