"""One request that a model answers by itself, and what a model may get wrong about it."""

from __future__ import annotations

from asyncio import AbstractEventLoop, Future, Task
from collections import deque
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shmserve.protocol.messages import Row, Work
    from shmserve.workers.model_calls.answer import Answer

CLOSED = "Unable to send response. Response sender has been closed."
ONE = "Unable to send response. Non-decoupled model cannot send more than one response."
NONE = "Unable to send response. Non-decoupled model cannot send complete final before sending a response."
FORKED = (
    "a process that the model has forked cannot call models, ask the server, add metrics or send responses; only the "
    "model's own process can"
)
_NO_LIMIT = 1 << 62


class Stream:
    """One request that the model answers by itself.

    `final`: the model has said that it is the last answer. `over`: the broker has been told so, and nothing more goes
    out. `cancelled`: nobody waits for it any more; what is sent is dropped, and the model should end it.
    """

    __slots__ = ("answer", "cancelled", "final", "kept", "loop", "over", "room", "since", "task", "together", "work")

    def __init__(self, work: Work) -> None:
        self.work = work
        self.room = (work.options.window if work.options is not None else 0) or _NO_LIMIT
        """So many more answers may be sent."""
        self.since = monotonic_ns()
        """When the model began to work on its next answer."""
        self.cancelled = False
        self.final = False
        self.over = False
        self.answer: Answer | None = None
        """Of a request that has one answer, which travels with its batch."""
        self.kept: deque[tuple[Row, Future[None] | None]] = deque()
        """Answers that a coroutine has sent and for which there is no room, and who waits until they are sent."""
        self.loop: AbstractEventLoop | None = None
        self.task: Task[Any] | None = None
        """The coroutine that answers it, together with these."""
        self.together: tuple[Stream, ...] = ()


class Closed(Exception):
    """The model sends where it must not."""
