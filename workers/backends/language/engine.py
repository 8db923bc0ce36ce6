"""The interface of an engine that runs language models in a loop of its own, which requests join and leave at any step.

The engine reports the steps of a request to its `Listener`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

if TYPE_CHECKING:
    from shmserve.workers.backends.language.requests import GenerationRequest
    from shmserve.workers.model_calls.coroutines import Coroutines


class Step(Struct):
    """What a step of the engine adds to one text of a request."""

    index: int = 0
    """The text."""
    text: str = ""
    thought: str = ""
    """What the model thinks before its answer to a chat, if the engine separates it."""
    calls: list[Any] | None = None
    """Pieces of tool calls."""
    generated: int = 0
    """Number of generated tokens."""
    ids: list[int] = []
    """The generated tokens, like the next two if the request wants log probabilities."""
    scores: list[dict[str, Any]] = []
    """For each token, an object as in vLLM: token -> `logprob`, `rank`, `decoded_token`."""
    logprob: float = 0.0
    """Sum of the log probabilities of the tokens."""
    finish: str = ""
    """Why the text has ended; "": it has not."""
    stop: str = ""
    """The text of `stop` that has ended it; "": none has."""
    prompt_scores: list[dict[str, Any] | None] | None = None
    """For each token of the prompt, as in `scores`, if the request wants `prompt_logprobs`; None for the first one."""
    prompt: int = 0
    """Number of tokens of the prompt; 0: not known yet."""
    cached: int = 0
    """Number of tokens of the prompt that were in the engine's cache, if the text has ended."""


class Listener(Protocol):
    """The caller's side of a request in the engine."""

    def announce(self) -> Callable[[], None]:
        """For engines that report the steps of several requests in one thread: the responses to all of them are sent
        together when the returned function is called."""

    def abort_with(self, abort: Callable[[], object]) -> None:
        """For engines that can end a request between two steps: `abort` does so, in any thread."""

    def step(self, steps: list[Step]) -> bool:
        """Takes steps. Returns whether the engine should end the request. Does not raise."""


class EngineLimits(Struct, frozen=True):
    """What the engine has room for. `slots`: texts that it generates at once. `context`: tokens of a text with its
    prompt. `cache`: tokens in the KV cache."""

    slots: int
    context: int
    cache: int


Run = Callable[[Listener], Coroutine[Any, Any, None] | None]
"""Runs a request. Returns when the request has ended; or, if the engine has a loop, a coroutine that does so."""


class Engine(Protocol):
    """A loaded model. `close` is called when no call is in progress; all others in any thread."""

    limits: EngineLimits

    @property
    def coroutines(self) -> Coroutines | None:
        """The loop in which the requests run; None: each runs in a thread."""

    def prepared(self, generation: GenerationRequest) -> Run:
        """Translates a request. Returns what runs it. Both raise InvalidRequest or Unsupported for requests that the
        engine refuses."""

    def tokens(self, prompt: str) -> list[int]:
        """The tokens that the model sees."""

    def chat_tokens(self, chat: dict[str, Any]) -> list[int]:
        """The tokens of the prompt that the chat template makes."""

    def text(self, tokens: list[int]) -> str: ...

    def close(self) -> None:
        """Ends the engine and frees the model."""
