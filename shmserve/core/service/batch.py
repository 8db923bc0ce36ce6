"""A batch at a worker: the requests that were sent together, until the worker has reported the last of them."""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar

from msgspec import Struct

from shmserve.core.service.form import Reason
from shmserve.core.states import BatchState, RequestState, move

_AT_WORK = (RequestState.SENT, RequestState.LINGERING)


class Batched(Protocol):
    """The fields of a request that its batch uses."""

    @property
    def cost(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def state(self) -> RequestState: ...

    batch: Any
    """The batch that contains the request."""


R = TypeVar("R", bound=Batched)


class Batch(Struct, Generic[R], eq=False):
    """`pieces`: the number of each Execute and the requests it contained, in the order of sending."""

    pieces: list[tuple[int, list[R]]]
    rows: int
    reason: Reason
    signature: object
    began: int
    """When it was sent or, if it waited at the worker, when its start was reported."""
    state: BatchState = BatchState.OPEN
    remaining: int = 0
    """Requests that the worker has not reported yet."""
    waited: int = 0
    """ns that its instance spent waiting for other models."""
    unread: dict[R, int] = {}
    """Requests for whose callers the model waits, because they accept no more responses; since when."""
    stalled: int = 0
    """ns that the model has waited for callers, until `stalled_since`."""
    stalled_since: int = 0
    """While `unread` is not empty: since when."""
    tolerated: int = 0
    """`waited_for_callers` when no other request waited for the instance."""
    recalled: bool = False
    """Its requests were recalled, because the instance waits for another model or a caller, or was restarted."""
    answered: int = 0
    """Requests answered by its Done."""
    early: list[int] = []
    """Arrival times of requests answered by Rows, before Done reported when the batch was taken."""
    number: int = 0
    times: tuple[int, ...] = ()
    """The times of its Done, for traces and ensemble statistics."""
    slots: int = 0
    """With sequence slots: highest occupied slot + 1, which counts as the batch size, as in Triton."""

    def stall(self, request: R, now: int) -> None:
        """The model waits until the caller of this request accepts more responses."""
        if not self.unread:
            self.stalled_since = now
        self.unread[request] = now

    def resume(self, request: R, now: int) -> int:
        """The model does not wait for the caller of this request any more. Returns for how long it has."""
        since = self.unread[request]
        self.stalled = self.waited_for_callers(now)
        self.stalled_since = now
        del self.unread[request]
        return now - since

    def waited_for_callers(self, now: int) -> int:
        return self.stalled + (now - self.stalled_since if self.unread else 0)

    def worked(self, now: int) -> int:
        """ns since it began in which its instance has waited neither for other models nor for callers."""
        return now - self.began - self.waited - self.waited_for_callers(now)

    @property
    def count(self) -> int:
        """All requests that were ever in it."""
        return sum(len(piece) for _, piece in self.pieces)

    @property
    def numbers(self) -> list[int]:
        return [number for number, _ in self.pieces]

    def requests(self) -> list[R]:
        """Requests that the worker has not reported yet."""
        return [
            request
            for _, piece in self.pieces
            for request in piece
            if request.batch is self and request.state in _AT_WORK
        ]

    def lengths(self) -> tuple[int, int]:
        """The greatest length of its requests, and their total elements (rows x length)."""
        longest = useful = 0
        for _, piece in self.pieces:
            for request in piece:
                if request.batch is self:
                    longest = max(longest, request.length)
                    useful += request.cost * request.length
        return longest, useful

    @property
    def title(self) -> str:
        return f"batch {self.numbers}"

    def details(self) -> str:
        return f"{self.rows} rows"

    def end(self) -> None:
        """Breaks the reference cycle between requests and batch; the GC does not track requests."""
        move(self, BatchState.ENDED)
        self.pieces = []
        self.unread.clear()

    def known_as(self, number: int) -> bool:
        """True if the number identifies the batch. The worker sends the number of the first Execute or, after a late
        extension, of the first Execute that is left."""
        pieces = self.pieces
        return pieces[0][0] == number or (len(pieces) > 1 and number in self.numbers)

    def split(self, through: int) -> Batch[R] | None:
        """Moves the Executes after `through` into a separate batch."""
        late = [(number, piece) for number, piece in self.pieces if number > through]
        if not late:
            return None
        self.pieces = [(number, piece) for number, piece in self.pieces if number <= through]
        rest = Batch(late, 0, self.reason, self.signature, self.began, recalled=self.recalled)
        for _, piece in late:
            for request in piece:
                if request.batch is self:
                    request.batch = rest
                    rest.rows += request.cost
                    rest.remaining += 1
        self.rows -= rest.rows
        self.remaining -= rest.remaining
        return rest if rest.remaining else None
