"""Embeddings: one request to the model per text, so that the model's batcher can batch them, and one response for
all."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from shmserve.dtypes import from_bfloat16, to_numpy
from shmserve.errors import ModelFailed, ServeError
from shmserve.gateway.kserve.answers import Buffer, Held, joined
from shmserve.gateway.kserve.plans import RequestPlan
from shmserve.gateway.limits.turns import COPY_BYTES, SLICE_BYTES, SlicedWork
from shmserve.gateway.openai.bodies import EmbeddingRequest, request_options
from shmserve.gateway.openai.errors import BadParameter
from shmserve.gateway.openai.fan_out import FanOut, Planned
from shmserve.gateway.openai.models import INPUT_TOKENS, EmbeddingModel
from shmserve.gateway.upstream.exchange import Exchange
from shmserve.gateway.upstream.requests import PendingInference, RequestSender
from shmserve.protocol.messages import Reply

AT_ONCE = 64
"""Maximum number of texts of one request that are in flight at the model."""
_VALUES = 3 * SLICE_BYTES // 16
"""Values of a vector that are encoded at once. Their bytes are a multiple of 3, so that their base64 can be joined."""
Vector = np.ndarray[Any, np.dtype[np.float32]]
_encode = msgspec.json.Encoder().encode


class _Text(PendingInference):
    """The request for one text."""

    __slots__ = ("_embeddings", "index")

    def __init__(self, embeddings: Embeddings, index: int) -> None:
        self._embeddings = embeddings
        self.index = index

    def take(self, answer: Reply | Held) -> None:
        self._embeddings.take(self, answer)

    def failed(self, error: ServeError) -> None:
        self._embeddings.failed(self, error)


class Embeddings:
    def __init__(
        self,
        exchange: Exchange,
        sender: RequestSender,
        model: EmbeddingModel,
        request: EmbeddingRequest,
        texts: list[str],
    ) -> None:
        self._exchange = exchange
        self._requests: FanOut[_Text] = FanOut(exchange, sender, model.name, AT_ONCE, exchange.fail)
        self._model = model
        self._request = request
        self._texts = texts
        self._vectors: list[Vector | None] = [None] * len(texts)
        self._tokens = 0

    def begin(self) -> None:
        self._requests.begin(self._plans())

    def _plans(self) -> Planned[_Text]:
        options = request_options("", self._request)
        copied = 0
        for index, text in enumerate(self._texts):
            encoded = text.encode()
            spec = self._model.input.plan(len(encoded).to_bytes(4, "little") + encoded)
            copied += spec.size
            if copied > COPY_BYTES:
                copied = 0
                yield None
            yield _Text(self, index), RequestPlan((spec,), 0, options)

    # ------------------------------------------------------------------------------------ responses of the model

    def take(self, ticket: _Text, answer: Reply | Held) -> None:
        if self._requests.cancelled:
            return
        reply: Any = answer.reply if type(answer) is Held else answer
        for number, tensor in enumerate(reply.outputs):
            data: Any = joined(answer.buffers[number]) if type(answer) is Held else tensor.data
            if tensor.name == self._model.output:
                self._vectors[ticket.index] = self._vector(tensor.dtype, tensor.shape, data)
            elif tensor.name == INPUT_TOKENS:
                self._tokens += int.from_bytes(data, "little")
        if self._vectors[ticket.index] is None:
            raise ModelFailed(f"model '{self._model.name}' returned no output '{self._model.output}'")
        self._requests.ended(ticket)
        if self._requests.done:
            self._exchange.work(self._encoded(), lambda parts: self._exchange.answer(200, parts))

    def failed(self, ticket: _Text, error: ServeError) -> None:
        if not self._requests.cancelled:
            self._requests.failed(ticket)
            self._exchange.fail(error)

    def _vector(self, dtype: str, shape: tuple[int, ...], data: bytes) -> Vector:
        if not shape or any(dim != 1 for dim in shape[:-1]):
            raise ModelFailed(
                f"output '{self._model.output}' of model '{self._model.name}' has the shape {list(shape)} for one "
                "text; expected one vector"
            )
        if dtype == "BF16":
            return self._cut(from_bfloat16(np.frombuffer(data, np.uint16)))
        return self._cut(np.frombuffer(data, to_numpy(dtype)).astype(np.float32))

    def _cut(self, vector: Vector) -> Vector:
        """The first `dimensions` values, scaled to length 1."""
        count = self._request.dimensions
        if count is None:
            return vector
        if count > len(vector):
            raise BadParameter(
                "dimensions",
                f"'dimensions' is {count}; embeddings of model '{self._model.name}' have {len(vector)}",
            )
        cut = vector[:count]
        length = float(np.linalg.norm(cut))
        return cut / np.float32(length) if length else cut

    def _encoded(self) -> SlicedWork[list[Buffer]]:
        parts: list[Buffer] = [b'{"object":"list","data":[']
        size = 0
        for index, vector in enumerate(self._vectors):
            assert vector is not None
            parts.append(b'%b{"object":"embedding","index":%d,"embedding":' % (b"," * (index > 0), index))
            for text in self._text(vector):
                parts.append(text)
                size += len(text)
                if size >= SLICE_BYTES:
                    self._exchange.hold(size)
                    size = 0
                    yield
            parts.append(b"}")
            self._vectors[index] = None
        usage = {"prompt_tokens": self._tokens, "total_tokens": self._tokens}
        parts.append(b'],"model":%b,"usage":%b}' % (_encode(self._request.model), _encode(usage)))
        return parts

    def _text(self, vector: Vector) -> Iterator[bytes]:
        """The JSON of a vector, in pieces."""
        is_base64 = self._request.encoding_format == "base64"
        yield b'"' if is_base64 else b"["
        for at in range(0, len(vector), _VALUES):
            values = vector[at : at + _VALUES]
            if is_base64:
                yield base64.b64encode(values.astype("<f4").tobytes())
                continue
            text = _encode(values.tolist())
            if b"n" in text:  # null, for a value that is not finite
                raise ModelFailed(f"an embedding of model '{self._model.name}' has values that are not finite")
            yield b"," + text[1:-1] if at else text[1:-1]
        yield b'"' if is_base64 else b"]"
