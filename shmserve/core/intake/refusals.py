"""Requests that are refused before they are made: counted, and answered with the reason."""

from __future__ import annotations

from shmserve.core.records import ClientState
from shmserve.core.state import State
from shmserve.errors import ServeError, Unavailable
from shmserve.protocol.messages import Fail, FailBatch, InferBatch


def refuse(state: State, client: ClientState, model: str, number: int, error: ServeError) -> None:
    state.observers.refused(state.ready.get(model), error)
    if number in client.requests:  # that request gets its own response instead of this error
        number = 0
    state.send(client.number, Fail(number, error.code, error.message))


class BatchRefusals:
    """The refused requests of an InferBatch. Consecutive requests that are refused for the same reason share an answer.

    Requests that differ only in their numbers and in the values of their inputs are equally invalid, so only the first
    one is checked. Limits are checked for each request."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.known: dict[tuple[int, tuple[int, ...]], ServeError] = {}
        """Rows and sizes of the inputs -> why such requests are invalid."""
        self._numbers: list[int] = []
        self._error: ServeError | None = None
        """The error of `_numbers`, which have not been answered yet."""

    def repeats(self, client: ClientState, message: InferBatch, index: int) -> bool:
        """Refuses a request, whose number is valid, if equal ones are invalid."""
        columns = message.columns
        error = self.known.get((columns.rows[index], tuple(map(len, columns.data[index]))))
        if error is None:
            return False
        self._add(client, message, index, error)
        return True

    def add(self, client: ClientState, message: InferBatch, index: int, error: ServeError) -> None:
        """Refuses a request whose number is valid."""
        if not isinstance(error, Unavailable):
            columns = message.columns
            self.known[columns.rows[index], tuple(map(len, columns.data[index]))] = error
        self._add(client, message, index, error)

    def _add(self, client: ClientState, message: InferBatch, index: int, error: ServeError) -> None:
        last = self._error
        if error is not last and (last is None or (error.code, error.message) != (last.code, last.message)):
            self.answer(client, message)
            self._error = error
        self._numbers.append(message.columns.requests[index])

    def answer(self, client: ClientState, message: InferBatch) -> None:
        error, numbers = self._error, self._numbers
        if error is None:
            return
        self._error, self._numbers = None, []
        self._state.observers.refused(self._state.ready.get(message.model), error, len(numbers))
        if len(numbers) == 1:
            self._state.send(client.number, Fail(numbers[0], error.code, error.message))
        else:
            self._state.send(client.number, FailBatch(tuple(numbers), error.code, error.message))

    def end(self, client: ClientState, message: InferBatch) -> None:
        self.answer(client, message)
        self.known.clear()
