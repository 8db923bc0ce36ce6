"""Values that a model computes one by one: one request to the model per value, so that the model's batcher can batch
them, and one response for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import numpy as np

from shmserve.dtypes import from_bfloat16, to_numpy
from shmserve.errors import ModelFailed, ServeError
from shmserve.gateway.kserve.answers import Held, joined
from shmserve.gateway.kserve.plans import RequestPlan
from shmserve.gateway.openai.fan_out import FanOut
from shmserve.gateway.openai.models import INPUT_TOKENS
from shmserve.gateway.upstream.exchange import Exchange
from shmserve.gateway.upstream.requests import PendingInference, RequestSender
from shmserve.protocol.messages import Reply

AT_ONCE = 64
"""Maximum number of values of one request that are in flight at the model."""
Array = np.ndarray[Any, np.dtype[np.float32]]
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
    of the requests."""

    def __init__(
        self,
        exchange: Exchange,
        sender: RequestSender,
        model: str,
        output: str,
        read: Callable[[Array, tuple[int, ...]], _Value],
        done: Callable[[list[_Value]], None],
    ) -> None:
        self._exchange = exchange
        self._requests: FanOut[_Ticket] = FanOut(exchange, sender, model, AT_ONCE, exchange.fail)
        self._model = model
        self._output = output
        self._read = read
        self._done = done
        self._values: dict[int, _Value] = {}
        self.tokens = 0
        """Number of tokens of the inputs, as far as the model counts them."""

    def begin(self, plans: Iterator[RequestPlan | None]) -> None:
        """`plans`: None: see `Planned`."""
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
        reply: Any = answer.reply if type(answer) is Held else answer
        for number, tensor in enumerate(reply.outputs):
            data: Any = joined(answer.buffers[number]) if type(answer) is Held else tensor.data
            if tensor.name == self._output:
                self._values[ticket.index] = self._read(_floats(tensor.dtype, data), tensor.shape)
            elif tensor.name == INPUT_TOKENS:
                self.tokens += int.from_bytes(data, "little")
        if ticket.index not in self._values:
            raise ModelFailed(f"model '{self._model}' returned no output '{self._output}'")
        self._requests.ended(ticket)
        if self._requests.done:
            self._done([self._values[index] for index in range(len(self._values))])

    def failed(self, ticket: _Ticket, error: ServeError) -> None:
        if not self._requests.cancelled:
            self._requests.failed(ticket)
            self._exchange.fail(error)


def _floats(dtype: str, data: bytes) -> Array:
    if dtype == "BF16":
        return from_bfloat16(np.frombuffer(data, np.uint16))
    return np.frombuffer(data, to_numpy(dtype)).astype(np.float32)
