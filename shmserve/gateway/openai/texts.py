"""Reads the parts of a response of a language model.

A part has one element for each choice. When streaming, it has what was added since the previous part; a character that
is split between two parts is joined.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct

from shmserve.errors import InvalidRequest, ModelFailed
from shmserve.gateway.kserve.answers import Buffer, Held, joined, size_of
from shmserve.gateway.kserve.json_scan import JsonScan
from shmserve.gateway.kserve.json_tensors import joined_in_slices
from shmserve.gateway.limits.turns import COPY_BYTES, SLICE_BYTES
from shmserve.gateway.openai import models
from shmserve.gateway.openai.models import TEXT, TOOL_CALLS

_NOT_FINISHED = (b"", b"None", b"null")
_SIZES = {f"{sign}INT{8 * size}": size for sign in ("", "U") for size in (1, 2, 4, 8)}
_decoder = codecs.getincrementaldecoder("utf-8")
_json = msgspec.json.Decoder()


class Delta(Struct):
    """The text and other data that a part adds to one choice."""

    text: str
    finish: str | None = None
    logprobs: list[Any] | None = None
    """One element for each token: token id -> logprob, rank and text."""
    token_ids: list[int] | None = None
    tool_calls: list[Any] | None = None
    segments: list[Any] | None = None
    """Parts of speech with their times."""
    prompt_logprobs: list[Any] | None = None
    thought: str = ""
    """Thinking of the model."""
    stop: str | None = None
    """The text of `stop` that has ended the choice, if the model was asked for it."""


class _More(Struct):
    """What a part has for one choice besides its text, not decoded yet."""

    finish: Buffer = b""
    stop: Buffer = b""
    logprobs: Buffer = b""
    ids: Buffer | list[int] = b""
    tool_calls: Buffer = b""
    thought: Buffer = b""
    segments: Buffer = b""
    prompt_logprobs: Buffer = b""


_FIELDS = {
    "finish_reason": "finish",
    "stop_reason": "stop",
    "logprobs": "logprobs",
    "token_ids": "ids",
    TOOL_CALLS: "tool_calls",
    models.THINKING: "thought",
    models.SEGMENTS: "segments",
    models.PROMPT_LOGPROBS: "prompt_logprobs",
}
"""Output of the model -> the field that has its string for a choice."""


class TokenUsage(Struct):
    """Number of tokens; None: the model does not count them."""

    prompt: int | None = None
    completion: int | None = None
    context: int | None = None
    """Maximum number of tokens of a prompt and its continuation."""
    cached: int | None = None
    """Tokens of the prompt that the engine had in its cache."""


class PartReader:
    """Reads the parts of one request, which has `count` choices. `usage`: the tokens so far."""

    def __init__(self, model: str, count: int) -> None:
        self.usage = TokenUsage()
        self._model = model
        self._count = count
        self._incomplete: dict[int, codecs.IncrementalDecoder] = {}
        """Choice -> the decoder that holds the beginning of a character."""

    def deltas(self, part: Held) -> Iterator[tuple[int, Delta] | None]:
        """The choices and what the part adds to them. The deltas of a large choice are several, each with as much as a
        slice can process. None: the end of a slice."""
        tensors: dict[str, tuple[str, Buffer]] = {}
        for tensor, buffers in zip(part.reply.outputs, part.buffers, strict=True):
            if size_of(buffers) > COPY_BYTES:
                data: Buffer = yield from joined_in_slices(buffers)
            else:
                data = joined(buffers)
            tensors[tensor.name] = tensor.dtype, data
        text = tensors.pop(TEXT, None)
        if text is None:
            raise ModelFailed(f"model '{self._model}' returned no output '{TEXT}'")
        size = 0
        more = self._more(tensors) if tensors else None
        for index, raw in enumerate(self._strings(TEXT, text)):
            added = len(raw) if more is None else len(raw) + len(more[index].logprobs)
            if added <= SLICE_BYTES:
                delta = Delta(self._decoded(index, raw))
                if more is not None:
                    self._add(delta, more[index])
                yield index, delta
            else:
                yield from self._large(index, raw, None if more is None else more[index])
            size += added
            if size > SLICE_BYTES:
                size = 0
                yield None

    def _large(self, index: int, raw: Buffer, more: _More | None) -> Iterator[tuple[int, Delta] | None]:
        for at in range(0, len(raw), SLICE_BYTES):
            yield index, Delta(self._decoded(index, raw[at : at + SLICE_BYTES]))
            yield None
        last = Delta("")
        if more is not None:
            ids, at = self._ids(more), 0
            if len(more.logprobs) > SLICE_BYTES:
                for tokens in self._tokens(more.logprobs):
                    end = at + len(tokens)
                    yield index, Delta("", None, tokens, None if ids is None else ids[at:end])
                    at = end
                    yield None
                more.logprobs, more.ids = b"", b""
            self._add(last, more)
        yield index, last

    def _tokens(self, raw: Buffer) -> Iterator[list[Any]]:
        """A long JSON list of objects, decoded in slices."""
        begin = 1
        try:
            for chunk in JsonScan(memoryview(raw), 0, len(raw)).slices():
                ends = chunk.brackets[(chunk.depths == 1) & (chunk.steps < 0)]
                end = chunk.at + int(ends[-1]) + 1 if len(ends) else begin
                values = _json.decode(b"[%b]" % bytes(raw[begin:end]).lstrip(b", \t\r\n"))
                begin = end
                yield values
            if bytes(raw[:1]) == b"[" and bytes(raw[begin:]).strip() == b"]":
                return
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, InvalidRequest):
            pass
        raise ModelFailed(f"output 'logprobs' of model '{self._model}' is not a JSON list of objects")

    def _more(self, tensors: dict[str, tuple[str, Buffer]]) -> list[_More]:
        """What the other outputs have for each choice; adds the numbers of tokens."""
        choices = [_More() for _ in range(self._count)]
        for name, tensor in tensors.items():
            if name == "token_ids" and tensor[0] != "BYTES":
                if self._count == 1:
                    choices[0].ids = self._numbers(name, tensor)
            elif name in _FIELDS:
                for one, raw in zip(choices, self._strings(name, tensor), strict=True):
                    setattr(one, _FIELDS[name], raw)
            elif name == models.INPUT_TOKENS:
                self.usage.prompt = sum(self._numbers(name, tensor))
            elif name == "num_cached_tokens":
                self.usage.cached = sum(self._numbers(name, tensor))
            elif name == "max_model_len":
                self.usage.context = sum(self._numbers(name, tensor))
            elif name == "num_output_tokens":
                self.usage.completion = (self.usage.completion or 0) + sum(self._numbers(name, tensor))
        return choices

    def _add(self, delta: Delta, more: _More) -> None:
        if more.finish not in _NOT_FINISHED:
            delta.finish = str(more.finish, "utf-8", "replace")
            delta.stop = str(more.stop, "utf-8", "replace") or None
        delta.thought = str(more.thought, "utf-8", "replace")
        delta.logprobs = self._list("logprobs", more.logprobs)
        delta.token_ids = self._ids(more)
        delta.tool_calls = self._list(TOOL_CALLS, more.tool_calls)
        delta.segments = self._list(models.SEGMENTS, more.segments)
        delta.prompt_logprobs = self._list(models.PROMPT_LOGPROBS, more.prompt_logprobs)

    def _ids(self, more: _More) -> list[int] | None:
        return more.ids if isinstance(more.ids, list) else self._list("token_ids", more.ids)

    def _decoded(self, index: int, raw: Buffer) -> str:
        if index not in self._incomplete:
            try:
                return str(raw, "utf-8")
            except UnicodeDecodeError:
                self._incomplete[index] = _decoder("replace")
        decoder = self._incomplete[index]
        text = decoder.decode(raw)
        if not decoder.getstate()[0]:
            del self._incomplete[index]
        return text

    def _strings(self, name: str, tensor: tuple[str, Buffer]) -> list[Buffer]:
        dtype, raw = tensor
        if len(raw) > SLICE_BYTES:
            raw = memoryview(raw)  # slicing a view does not copy
        pieces: list[Buffer] = []
        at = 0
        while dtype == "BYTES" and at < len(raw):
            begin = at + 4
            at = begin + int.from_bytes(raw[at:begin], "little")
            pieces.append(raw[begin:at])
        if len(pieces) != self._count or at > len(raw):
            raise ModelFailed(
                f"output '{name}' of model '{self._model}' has {len(pieces)} strings; expected {self._count}, one for "
                "each choice"
            )
        return pieces

    def _list(self, name: str, raw: Buffer) -> list[Any] | None:
        if raw in _NOT_FINISHED:
            return None
        try:
            values = _json.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            values = ""
        if not (values is None or type(values) is list):
            raise ModelFailed(f"output '{name}' of model '{self._model}' is not a JSON list")
        return values

    def _numbers(self, name: str, tensor: tuple[str, Buffer]) -> list[int]:
        dtype, raw = tensor
        size = _SIZES.get(dtype)
        if size is None:
            raise ModelFailed(f"output '{name}' of model '{self._model}' has the type {dtype}; expected integers")
        return [int.from_bytes(raw[at : at + size], "little") for at in range(0, len(raw), size)]
