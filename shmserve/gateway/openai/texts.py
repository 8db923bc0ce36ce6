"""Reads the parts of a response of a language model.

A part has one element for each choice. When streaming, it has what was added since the previous part; a character that
is split between two parts is joined.
"""

from __future__ import annotations

import codecs
from typing import Any

import msgspec
from msgspec import Struct

from shmserve.errors import ModelFailed
from shmserve.gateway.kserve.answers import Held, joined
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


class Usage(Struct):
    """Number of tokens; None: the model does not count them."""

    prompt: int | None = None
    completion: int | None = None


class PartReader:
    """Reads the parts of one request, which has `count` choices. `usage`: the tokens so far."""

    def __init__(self, model: str, count: int) -> None:
        self.usage = Usage()
        self._model = model
        self._count = count
        self._cut: dict[int, codecs.IncrementalDecoder] = {}
        """Choice -> the decoder that holds the beginning of a character."""

    def deltas(self, part: Held) -> list[Delta]:
        tensors = {
            tensor.name: (tensor.dtype, joined(buffers))
            for tensor, buffers in zip(part.reply.outputs, part.buffers, strict=True)
        }
        text = tensors.get(TEXT)
        if text is None:
            raise ModelFailed(f"model '{self._model}' returned no output '{TEXT}'")
        texts = self._strings(TEXT, text)
        deltas = [Delta(self._decoded(index, raw)) for index, raw in enumerate(texts)]
        if len(tensors) > 1:
            self._add(deltas, tensors)
        return deltas

    def _add(self, deltas: list[Delta], tensors: dict[str, tuple[str, bytes]]) -> None:
        for name, tensor in tensors.items():
            match name:
                case "finish_reason":
                    for delta, raw in zip(deltas, self._strings(name, tensor), strict=True):
                        delta.finish = None if raw in _NOT_FINISHED else raw.decode(errors="replace")
                case "logprobs":
                    for delta, raw in zip(deltas, self._strings(name, tensor), strict=True):
                        delta.logprobs = self._list(name, raw)
                case "tool_calls":
                    for delta, raw in zip(deltas, self._strings(name, tensor), strict=True):
                        delta.tool_calls = self._list(TOOL_CALLS, raw)
                case "token_ids":
                    self._add_token_ids(deltas, tensor)
                case models.INPUT_TOKENS:
                    self.usage.prompt = sum(self._numbers(name, tensor))
                case "num_output_tokens":
                    self.usage.completion = (self.usage.completion or 0) + sum(self._numbers(name, tensor))

    def _add_token_ids(self, deltas: list[Delta], tensor: tuple[str, bytes]) -> None:
        """The tensor has numbers if there is one choice, else a JSON list for each choice."""
        if tensor[0] == "BYTES":
            for delta, text in zip(deltas, self._strings("token_ids", tensor), strict=True):
                delta.token_ids = self._list("token_ids", text)
        elif len(deltas) == 1:
            deltas[0].token_ids = self._numbers("token_ids", tensor)

    def _decoded(self, index: int, raw: bytes) -> str:
        if index not in self._cut:
            try:
                return raw.decode()
            except UnicodeDecodeError:
                self._cut[index] = _decoder("replace")
        decoder = self._cut[index]
        text = decoder.decode(raw)
        if not decoder.getstate()[0]:
            del self._cut[index]
        return text

    def _strings(self, name: str, tensor: tuple[str, bytes]) -> list[bytes]:
        dtype, raw = tensor
        found, at = [], 0
        while dtype == "BYTES" and at < len(raw):
            begin = at + 4
            at = begin + int.from_bytes(raw[at:begin], "little")
            found.append(raw[begin:at])
        if len(found) != self._count or at > len(raw):
            raise ModelFailed(
                f"output '{name}' of model '{self._model}' has {len(found)} strings; expected {self._count}, one for "
                "each choice"
            )
        return found

    def _list(self, name: str, raw: bytes) -> list[Any] | None:
        if raw in _NOT_FINISHED:
            return None
        try:
            found = _json.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            found = ""
        if not (found is None or type(found) is list):
            raise ModelFailed(f"output '{name}' of model '{self._model}' is not a JSON list")
        return found

    def _numbers(self, name: str, tensor: tuple[str, bytes]) -> list[int]:
        dtype, raw = tensor
        size = _SIZES.get(dtype)
        if size is None:
            raise ModelFailed(f"output '{name}' of model '{self._model}' has the type {dtype}; expected integers")
        return [int.from_bytes(raw[at : at + size], "little") for at in range(0, len(raw), size)]
