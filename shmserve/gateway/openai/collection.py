"""Values that a model computes one by one: one request to the model per value, so that the model's batcher can batch
them, and one response for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np

from shmserve.dtypes import to_numpy
from shmserve.errors import ModelFailed, ServeError
from shmserve.gateway.kserve.answers import Buffer, Held, joined, size_of
from shmserve.gateway.kserve.json_tensors import joined_in_slices
from shmserve.gateway.kserve.plans import RequestPlan
from shmserve.gateway.limits.turns import COPY_BYTES, SlicedWork
from shmserve.gateway.openai.fan_out import FanOut
from shmserve.gateway.openai.models import INPUT_TOKENS, MASK
from shmserve.gateway.openai.pooling import Array, floats, pooled
from shmserve.gateway.upstream.exchange import Exchange
from shmserve.gateway.upstream.requests import PendingInference, RequestSender
from shmserve.protocol.messages import Reply

AT_ONCE = 64
"""Maximum number of values of one request that are in flight at the model."""
_END = object()
_Value = TypeVar("_Value")


class _Ticket(PendingInference):
    """The request for one value."""

    __slots__ = ("_collection", "index")

    def __init__(self, collection: Collection[Any], index: int) -> None:
        self._collection = collection
        self.index = index

    def take(self, answer: Reply | Held) -> None:
        self._collection.take(self, answer)

    def failed(self, error: ServeError) -> None:
        self._collection.failed(self, error)


class Collection(Generic[_Value]):
    """`read` makes a value of the floats of the output and their shape. `done` is called with all values, in the order
    of the requests. `pooling`: the output has vectors of tokens, from which one is made in this way; "": it has not."""

    def __init__(
        self,
        exchange: Exchange,
        sender: RequestSender,
        model: str,
        output: str,
        read: Callable[[Array, tuple[int, ...]], _Value],
        done: Callable[[list[_Value]], None],
        pooling: str = "",
    ) -> None:
        self._exchange = exchange
        self._requests: FanOut[_Ticket] = FanOut(exchange, sender, model, AT_ONCE, exchange.fail)
        self._model = model
        self._output = output
        self._read = read
        self._pooling = pooling
        self._done = done
        self._values: dict[int, _Value] = {}
        self.tokens = 0
        """Number of tokens of the inputs, as far as the model counts them."""

    def begin(self, plans: Iterator[RequestPlan | None]) -> None:
        """`plans`: those of the requests to the model, in order. For None, see `Planned`."""
        self._requests.begin(self._tickets(plans))

    def _tickets(self, plans: Iterator[RequestPlan | None]) -> Iterator[tuple[_Ticket, RequestPlan] | None]:
        index = 0
        for plan in plans:
            if plan is None:
                yield None
            else:
                yield _Ticket(self, index), plan
                index += 1

    def take(self, ticket: _Ticket, answer: Reply | Held) -> None:
        if self._requests.cancelled:
            return
        work = self._taken(ticket, answer)
        if next(work, _END) is not _END:  # large: the rest is done in further slices
            self._exchange.work(_rest(work), _nothing, partial(self.failed, ticket))

    def _taken(self, ticket: _Ticket, answer: Reply | Held) -> SlicedWork[None]:
        reply: Any = answer.reply if type(answer) is Held else answer
        result: tuple[str, tuple[int, ...], Buffer] | None = None
        mask: Any = None
        for number, tensor in enumerate(reply.outputs):
            data = tensor.data
            if type(answer) is Held:
                parts = answer.buffers[number]
                data = joined(parts) if size_of(parts) <= COPY_BYTES else (yield from joined_in_slices(parts))
            if tensor.name == self._output:
                result = tensor.dtype, tensor.shape, data
            elif tensor.name == INPUT_TOKENS:
                self.tokens += int.from_bytes(data, "little")
            elif tensor.name == MASK:
                mask = np.frombuffer(data, to_numpy(tensor.dtype))
        if result is None:
            raise ModelFailed(f"model '{self._model}' returned no output '{self._output}'")
        dtype, shape, data = result
        if self._pooling:
            values = yield from pooled(self._pooling, dtype, shape, data, mask)
            shape = values.shape
        else:
            values = floats(dtype, data)
        if self._requests.cancelled:  # meanwhile
            return
        self._values[ticket.index] = self._read(values, shape)
        self._requests.ended(ticket)
        if self._requests.done:
            self._done([self._values[index] for index in range(len(self._values))])

    def failed(self, ticket: _Ticket, error: ServeError) -> None:
        if not self._requests.cancelled:
            self._requests.failed(ticket)
            self._exchange.fail(error)


def _rest(work: SlicedWork[None]) -> SlicedWork[None]:
    yield
    yield from work


def _nothing(_: None) -> None: ...
