"""The JSON of completions and chat completions: the whole response, and the chunks of a stream.

Invariant: a chunk is one line, `data: {...}`, and an empty line. The part that all chunks share is encoded once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property
from typing import Any
from uuid import uuid4

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from shmserve.errors import ModelFailed
from shmserve.gateway.kserve.answers import Buffer
from shmserve.gateway.kserve.generate import event
from shmserve.gateway.openai.reading import PLAIN, TextReading, Thinking
from shmserve.gateway.openai.texts import Delta, TokenUsage
from shmserve.gateway.upstream.exchange import JSON
from shmserve.llm.tool_choice import CallReader

_LOWEST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON does not have."""


class TokenLogprobs:
    """Log probabilities for one chosen token. `logprob` None: it is the first one. `top`: the most probable tokens and
    their log probabilities, in order."""

    __slots__ = ("logprob", "text", "top")

    def __init__(self, text: str, logprob: float | None, top: list[tuple[str, float]]) -> None:
        self.text = text
        self.logprob = logprob
        self.top = top


def logprobs_of(delta: Delta, alternatives: int) -> list[TokenLogprobs]:
    """The model returns an object for each token: token id -> `logprob`, `rank` and `decoded_token`. It contains the
    chosen token and the most probable ones."""
    model_logprobs = delta.logprobs or []
    ids = (
        delta.token_ids
        if delta.token_ids is not None and len(delta.token_ids) == len(model_logprobs)
        else [None] * len(model_logprobs)
    )
    try:
        return [_token(entries, chosen, alternatives) for entries, chosen in zip(model_logprobs, ids, strict=True)]
    except (AttributeError, KeyError, TypeError, ValueError, StopIteration):
        raise ModelFailed("the output 'logprobs' of the model is not a list of objects, one for each token") from None


def prompt_logprobs_of(prompt: str, lists: list[Any], alternatives: int) -> list[TokenLogprobs]:
    """The tokens of a prompt, from the output `prompt_logprobs` of the model. The first one has none."""
    try:
        tokens = [_token(entries, None, alternatives) for entries in lists[1:]]
    except (AttributeError, KeyError, TypeError, ValueError, StopIteration):
        text = "the output 'prompt_logprobs' of the model is not a list of null and objects, one for each token"
        raise ModelFailed(text) from None
    first = prompt[: max(0, len(prompt) - sum([len(token.text) for token in tokens]))]
    return [TokenLogprobs(first, None, []), *tokens]


def _token(entries: dict[str, Any], chosen: int | None, alternatives: int) -> TokenLogprobs:
    """Without `chosen`, the first entry is the chosen token."""
    key = str(chosen)
    entry = entries[key] if key in entries else next(iter(entries.values()))
    ranked = sorted(entries.values(), key=lambda one: one.get("rank") or 0)
    return TokenLogprobs(
        _token_text(entry), _logprob(entry), [(_token_text(one), _logprob(one)) for one in ranked[:alternatives]]
    )


def _token_text(entry: dict[str, Any]) -> str:
    text = entry.get("decoded_token")
    return text if isinstance(text, str) else ""


def _logprob(entry: dict[str, Any]) -> float:
    return max(float(entry["logprob"]), _LOWEST_LOGPROB)


def chat_logprobs(tokens: list[TokenLogprobs]) -> dict[str, Any]:
    return {
        "content": [
            {
                **_described(token.text, token.logprob),
                "top_logprobs": [_described(text, logprob) for text, logprob in token.top],
            }
            for token in tokens
        ],
        "refusal": None,
    }


def _described(text: str, logprob: float | None) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode(errors="replace"))}


def completion_logprobs(tokens: list[TokenLogprobs], offset: int) -> dict[str, Any]:
    """`offset`: characters before the first token."""
    return {
        "text_offset": list(_offsets(tokens, offset)),
        "token_logprobs": [token.logprob for token in tokens],
        "tokens": [token.text for token in tokens],
        "top_logprobs": [
            None if token.logprob is None else dict(token.top) or {token.text: token.logprob} for token in tokens
        ],
    }


def _offsets(tokens: list[TokenLogprobs], offset: int) -> Iterator[int]:
    for token in tokens:
        yield offset
        offset += len(token.text)


class ToolCalls:
    """The tool calls of one choice."""

    def __init__(self) -> None:
        self._calls: dict[int, dict[str, Any]] = {}

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add(self, pieces: list[Any]) -> list[dict[str, Any]]:
        """Adds complete calls or pieces. Returns them with an index, and the first piece of a call also with an id and
        a type, as streaming clients expect."""
        deltas = []
        for one in pieces:
            if type(one) is not dict or type(one.get("function")) is not dict:
                raise ModelFailed("the output 'tool_calls' of the model is not a list of tool calls")
            index = one.get("index")
            if type(index) is not int:
                index = len(self._calls)
            delta = {**one, "index": index}
            call = self._calls.get(index)
            if call is None:
                delta.setdefault("id", f"call_{uuid4().hex}")
                delta.setdefault("type", "function")
                self._calls[index] = {name: value for name, value in delta.items() if name != "index"}
                self._calls[index]["function"] = {"arguments": "", **one["function"]}
            else:
                _extend(call["function"], one["function"])
            deltas.append(delta)
        return deltas

    def whole(self) -> list[dict[str, Any]]:
        return [call for _, call in sorted(self._calls.items())]


def _extend(call: dict[str, Any], piece: dict[str, Any]) -> None:
    more = piece.get("arguments") or ""
    if type(more) is not str or type(call["arguments"]) is not str:
        raise ModelFailed("the 'arguments' of a tool call of the model are not a string")
    call["arguments"] += more
    if piece.get("name"):
        call["name"] = piece["name"]


DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


class Echo:
    """The prompt that the texts of its choices begin with. They share its JSON."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def json(self) -> bytes:
        """Without the quotation marks."""
        return _encode(self.text)[1:-1]


class Choice:
    """State of one choice. `echo`: the text that its text begins with."""

    __slots__ = (
        "begun",
        "calls",
        "echo",
        "finish",
        "length",
        "prompt",
        "stop",
        "texts",
        "thinking",
        "thoughts",
        "tokens",
        "tool_calls",
        "usage",
    )

    def __init__(self, echo: Echo | None = None) -> None:
        self.echo = echo
        self.usage = TokenUsage()
        """Tokens so far: those of its request to the model."""
        self.begun = False
        """Its first chunk was sent."""
        self.finish: str | None = None
        self.stop: str | None = None
        """The text of `stop` that has ended it."""
        self.length = len(echo.text) if echo is not None else 0
        """Characters so far."""
        self.texts: list[bytes] = []
        """The pieces of its text in JSON, without quotation marks."""
        self.thinking: Thinking | None = None
        self.thoughts: list[bytes] = []
        """The pieces of its thinking in JSON, without quotation marks."""
        self.tokens: dict[str, list[bytes]] = {}
        """Log probabilities: the lists of the response, each as pieces of JSON without brackets."""
        self.prompt = b""
        """JSON of the log probabilities of the prompt, if they were requested."""
        self.tool_calls = ToolCalls()
        self.calls: CallReader | None = None
        """Reads tool calls from the text."""

    def add_text(self, text: str) -> int:
        """Returns the number of bytes that this makes."""
        if not text:
            return 0
        self.texts.append(_encode(text)[1:-1])
        return len(self.texts[-1])


class ResponseOptions(Struct, frozen=True):
    """What all formats of choices need to know of a response."""

    id: str
    model: str
    created: int = 0
    top: int | None = None
    """Number of alternatives to each token that were requested. None: no log probabilities."""
    shows_usage: bool = True
    """Whether a stream ends with the number of tokens."""
    continuous: bool = False
    """Whether each chunk has the number of tokens so far."""


class ChoicesFormat(ABC):
    """A StreamFormat for choices."""

    object = chunk_object = ""
    kind = JSON
    shows_stop = True

    def __init__(self, options: ResponseOptions) -> None:
        self.id = options.id
        self.top = options.top
        self.shows_usage = options.shows_usage
        self._common = {"id": options.id, "created": options.created, "model": options.model}
        common = _encode({"id": options.id, "object": self.chunk_object} | self._common)
        self._start = b"data: " + common[:-1] + b',"choices":['
        self._continuous = options.continuous
        self._end = b'],"usage":null}\n\n' if options.shows_usage else b"]}\n\n"

    def add(self, choice: Choice, delta: Delta) -> int:
        size = choice.add_text(delta.text)
        if self.top is not None:
            size += self._keep(choice, logprobs_of(delta, self.top))
        if delta.tool_calls:
            choice.tool_calls.add(delta.tool_calls)
        if delta.prompt_logprobs is not None:
            choice.prompt = _encode(delta.prompt_logprobs)
            size += len(choice.prompt)
        choice.finish, choice.stop = delta.finish or choice.finish, delta.stop or choice.stop
        return size

    def _keep(self, choice: Choice, tokens: list[TokenLogprobs]) -> int:
        """Adds the JSON of tokens to that of the choice. Returns its size."""
        size = 0
        for name, values in (self._lists(choice, tokens) if tokens else {}).items():
            pieces = choice.tokens.setdefault(name, [])
            pieces += [b",", _encode(values)[1:-1]] if pieces else [_encode(values)[1:-1]]
            size += len(pieces[-1])
        return size

    def whole(self, choices: list[Choice], usage: TokenUsage) -> list[Buffer]:
        """The JSON in pieces, which choices with the same prompt share. They are never joined."""
        parts: list[Buffer] = [_encode(self._common | {"object": self.object})[:-1], b',"choices":[']
        for index, choice in enumerate(choices):
            finish = _encode(self._reason(choice.finish or "stop", choice))
            parts.append(b'%b{"index":%d,"finish_reason":%b,' % (b"," * (index > 0), index, finish))
            parts += self._content(choice)
            parts += [b',"logprobs":', *(self._all_tokens(choice) if self.top is not None else [b"null"])]
            parts += [b',"prompt_logprobs":', choice.prompt] * bool(choice.prompt)
            parts += [_stopped(choice.stop), b"}"]
        counted = self._counted(usage)
        parts.append(b"]}" if counted is None else b'],"usage":%b}' % _encode(counted))
        return parts

    @abstractmethod
    def chunk(self, index: int, choice: Choice, delta: Delta) -> bytes: ...

    def end(self, choices: list[Choice], usage: TokenUsage) -> bytes:
        return self._usage_chunk(usage) + DONE if self.shows_usage else DONE

    def error(self, body: bytes) -> bytes:
        return event(body)

    def _usage_chunk(self, usage: TokenUsage) -> bytes:
        return self._start + b'],"usage":' + _encode(self._counted(usage)) + b"}\n\n"

    def _chunk_end(self, choice: Choice) -> bytes:
        if not self._continuous:
            return self._end
        return b'],"usage":%b}\n\n' % _encode(self._counted(choice.usage))

    def _counted(self, usage: TokenUsage) -> dict[str, Any] | None:
        if usage.prompt is None or usage.completion is None:
            return None
        total = usage.prompt + usage.completion
        counted = {"prompt_tokens": usage.prompt, "completion_tokens": usage.completion, "total_tokens": total}
        return counted if usage.cached is None else counted | {"prompt_tokens_details": {"cached_tokens": usage.cached}}

    @abstractmethod
    def _content(self, choice: Choice) -> list[bytes]:
        """The fields of a whole response with the text of a choice."""

    @abstractmethod
    def _lists(self, choice: Choice, tokens: list[TokenLogprobs]) -> dict[str, list[Any]]:
        """The lists of the response with log probabilities."""

    @abstractmethod
    def _all_tokens(self, choice: Choice) -> list[bytes]:
        """All log probabilities of a choice, in a whole response."""

    def _finish(self, choice: Choice, delta: Delta) -> bytes:
        choice.finish = delta.finish or choice.finish
        if delta.finish is None:
            return b"null"
        return _encode(self._reason(delta.finish, choice)) + _stopped(delta.stop)

    def _reason(self, reason: str, choice: Choice) -> str:
        """Why the choice ends."""
        return reason


def _stopped(stop: str | None) -> bytes:
    """vLLM's field of a choice that a text of `stop` has ended."""
    return b"" if stop is None else b',"stop_reason":' + _encode(stop)


class CompletionFormat(ChoicesFormat):
    """`empty`: the request wants no tokens, so that the one that the model generates is left out."""

    object = chunk_object = "text_completion"

    def __init__(self, options: ResponseOptions, empty: bool = False) -> None:
        super().__init__(options)
        self._empty = empty

    def add(self, choice: Choice, delta: Delta) -> int:
        delta = self._without_token(delta)
        size = 0
        if choice.echo is not None and self.top is not None and delta.prompt_logprobs:
            choice.length = 0  # the tokens of the prompt are the first ones
            size = self._keep(choice, prompt_logprobs_of(choice.echo.text, delta.prompt_logprobs, self.top))
        return size + super().add(choice, delta)

    def _without_token(self, delta: Delta) -> Delta:
        if not self._empty:
            return delta
        return Delta("", "length" if delta.finish else None, prompt_logprobs=delta.prompt_logprobs)

    def _counted(self, usage: TokenUsage) -> dict[str, Any] | None:
        return super()._counted(usage if usage.completion is None or not self._empty else replace(usage, completion=0))

    def chunk(self, index: int, choice: Choice, delta: Delta) -> bytes:
        delta = self._without_token(delta)
        text, logprobs_json = delta.text, b"null"
        if self.top is not None:
            tokens = logprobs_of(delta, self.top)
            logprobs_json = _encode(self._lists(choice, tokens)) if tokens else logprobs_json
        if not text and delta.finish is None and logprobs_json == b"null":
            return b""
        return b'%b{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}%b' % (
            self._start,
            index,
            _encode(text),
            logprobs_json,
            self._finish(choice, delta),
            self._chunk_end(choice),
        )

    def echo_chunk(self, index: int, echo: Echo) -> bytes:
        """The event with the prompt, before those with what the model adds."""
        return b'%b{"index":%d,"text":"%b","logprobs":null,"finish_reason":null}%b' % (
            self._start,
            index,
            echo.json,
            self._end,
        )

    def _content(self, choice: Choice) -> list[bytes]:
        echo = [] if choice.echo is None else [choice.echo.json]
        return [b'"text":"', *echo, *choice.texts, b'"']

    def _lists(self, choice: Choice, tokens: list[TokenLogprobs]) -> dict[str, list[Any]]:
        lists = completion_logprobs(tokens, choice.length)
        choice.length += sum([len(token.text) for token in tokens])
        return lists

    def _all_tokens(self, choice: Choice) -> list[bytes]:
        parts = [b"{"]
        for name in completion_logprobs([], 0):
            parts += [b',"%b":[' % name.encode() if len(parts) > 1 else b'"%b":[' % name.encode()]
            parts += [*choice.tokens.get(name, ()), b"]"]
        return [*parts, b"}"]


class ChatFormat(ChoicesFormat):
    object, chunk_object = "chat.completion", "chat.completion.chunk"

    def __init__(self, options: ResponseOptions, reading: TextReading = PLAIN, of_functions: bool = False) -> None:
        """`of_functions`: the request has functions instead of tools, so that the message has one call."""
        super().__init__(options)
        self._reading = reading
        self._of_functions = of_functions

    def add(self, choice: Choice, delta: Delta) -> int:
        delta = self._read(choice, delta)
        if delta.thought:
            choice.thoughts.append(_encode(delta.thought)[1:-1])
        return super().add(choice, delta) + len(delta.thought)

    def chunk(self, index: int, choice: Choice, delta: Delta) -> bytes:
        delta = self._read(choice, delta)
        first, logprobs_json = b"", b"null"
        if not choice.begun:
            choice.begun = True
            first = self._chunk(index, choice, b'{"role":"assistant","content":""}', logprobs_json, logprobs_json)
        if self.top is not None:
            tokens = logprobs_of(delta, self.top)
            logprobs_json = _encode(chat_logprobs(tokens)) if tokens else logprobs_json
        added: dict[str, Any] = {}
        if delta.thought:
            added["reasoning_content"] = delta.thought
        if delta.text:
            added["content"] = delta.text
        if delta.tool_calls:
            added |= self._fields_of(choice.tool_calls.add(delta.tool_calls))
        if not added and delta.finish is None and logprobs_json == b"null":
            return first
        return first + self._chunk(index, choice, _encode(added), logprobs_json, self._finish(choice, delta))

    def _read(self, choice: Choice, delta: Delta) -> Delta:
        """Separates the thinking and the tool calls from the text."""
        reading = self._reading
        if reading.tags is not None:
            choice.thinking = choice.thinking or Thinking(reading.tags)
            thought, text = choice.thinking.feed(delta.text, delta.finish is not None)
            delta = replace(delta, text=text, thought=thought)
        if reading.forced is not None and reading.calls_in_text and delta.text:
            choice.calls = choice.calls or reading.forced.reader()
            delta = replace(delta, text="", tool_calls=choice.calls.feed(delta.text) or None)
        return delta

    def _fields_of(self, pieces: list[dict[str, Any]]) -> dict[str, Any]:
        """The fields of a message with these pieces of calls."""
        if not self._of_functions:
            return {"tool_calls": pieces}
        call: dict[str, Any] = {}
        for number, piece in enumerate(pieces):
            if piece.get("index", number) == 0:
                more = piece["function"]
                call |= more | {"arguments": call.get("arguments", "") + (more.get("arguments") or "")}
        return {"function_call": call} if call else {}

    def _reason(self, reason: str, choice: Choice) -> str:
        if reason == "stop" and self._reading.forced is not None and not choice.tool_calls:
            raise ModelFailed("the model has called no tool, although 'tool_choice' demands it")
        if reason == "stop" and choice.tool_calls:
            reason = "tool_calls"
        return "function_call" if reason == "tool_calls" and self._of_functions else reason

    def _chunk(self, index: int, choice: Choice, delta: bytes, logprobs_json: bytes, finish: bytes) -> bytes:
        return b'%b{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}%b' % (
            self._start,
            index,
            delta,
            logprobs_json,
            finish,
            self._chunk_end(choice),
        )

    def _content(self, choice: Choice) -> list[bytes]:
        parts = [b'"message":{"role":"assistant","refusal":null,']
        if choice.thoughts:
            parts += [b'"reasoning_content":"', *choice.thoughts, b'",']
        parts.append(b'"content":')
        parts += [b'"', *choice.texts, b'"'] if choice.texts or not choice.tool_calls else [b"null"]
        if choice.tool_calls:
            parts += [b",", _encode(self._fields_of(choice.tool_calls.whole()))[1:-1]]
        return [*parts, b"}"]

    def _lists(self, choice: Choice, tokens: list[TokenLogprobs]) -> dict[str, list[Any]]:
        return {"content": chat_logprobs(tokens)["content"]}

    def _all_tokens(self, choice: Choice) -> list[bytes]:
        return [b'{"content":[', *choice.tokens.get("content", ()), b'],"refusal":null}']
