"""Worker processes as the core sees them, and the batches that they have.

An instance runs one batch and may have one more waiting at its worker, which stays open until the worker says that it
has started. Extensions that came too late are the waiting batch there, all together; `Batch.split` does the same here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from shmserve.core.batching.form import Reason
from shmserve.core.policy import InstanceSpec
from shmserve.core.requests.request import Request
from shmserve.core.states import (
    BATCH_MOVES,
    INSTANCE_MOVES,
    BatchState,
    IllegalMove,
    InstanceState,
    RequestState,
    legal,
)

if TYPE_CHECKING:
    from shmserve.core.requests.client import Caller

_AT_WORK = (RequestState.SENT, RequestState.LINGERING)
_OVER = (InstanceState.STOPPING, InstanceState.STOPPED, InstanceState.FAILED)


class Batch(Struct, eq=False):
    """`pieces`: each Execute's number, and the requests that it brought, in the order of their sending."""

    pieces: list[tuple[int, list[Request]]]
    rows: int
    reason: Reason
    signature: object
    began: int
    """When it was sent or, if it waited, when its start was told."""
    state: BatchState = BatchState.OPEN
    left: int = 0
    """Requests that the worker has not reported on yet."""
    waited: int = 0
    """ns for which its instance waited for other models meanwhile."""
    recalled: bool = False
    """Its requests were asked back, as the instance waits for another model."""
    early: list[int] = []
    """When those arrived that were answered by Rows, before Done has told when the batch was taken up."""
    number: int = 0
    times: tuple[int, ...] = ()
    """Its Done's, while a request is traced."""
    slots: int = 0
    """Of sequences with slots: up to the last one that has a sequence. As in Triton, the batch counts as so large."""

    @property
    def count(self) -> int:
        """All requests that were ever in it."""
        return sum(len(piece) for _, piece in self.pieces)

    @property
    def numbers(self) -> list[int]:
        return [number for number, _ in self.pieces]

    def requests(self) -> list[Request]:
        """Those that the worker has not reported on yet."""
        return [
            request
            for _, piece in self.pieces
            for request in piece
            if request.batch is self and request.state in _AT_WORK
        ]

    def lengths(self) -> tuple[int, int]:
        """The greatest length of its requests, and how many elements (rows x length) they have."""
        longest = useful = 0
        for _, piece in self.pieces:
            for request in piece:
                if request.batch is self:
                    longest = max(longest, request.length)
                    useful += request.cost * request.length
        return longest, useful

    def move(self, finish: BatchState) -> None:
        if finish not in BATCH_MOVES[self.state]:
            raise IllegalMove(f"batch {self.numbers}", self.state, finish, f"{self.rows} rows")
        self.state = finish

    def end(self) -> None:
        """Over. Requests and batches refer to each other, and no collector looks at them: the circle is opened here."""
        self.move(BatchState.ENDED)
        self.pieces = []

    def known_as(self, number: int) -> bool:
        """By its first Execute; after a late extension, by the first of those that are left."""
        pieces = self.pieces
        return pieces[0][0] == number or (len(pieces) > 1 and number in self.numbers)

    def split(self, through: int) -> Batch | None:
        """What came after `through` has become a batch of its own."""
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
                    rest.left += 1
        self.rows -= rest.rows
        self.left -= rest.left
        return rest if rest.left else None


class Instance(Struct, eq=False):
    """A place for a worker process. `peer` is the process that it has now, 0 for none."""

    spec: InstanceSpec
    state: InstanceState = InstanceState.WAITING
    peer: int = 0
    running: Batch | None = None
    waiting: Batch | None = None
    deaths: int = 0
    """Crashes and failed restarts in a row: with no batch done between them, and no long uptime."""
    crashes: int = 0
    """Of these, the crashes."""
    ready_since: int = 0
    """When its process had loaded; 0: it has not."""
    row_began: int = 0
    """Batches that its version had done when it first crashed in that row. More by now: other instances did them."""
    unexplained: bool = False
    """Its worker died, and the request to blame is not known yet."""
    lost: bool = False
    """Its last restart has failed: it could not load, or crashed once too often in a row."""
    quarantined: bool = False
    """It crashes while others of its version answer. Until it has done a batch, it is given one request at a time."""
    restarts: int = 0
    """In all, after it had been READY."""
    retry_at: int = 0
    reason: str = ""
    spawned: int = 0
    """When its process was started."""
    watched: bool = False
    """A timer is set for the end of what it may take to run a batch."""
    hung: bool = False
    """Its process was killed because it exceeded the execution limit."""
    load_error: str = ""
    """Why it said that it could not load, this time."""
    last_words: str = ""
    """The last lines that its last process wrote before it ended unasked. For operators only."""
    loaded: bool = False
    """It has been READY. One that never was is not missed by a version that is served without it."""
    streams: dict[int, Request] = {}
    """Requests that it will still answer, though their batch has run."""
    replaces: Instance | None = None
    """Goes when this one is READY."""
    leaving: bool = False
    """It takes nothing new, and stops when the sequences and streams that it has are over."""
    closing: bool = False
    """It leaves, and needs nothing more for that: it is given nothing to run."""
    due: int = 0
    """It has been replaced: when what it runs must have finished. 0: it has not been."""
    revoked: set[int] = set()
    """Requests that were taken back without its answer: it may not start them any more."""
    caller: Caller | None = None
    """Its process as a client, once it has called other models."""

    def move(self, finish: InstanceState) -> None:
        self.state = legal(INSTANCE_MOVES, f"instance {self.spec.name}", self.state, finish, self.story())

    def story(self) -> str:
        return f"peer {self.peer}, {self.deaths} deaths in a row, last reason {self.reason or 'none'}"

    @property
    def usable(self) -> bool:
        """May it be given something to run? One that leaves may, for the sequences that it has."""
        return self.state is InstanceState.READY and not self.spec.passive and not self.closing

    @property
    def alive(self) -> bool:
        """It serves, or will without a failed restart in between."""
        return self.loaded and not (self.lost or self.over or self.spec.passive)

    @property
    def degraded(self) -> bool:
        """It is meant to serve, did so before, and does not now, or not fully."""
        if not self.loaded or self.over or self.spec.passive:
            return False
        return self.quarantined or self.state is not InstanceState.READY

    @property
    def waits(self) -> bool:
        """Does nothing before another model has answered it?"""
        return self.caller is not None and self.caller.waits_for > 0

    @property
    def idle(self) -> bool:
        return self.running is None and self.waiting is None

    @property
    def over(self) -> bool:
        """It has gone, or is about to, and will not come back."""
        return self.leaving or self.state in _OVER

    def batches(self) -> list[Batch]:
        return [batch for batch in (self.running, self.waiting) if batch is not None]
