"""Embeddings: a vector for each text."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import msgspec
import numpy as np

from shmserve.errors import ModelFailed
from shmserve.gateway.kserve.answers import Buffer
from shmserve.gateway.kserve.plans import InputPlan, RequestPlan
from shmserve.gateway.limits.turns import COPY_BYTES, SLICE_BYTES, SlicedWork
from shmserve.gateway.openai.bodies import EmbeddingRequest, request_options
from shmserve.gateway.openai.collection import Collection
from shmserve.gateway.openai.errors import BadParameter
from shmserve.gateway.openai.models import TRUNCATION, EmbeddingModel
from shmserve.gateway.openai.pooling import Array
from shmserve.gateway.upstream.exchange import Exchange
from shmserve.gateway.upstream.requests import RequestSender

_VALUES = 3 * SLICE_BYTES // 16
"""Values of a vector that are encoded at once. Their bytes are a multiple of 3, so that their base64 can be joined."""
_encode = msgspec.json.Encoder().encode


class Embeddings:
    """Computes the vectors of texts, and answers."""

    def __init__(
        self,
        exchange: Exchange,
        sender: RequestSender,
        model: EmbeddingModel,
        request: EmbeddingRequest,
        texts: list[str],
    ) -> None:
        self._exchange = exchange
        self._collection = Collection(
            exchange, sender, model.name, model.output, self._vector, self._answer, model.pooling
        )
        self._model = model
        self._request = request
        self._texts = texts
        self._limit: list[InputPlan] = []
        if (limit := request.truncate_prompt_tokens) is not None:
            if model.limit is None:
                text = f"model '{model.name[:80]}' does not cut texts: it has no INT32 input '{TRUNCATION}'"
                raise BadParameter(TRUNCATION, text)
            self._limit.append(model.limit.plan(limit.to_bytes(4, "little", signed=True)))

    def begin(self) -> None:
        self._collection.begin(self._plans())

    def _plans(self) -> Iterator[RequestPlan | None]:
        options = request_options("", self._request)
        copied = 0
        for text in self._texts:
            spec = self._model.input.text(text.encode())
            copied += spec.size
            if copied > COPY_BYTES:
                copied = 0
                yield None
            yield RequestPlan((spec, *self._limit), 0, options)

    def _vector(self, values: Array, shape: tuple[int, ...]) -> Array:
        if not shape or any(dim != 1 for dim in shape[:-1]):
            raise ModelFailed(
                f"output '{self._model.output}' of model '{self._model.name}' has the shape {list(shape)} for one "
                "text; expected one vector"
            )
        return self._cut(values)

    def _cut(self, vector: Array) -> Array:
        """The first `dimensions` values, scaled to length 1 if they are fewer or the model declares it."""
        count = self._request.dimensions
        if count is None and not self._model.normalize:
            return vector
        if count is not None and count > len(vector):
            raise BadParameter(
                "dimensions", f"'dimensions' is {count}; embeddings of model '{self._model.name}' have {len(vector)}"
            )
        cut = vector[:count]
        length = float(np.linalg.norm(cut))
        return cut / np.float32(length) if length else cut

    def _answer(self, vectors: list[Array]) -> None:
        self._exchange.work(self._encoded(vectors), lambda parts: self._exchange.answer(200, parts))

    def _encoded(self, vectors: list[Array]) -> SlicedWork[list[Buffer]]:
        vectors.reverse()
        parts: list[Buffer] = [b'{"object":"list","data":[']
        size = 0
        for index in range(len(vectors)):
            parts.append(b'%b{"object":"embedding","index":%d,"embedding":' % (b"," * (index > 0), index))
            for text in self._text(vectors.pop()):  # frees the vector
                parts.append(text)
                size += len(text)
                if size >= SLICE_BYTES:
                    self._exchange.hold(size)
                    size = 0
                    yield
            parts.append(b"}")
        usage = {"prompt_tokens": self._collection.tokens, "total_tokens": self._collection.tokens}
        parts.append(b'],"model":%b,"usage":%b}' % (_encode(self._request.model), _encode(usage)))
        return parts

    def _text(self, vector: Array) -> Iterator[bytes]:
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
