"""The requests of an Execute, as a sequence of `Work` or in columns.

In columns, all requests have inputs of one form inside the message. They are handled as lists, without an object for
each request. Code that needs individual requests sees a sequence of `Work` objects, which are created on first use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

from shmserve.errors import ProtocolError
from shmserve.protocol.messages import Columns
from shmserve.protocol.worker_messages import Execute, Work


class ColumnWorks(Sequence[Work]):
    """The requests of a batch whose inputs are of one form: `data[n]` has the bytes of each input of the n-th
    request."""

    __slots__ = ("_works", "audiences", "data", "forms", "requests", "rows")

    def __init__(self, columns: Columns, audiences: Sequence[str]) -> None:
        if not columns.regular or len(audiences) != len(columns.requests):
            raise ProtocolError(f"irregular columns of {len(columns.requests)} requests")
        self.forms = columns.forms
        self.requests = list(columns.requests)
        self.rows = list(columns.rows)
        self.data = list(columns.data)
        self.audiences = list(audiences)
        self._works: list[Work] | None = None

    def extend(self, others: ColumnWorks) -> None:
        """Appends requests of the same form."""
        self.requests += others.requests
        self.rows += others.rows
        self.data += others.data
        self.audiences += others.audiences
        self._works = None

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Work]:
        return iter(self._all())

    @overload
    def __getitem__(self, index: int) -> Work: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Work]: ...
    def __getitem__(self, index: int | slice) -> Work | Sequence[Work]:
        return self._all()[index]

    def _all(self) -> list[Work]:
        works = self._works
        if works is None:
            columns = Columns(self.forms, tuple(self.requests), tuple(self.rows), tuple(self.data))
            works = self._works = [
                Work(request, rows, columns.tensors(index), None, audience)
                for index, (request, rows, audience) in enumerate(
                    zip(self.requests, self.rows, self.audiences, strict=True)
                )
            ]
        return works


def works_of(order: Execute) -> Sequence[Work]:
    if order.columns is not None:
        return ColumnWorks(order.columns, order.audiences)
    return order.works


def joined(works: Sequence[Work], others: Sequence[Work]) -> Sequence[Work]:
    """Concatenates both, in columns if possible. May modify `works`."""
    if isinstance(works, ColumnWorks) and isinstance(others, ColumnWorks) and works.forms == others.forms:
        works.extend(others)
        return works
    return [*works, *others]


def shares_of(works: Sequence[Work]) -> Sequence[int]:
    """The rows of each request."""
    return works.rows if isinstance(works, ColumnWorks) else [work.rows for work in works]
