"""The JSON of completions and chat completions: the whole response, and the chunks of a stream.

Invariant: a chunk is one line, `data: {...}`, and an empty line. The part that all chunks share is encoded once.
"""

from __future__ import annotations

from typing import Any

import msgspec

from shmserve.gateway.openai import logprobs
from shmserve.gateway.openai.texts import Delta, Usage
from shmserve.gateway.openai.tool_calls import ToolCalls

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


class Choice:
    """State of one choice. `before`: the prompt text that its text begins with."""

    __slots__ = ("before", "begun", "finish", "length", "texts", "tokens", "tool_calls")

    def __init__(self, before: str = "") -> None:
        self.before = before
        self.begun = False
        """Its first chunk was sent."""
        self.finish: str | None = None
        self.length = len(before)
        """Characters so far."""
        self.texts: list[str] = [before] if before else []
        self.tokens: list[logprobs.TokenLogprobs] = []
        self.tool_calls = ToolCalls()


class ResponseFormat:
    """`top`: number of alternatives to each token that were requested; None: no log probabilities. `shows_usage`: the
    stream ends with the number of tokens."""

    object = chunk_object = ""

    def __init__(self, response_id: str, created: int, model: str, top: int | None, shows_usage: bool) -> None:
        self._top = top
        self._common = {"id": response_id, "created": created, "model": model}
        common = _encode({"id": response_id, "object": self.chunk_object, "created": created, "model": model})
        self._start = b"data: " + common[:-1] + b',"choices":['
        self._end = b'],"usage":null}\n\n' if shows_usage else b"]}\n\n"

    def add(self, choice: Choice, delta: Delta) -> None:
        """Adds to a response that is sent as a whole."""
        choice.texts.append(delta.text)
        if self._top is not None:
            choice.tokens += logprobs.tokens_of(delta, self._top)
        if delta.tool_calls:
            choice.tool_calls.add(delta.tool_calls)
        choice.finish = delta.finish or choice.finish

    def whole(self, choices: list[Choice], usage: Usage) -> bytes:
        document: dict[str, Any] = self._common | {
            "object": self.object,
            "choices": [self._whole_choice(index, choice) for index, choice in enumerate(choices)],
        }
        counted = _usage(usage)
        return _encode(document if counted is None else document | {"usage": counted})

    def chunk(self, index: int, choice: Choice, delta: Delta) -> bytes:
        """The events for a part; empty if there is nothing to send to the client."""
        raise NotImplementedError

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._start + b'],"usage":' + _encode(_usage(usage)) + b"}\n\n"

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def _finish(self, choice: Choice, delta: Delta) -> bytes:
        choice.finish = delta.finish or choice.finish
        return b"null" if delta.finish is None else _encode(finish_of(delta.finish, choice))


class CompletionFormat(ResponseFormat):
    object = chunk_object = "text_completion"

    def chunk(self, index: int, choice: Choice, delta: Delta) -> bytes:
        text, found = delta.text, b"null"
        if not choice.begun:
            choice.begun = True
            text = choice.before + text
        if self._top is not None:
            tokens = logprobs.tokens_of(delta, self._top)
            found = _encode(logprobs.of_completion(tokens, choice.length)) if tokens else found
            choice.length += sum([len(token.text) for token in tokens])
        if not text and delta.finish is None and found == b"null":
            return b""
        return b'%b{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}%b' % (
            self._start, index, _encode(text), found, self._finish(choice, delta), self._end,
        )  # fmt: skip

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        found = None if self._top is None else logprobs.of_completion(choice.tokens, len(choice.before))
        finish = finish_of(choice.finish or "stop", choice)
        return {"index": index, "text": "".join(choice.texts), "logprobs": found, "finish_reason": finish}


class ChatFormat(ResponseFormat):
    object, chunk_object = "chat.completion", "chat.completion.chunk"

    def chunk(self, index: int, choice: Choice, delta: Delta) -> bytes:
        first, found = b"", b"null"
        if not choice.begun:
            choice.begun = True
            first = self._chunk(index, b'{"role":"assistant","content":""}', found, found)
        if self._top is not None:
            tokens = logprobs.tokens_of(delta, self._top)
            found = _encode(logprobs.of_chat(tokens)) if tokens else found
        if not delta.text and delta.finish is None and not delta.tool_calls and found == b"null":
            return first
        added = b'{"content":%b}' % _encode(delta.text) if delta.text else b"{}"
        if delta.tool_calls:
            calls = choice.tool_calls.add(delta.tool_calls)
            added = _encode({"content": delta.text, "tool_calls": calls} if delta.text else {"tool_calls": calls})
        return first + self._chunk(index, added, found, self._finish(choice, delta))

    def _chunk(self, index: int, delta: bytes, found: bytes, finish: bytes) -> bytes:
        return b'%b{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}%b' % (
            self._start, index, delta, found, finish, self._end,
        )  # fmt: skip

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        text = "".join(choice.texts)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if choice.tool_calls:
            message |= {"content": text or None, "tool_calls": choice.tool_calls.whole()}
        found = None if self._top is None else logprobs.of_chat(choice.tokens)
        finish = finish_of(choice.finish or "stop", choice)
        return {"index": index, "message": message, "logprobs": found, "finish_reason": finish}


def finish_of(reason: str, choice: Choice) -> str:
    return "tool_calls" if reason == "stop" and choice.tool_calls else reason


def _usage(usage: Usage) -> dict[str, int] | None:
    if usage.prompt is None or usage.completion is None:
        return None
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
    }
