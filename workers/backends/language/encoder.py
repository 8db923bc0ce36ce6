"""Serves language models that do not generate: each text becomes a vector, or each pair of texts a score.

A batch runs in the slots of the engine, which computes their texts together.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import repeat
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from msgspec.structs import replace

from shmserve.errors import InvalidRequest
from shmserve.repo.config.complete import TensorFacts, complete_from_model
from shmserve.repo.config.schema import ModelInput
from shmserve.workers.backends.base import Backend, Context, SeparateModel
from shmserve.workers.backends.language.requests import PROMPT
from shmserve.workers.backends.parameters import Parameters
from shmserve.workers.model_calls.answer import Request, Response

if TYPE_CHECKING:
    from shmserve.repo.config.schema import ModelConfig
    from shmserve.workers.backends.language.engine import EngineLimits

POOLING, NORMALIZE = "pooling", "normalize"
"""Parameters of such a model: how it computes a vector, or a score, from a text, and whether vectors have length 1."""
RANK = "rank"
MAX_BATCH = 64
_TOKENS = TensorFacts("num_input_tokens", "UINT32", (-1, 1))
_VECTOR = TensorFacts("embedding", "FP32", (-1, -1))
_SCORE = TensorFacts("score", "FP32", (-1, 1))
LIMIT = ModelInput(name="truncate_prompt_tokens", data_type="TYPE_INT32", dims=(1,), optional=True)
"""An input for texts that become vectors: the number of tokens after which they are cut; -1: the context length."""


Vector = np.ndarray[Any, np.dtype[np.float32]]


class EncodingEngine(Protocol):
    """A loaded model. `close` is called when no call is in progress; the others in any thread."""

    limits: EngineLimits

    def embedding(self, text: str, limit: int | None = None) -> tuple[Vector, int]:
        """The vector of a text, and the number of its tokens. `limit`: see LIMIT; None: longer texts are refused."""

    def score(self, query: str, document: str) -> tuple[Vector, int]:
        """How relevant a document is, and the number of tokens of both."""

    def close(self) -> None: ...


class Encoder(Backend):
    @abstractmethod
    def start(self, config: ModelConfig) -> EncodingEngine:
        """Loads the model in an engine. Raises if it cannot be loaded."""

    def complete(self, config: ModelConfig) -> ModelConfig:
        names, output = _tensors(config)
        inputs = [TensorFacts(name, "BYTES", (-1, 1)) for name in names]
        limit = self.context.default_max_batch(config.backend, MAX_BATCH)
        completed = complete_from_model(config, inputs, (output, _TOKENS), True, limit)
        if config.input or output is _SCORE:
            return completed
        return replace(completed, input=(*completed.input, LIMIT))

    def load(self, config: ModelConfig) -> EncoderModel:
        names, output = _tensors(config)
        inputs = [entry.name for entry in config.input]
        others = {entry.name for entry in config.output} - {output.name, _TOKENS.name}
        optional = {LIMIT.name} if output is _VECTOR else set()
        if sorted({*inputs} - optional) != sorted(names) or others:
            raise InvalidRequest(
                f"unable to load model '{config.name}': with this {POOLING}, its inputs are {', '.join(names)} and its "
                f"outputs {output.name} and {_TOKENS.name}"
            )
        order = [inputs.index(name) for name in names]
        limit = inputs.index(LIMIT.name) if LIMIT.name in inputs else None
        return EncoderModel(self.context, self.start(config), order, limit, output)


class EncoderModel(SeparateModel):
    """`order`: the indices of the inputs that are the arguments of the engine. `limit`: that of LIMIT, if the model has
    it."""

    strict = False

    def __init__(
        self, context: Context, engine: EncodingEngine, order: list[int], limit: int | None, output: TensorFacts
    ) -> None:
        self._context = context
        self._engine = engine
        self._order = order
        self._limit = limit
        self._output = output.name
        self._compute: Callable[..., tuple[Any, int]] = engine.score if output is _SCORE else engine.embedding
        self._threads = ThreadPoolExecutor(engine.limits.slots, "text")

    def close(self) -> None:
        self._threads.shutdown()
        self._engine.close()

    def execute(self, requests: list[Request]) -> list[Response | None]:
        started = [self._start(request) for request in requests]
        return [self._response(futures) for futures in started]

    def _start(self, request: Request) -> list[Future[tuple[Any, int]]]:
        """Starts each row of a request."""
        columns = [request.arrays[index] for index in self._order]
        rows = zip(*[column.reshape(-1).tolist() for column in columns if column is not None], strict=True)
        column = None if self._limit is None else request.arrays[self._limit]
        limits = repeat(()) if column is None else zip(column.reshape(-1).tolist(), strict=True)
        return [self._threads.submit(self._row, row, limit) for row, limit in zip(rows, limits, strict=False)]

    def _row(self, texts: tuple[bytes, ...], limit: tuple[int, ...]) -> tuple[Any, int]:
        try:
            decoded = [text.decode() for text in texts]
        except UnicodeDecodeError:
            raise InvalidRequest("a text is not UTF-8") from None
        return self._compute(*decoded, *limit)

    def _response(self, futures: list[Future[tuple[Any, int]]]) -> Response:
        wait(futures)
        try:
            if not futures:
                raise InvalidRequest("the request has no rows; send at least one text")
            values, counts = zip(*[future.result() for future in futures], strict=True)
        except Exception as error:
            return Response(error=self._context.failure_of(error))
        tokens = np.array(counts, np.uint32).reshape(-1, 1)
        return Response([(self._output, np.stack(values)), (_TOKENS.name, tokens)])


def _tensors(config: ModelConfig) -> tuple[tuple[str, ...], TensorFacts]:
    """The names of the inputs, in the order of the engine's arguments, and the output."""
    if Parameters(config).text(POOLING) == RANK:
        return ("query", "document"), _SCORE
    return (PROMPT,), _VECTOR
