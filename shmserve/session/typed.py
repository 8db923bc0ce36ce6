"""Inputs that are Python numbers, strings or lists, whose data types come from the model's metadata.

Invariant: metadata is queried once per model and version, and only for requests with such inputs. It is queried again
after a reconnect, and after the server has refused a request as invalid, since the model may have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from shmserve.errors import Internal, InvalidRequest, ServeError
from shmserve.protocol.messages import Ask
from shmserve.python_values import is_python_value, to_array
from shmserve.session.encode import Raw
from shmserve.session.ticket import Ticket

_Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""Input -> data type and shape, with the batch dimension; -1 is any size."""
METADATA = "metadata"


class _Waiting(NamedTuple):
    model: str
    version: int
    send: Callable[[], None]


class TypedModels:
    """The inputs of models, and the requests that wait for them."""

    def __init__(self) -> None:
        self._models: dict[str, dict[int, _Tensors]] = {}
        """Model -> version -> its inputs; version 0 is the default version."""
        self._waiting: dict[int, _Waiting] = {}
        """Number of a question -> the request that waits for its answer."""

    def typed(self, model: str, version: int, inputs: Mapping[str, Any]) -> dict[str, Any] | None:
        """The inputs as arrays; None if the model's inputs are not known yet."""
        known = self._models.get(model, {}).get(version)
        if known is None:
            return None
        return {
            name: _array(model, name, value, known) if is_python_value(value) else value
            for name, value in inputs.items()
        }

    def wait(self, ask: Ask, send: Callable[[], None]) -> None:
        """Calls `send` when the question is answered."""
        self._waiting[ask.request] = _Waiting(ask.model, ask.version, send)

    def take(self, number: int) -> _Waiting | None:
        """Removes and returns the request that waits for the answer to this question."""
        return self._waiting.pop(number, None)

    def answered(self, waiting: _Waiting, ticket: Ticket, answer: Any) -> int:
        """Sends a request. Returns the number of tickets that this settles."""
        try:
            tensors = {entry["name"]: (entry["datatype"], tuple(entry["shape"])) for entry in answer["inputs"]}
        except (KeyError, TypeError) as error:
            ticket.fail(Internal(f"the server's metadata of model '{waiting.model}' is not complete: {error!r}"))
            return 1
        self._models.setdefault(waiting.model, {})[waiting.version] = tensors
        try:
            waiting.send()
        except ServeError as error:
            ticket.fail(error.with_traceback(None))
            return 1
        return 0

    def forget(self, model: str) -> None:
        self._models.pop(model, None)

    def forget_all(self) -> None:
        self._models.clear()


def _array(model: str, name: str, value: Any, known: _Tensors) -> Any:
    if name not in known:
        names = ", ".join(known) or "none"
        raise InvalidRequest(f"model '{model}' has no input '{name}'; its inputs are {names}")
    dtype, shape = known[name]
    try:
        array = to_array(value, dtype)
    except InvalidRequest as error:
        raise InvalidRequest(f"input '{name}': {error}") from None
    if not array.ndim and all(dim in (-1, 1) for dim in shape):
        array = array.reshape((1,) * len(shape))
    return Raw(dtype, array) if dtype == "BF16" and array.dtype.kind == "u" else array
