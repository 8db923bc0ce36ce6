"""Scores of pairs of texts: /v1/score, and /v1/rerank, which orders documents by their scores for a query.

The formats are those of vLLM, and so of Jina and Cohere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from shmserve.errors import ModelFailed
from shmserve.gateway.kserve.answers import Buffer
from shmserve.gateway.kserve.plans import InputPlan, RequestPlan
from shmserve.gateway.limits.turns import COPY_BYTES, SLICE_BYTES, SlicedWork
from shmserve.gateway.openai.bodies import TEXTS, TextsRequest, decoded, request_options
from shmserve.gateway.openai.collection import Collection
from shmserve.gateway.openai.errors import BadParameter
from shmserve.gateway.openai.models import ScoreModel
from shmserve.gateway.openai.pooling import Array
from shmserve.gateway.upstream.exchange import Exchange
from shmserve.gateway.upstream.requests import RequestSender

_encode = msgspec.json.Encoder().encode


class ScoreRequest(TextsRequest, kw_only=True, forbid_unknown_fields=True):
    text_1: str | list[str]
    text_2: str | list[str]

    def pairs(self) -> tuple[list[str], list[str]]:
        """Texts of the same number: one text is compared with each of the others."""
        first, second = _several("text_1", self.text_1), _several("text_2", self.text_2)
        if len(first) not in (1, len(second)):
            raise BadParameter(
                "text_1", f"'text_1' has {len(first)} texts, and 'text_2' {len(second)}; expected one or as many"
            )
        return first * (len(second) if len(first) == 1 else 1), second


class RerankRequest(TextsRequest, kw_only=True, forbid_unknown_fields=True):
    query: str
    documents: list[Any]
    top_n: Annotated[int, Meta(ge=0)] | None = None
    return_documents: bool = True

    def pairs(self) -> tuple[list[str], list[str]]:
        texts = [one.get("text") if type(one) is dict else one for one in self.documents]
        for number, text in enumerate(texts):
            if type(text) is not str:
                raise BadParameter(
                    f"documents[{number}]", f"'documents[{number}]' is neither a string nor an object with a 'text'"
                )
        documents = _several("documents", texts)
        return [self.query] * len(documents), documents


_score = msgspec.json.Decoder(ScoreRequest)
_rerank = msgspec.json.Decoder(RerankRequest)


def score_request(text: bytes) -> ScoreRequest:
    return decoded(_score, text)


def rerank_request(text: bytes) -> RerankRequest:
    return decoded(_rerank, text)


class Scores:
    """Computes the scores of pairs, and answers."""

    def __init__(
        self,
        exchange: Exchange,
        sender: RequestSender,
        model: ScoreModel,
        request: ScoreRequest | RerankRequest,
        pairs: tuple[list[str], list[str]],
        common: dict[str, Any],
    ) -> None:
        """`common`: the first fields of the response."""
        self._exchange = exchange
        self._sender = sender
        self._collection = Collection(exchange, sender, model.name, model.output, self._value, self._answer)
        self._model = model
        self._request = request
        self._pairs = pairs
        self._common = common

    def begin(self) -> None:
        self._collection.begin(self._plans())

    def _plans(self) -> Iterator[RequestPlan | None]:
        """Requests with the same first text share its memory."""
        options = request_options("", self._request)
        placed = self._sender.placed_tensors
        text, copied = "", 0
        first: list[InputPlan] = []
        for one, other in zip(*self._pairs, strict=True):
            if one is not text or not first:
                text, first = one, (yield from placed([self._model.inputs[0].text(one.encode())]))
                copied += first[0].size
            second = yield from placed([self._model.inputs[1].text(other.encode())])
            copied += second[0].size
            if copied > COPY_BYTES:
                copied = 0
                yield None
            yield RequestPlan((*first, *second), 0, options)

    def _value(self, values: Array, shape: tuple[int, ...]) -> float:
        if len(values) != 1 or not math.isfinite(values[0]):
            raise ModelFailed(
                f"output '{self._model.output}' of model '{self._model.name}' has the shape {list(shape)} for one pair "
                "of texts; expected one finite number"
            )
        return float(values[0])

    def _answer(self, scores: list[float]) -> None:
        request = self._request
        items = self._ranked(request, scores) if isinstance(request, RerankRequest) else _listed(scores)
        name = "results" if isinstance(request, RerankRequest) else "data"
        self._exchange.work(self._encoded(name, items), lambda parts: self._exchange.answer(200, parts))

    def _ranked(self, request: RerankRequest, scores: list[float]) -> Iterator[list[Buffer]]:
        """The results as pieces of JSON, the best one first."""
        order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
        for index in order[: request.top_n or None]:
            item: list[Buffer] = [b'{"index":%d,"relevance_score":%b' % (index, _encode(scores[index]))]
            if request.return_documents:
                text = self._pairs[1][index]
                pieces = [_encode(text[at : at + SLICE_BYTES])[1:-1] for at in range(0, len(text), SLICE_BYTES)]
                item += [b',"document":{"text":"', *pieces, b'"}']
            yield [*item, b"}"]

    def _encoded(self, name: str, items: Iterator[list[Buffer]]) -> SlicedWork[list[Buffer]]:
        tokens = self._collection.tokens
        common = {**self._common, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
        parts: list[Buffer] = [_encode(common)[:-1], b',"%b":[' % name.encode()]
        size = 0
        for number, item in enumerate(items):
            parts += [b","] * (number > 0) + item
            size += sum(map(len, item))
            if size > SLICE_BYTES:
                self._exchange.hold(size)
                size = 0
                yield
        return [*parts, b"]}"]


def _listed(scores: list[float]) -> Iterator[list[Buffer]]:
    for index, score in enumerate(scores):
        yield [b'{"index":%d,"object":"score","score":%b}' % (index, _encode(score))]


def _several(param: str, texts: str | list[Any]) -> list[str]:
    texts = [texts] if isinstance(texts, str) else texts
    if not 1 <= len(texts) <= TEXTS:
        raise BadParameter(param, f"'{param}' has {len(texts)} texts; expected 1 to {TEXTS}")
    return texts
