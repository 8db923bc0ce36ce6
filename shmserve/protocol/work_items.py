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


class WorkColumns(Sequence[Work]):
    """The requests of a batch whose inputs are of one form: `data[n]` has the bytes of each input of the n-th
    request."""

    __slots__ = ("_work_items", "audiences", "data", "forms", "requests", "rows")

    def __init__(self, columns: Columns, audiences: Sequence[str]) -> None:
        if not columns.regular or len(audiences) != len(columns.requests):
            raise ProtocolError(f"irregular columns of {len(columns.requests)} requests")
        self.forms = columns.forms
        self.requests = list(columns.requests)
        self.rows = list(columns.rows)
        self.data = list(columns.data)
        self.audiences = list(audiences)
        self._work_items: list[Work] | None = None

    def extend(self, others: WorkColumns) -> None:
        """Appends requests of the same form."""
        self.requests += others.requests
        self.rows += others.rows
        self.data += others.data
        self.audiences += others.audiences
        self._work_items = None

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
        work_items = self._work_items
        if work_items is None:
            columns = Columns(self.forms, tuple(self.requests), tuple(self.rows), tuple(self.data))
            work_items = self._work_items = [
                Work(request, rows, columns.tensors(index), None, audience)
                for index, (request, rows, audience) in enumerate(
                    zip(self.requests, self.rows, self.audiences, strict=True)
                )
            ]
        return work_items


def work_items_of(order: Execute) -> Sequence[Work]:
    if order.columns is not None:
        return WorkColumns(order.columns, order.audiences)
    return order.work_items


def joined(work_items: Sequence[Work], others: Sequence[Work]) -> Sequence[Work]:
    """Concatenates both, in columns if possible. May modify `work_items`."""
    if isinstance(work_items, WorkColumns) and isinstance(others, WorkColumns) and work_items.forms == others.forms:
        work_items.extend(others)
        return work_items
    return [*work_items, *others]


def shares_of(work_items: Sequence[Work]) -> Sequence[int]:
    """The rows of each request."""
    return work_items.rows if isinstance(work_items, WorkColumns) else [work.rows for work in work_items]
