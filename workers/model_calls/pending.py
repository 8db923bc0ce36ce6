"""A pending call or query of a model: its inputs, its replies, and the coroutines that wait for them.

Invariant: a handle from a reply is returned once, when its last array is freed, in any thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct, field

from shmserve.errors import Cancelled, InvalidRequest
from shmserve.protocol import codec
from shmserve.protocol.messages import PACKET_BYTES, Ask, Handle
from shmserve.protocol.worker_messages import Call, WorkerReport
from shmserve.shm import views
from shmserve.workers.model_calls.coroutines import settle_soon

if TYPE_CHECKING:
    from shmserve.protocol.messages import Value
    from shmserve.protocol.worker_messages import Work

Array = np.ndarray[Any, np.dtype[Any]]
_codec = codec.Codec(WorkerReport)


class CallInput(Struct):
    """An input of a call. `work`: the request that the array came with, if known."""

    name: str
    array: Array
    work: Work | None = None


class CallResponse(Struct):
    """One reply to a call: arrays by name, or the code and text of an error."""

    outputs: list[tuple[str, Array]] = []
    parameters: dict[str, Value] | None = None
    code: str = ""
    text: str = ""


class HandleReturner:
    """Returns the handles of a reply when its arrays are freed."""

    __slots__ = ("defer",)

    def __init__(self, defer: Callable[[Handle], None]) -> None:
        self.defer = defer

    def dropped(self, handle: Handle) -> None:
        """Called by the garbage collector."""
        self.defer(handle)


class Pending(Struct, eq=False):
    """A pending call or query. `over`: nothing more will arrive."""

    number: int
    window: int
    answers: deque[CallResponse] = field(default_factory=deque)
    body: bytes = b""
    over: bool = False
    abandoned: bool = False
    taken: int = 0
    """Replies taken since the last More."""
    blocks: list[Handle] = []
    kept: list[Array] = []
    """Inputs that are passed by handle, in memory of other processes."""
    waiters: list[asyncio.Future[None]] = []

    @property
    def ready(self) -> bool:
        return self.over or bool(self.answers)

    def answered(self, response: CallResponse, last: bool) -> None:
        """A reply has arrived."""
        if not self.abandoned:
            self.answers.append(response)
        self.over = last
        self.wake()

    def answered_query(self, body: bytes, last: bool) -> None:
        """A part of the answer to a query has arrived."""
        self.body += body
        if last:
            self.over = True
            self.wake()

    def cancelled(self) -> None:
        """The model has cancelled it, which is its last reply."""
        self.forgotten()
        self.over = True
        self.answers.append(CallResponse(code=Cancelled.code, text="the call was cancelled"))
        self.wake()

    def forgotten(self) -> None:
        """No code will take its replies."""
        self.abandoned = True
        self.answers.clear()

    def take(self) -> tuple[CallResponse, int]:
        """The next reply, of which there is one. And how many more are accepted, once that is half of the window."""
        self.taken += 1
        more = self.taken if self.window and not self.over and 2 * self.taken >= self.window else 0
        self.taken -= more
        return self.answers.popleft(), more

    def release(self) -> list[Handle]:
        """Its inputs are not read any more. Returns the blocks that have been allocated for them."""
        blocks, self.blocks, self.kept = self.blocks, [], []
        return blocks

    def wake(self) -> None:
        waiters, self.waiters = self.waiters, []
        for future in waiters:
            with suppress(RuntimeError):  # the waiter's loop has been closed
                settle_soon(future)


def check(message: Call | Ask) -> None:
    """Validates a message before it is sent: the broker would disconnect this worker if it could not decode it."""
    try:
        packet = codec.encode([message])
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidRequest(f"the request cannot be sent: {error}") from error
    if len(packet) > PACKET_BYTES - 1024:
        raise InvalidRequest(f"names and parameters make a message of {len(packet)} bytes, over {PACKET_BYTES - 1024}")
    (answer,) = _codec.decode(packet)
    if isinstance(answer, codec.Refused):
        raise InvalidRequest(answer.text)


def returner_of(array: Array) -> HandleReturner | None:
    hold = views.hold_of(array)
    returner = getattr(hold.on_drop, "__self__", None) if hold is not None else None
    return returner if isinstance(returner, HandleReturner) else None


def within(place: Handle, work: Work) -> bool:
    """Whether the bytes lie in an input of the request."""
    end = place.offset + place.size
    return any(
        part.segment == place.segment and part.offset <= place.offset and end <= part.offset + part.size
        for tensor in work.inputs
        if isinstance(tensor.data, tuple)
        for part in tensor.data
    )
