"""One request that a model answers with a response sender, and the errors of its protocol."""

from __future__ import annotations

from asyncio import Future
from collections import deque
from collections.abc import Callable
from time import monotonic_ns
from typing import TYPE_CHECKING

from msgspec import Struct, field

if TYPE_CHECKING:
    from shmserve.protocol.worker_messages import Row, Work
    from shmserve.workers.model_calls.answer import Response

SENDER_CLOSED = "Unable to send response. Response sender has been closed."
SENT_TWICE = "Unable to send response. Non-decoupled model cannot send more than one response."
NO_RESPONSE = "Unable to send response. Non-decoupled model cannot send complete final before sending a response."
IN_FORKED_PROCESS = (
    "a process that the model has forked cannot call models, ask the server, add metrics or send responses; only the "
    "model's own process can"
)
_NO_LIMIT = 1 << 62
ROW_BYTES = 256
"""What a queued response takes besides its data."""


class ResponseSender(Struct, eq=False):
    """One request that a model answers with a response sender.

    `final`: the model has sent the last response. `over`: the last response was reported to the broker, and nothing
    more is sent. `cancelled`: the caller no longer waits; responses are dropped, and the model should stop.
    """

    work: Work
    room: int = _NO_LIMIT
    """The number of responses that may still be sent."""
    since: int = field(default_factory=monotonic_ns)
    """When the model began to compute its next response."""
    cancelled: bool = False
    final: bool = False
    over: bool = False
    response: Response | None = None
    """The response of a model that is not decoupled; it is reported with the batch."""
    kept: deque[tuple[Row, Future[None] | None]] = field(default_factory=deque)
    """Queued responses without room, each with the future that resolves when it is sent."""
    kept_bytes: int = 0
    """Written by `keep` and `pop_kept` only."""
    unread: bool = False
    """The broker knows that the model waits for the caller."""
    abort: Callable[[], object] | None = None
    """Ends what answers this request and those in `answered_with`, in any thread."""
    answered_with: tuple[ResponseSender, ...] = ()

    def __post_init__(self) -> None:
        if self.work.options is not None and self.work.options.window:
            self.room = self.work.options.window

    def answered_by(self, abort: Callable[[], object], together: tuple[ResponseSender, ...] = ()) -> None:
        """Code has begun to answer this request and those in `together`, until `answer_ended` or its last response."""
        self.abort, self.answered_with = abort, together

    def answer_ended(self) -> None:
        """The code that answered the request has ended."""
        self.abort, self.answered_with = None, ()

    @property
    def dropped(self) -> bool:
        """Whether further responses are dropped."""
        return self.cancelled or self.over

    def keep(self, row: Row, sent: Future[None] | None) -> None:
        self.kept.append((row, sent))
        self.kept_bytes += bytes_of(row)

    def pop_kept(self) -> tuple[Row, Future[None] | None]:
        row, sent = self.kept.popleft()
        self.kept_bytes -= bytes_of(row)
        return row, sent


def bytes_of(row: Row) -> int:
    """The size of a response that is queued."""
    size = ROW_BYTES
    for tensor in row.outputs:
        if isinstance(tensor.data, bytes):
            size += len(tensor.data)
        elif isinstance(tensor.data, tuple):
            size += sum([handle.size for handle in tensor.data])
    return size


class StreamClosed(Exception):
    """The model sent a response that is not allowed."""
