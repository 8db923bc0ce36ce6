"""What is on its way: a call or a question of a model, what it was made of, and what has come of it.

The rule: what an answer brought is given back once, when its last array goes, in whatever thread that happens.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from shmserve.errors import InvalidRequest
from shmserve.protocol import codec
from shmserve.protocol.messages import PACKET_BYTES, Ask, Call, Handle, WorkerReport
from shmserve.shm import views

if TYPE_CHECKING:
    from shmserve.protocol.messages import Value, Work

Array = np.ndarray[Any, np.dtype[Any]]
_codec = codec.Codec(WorkerReport)


class Given(Struct):
    """An input of a call. `work`: the request that it came with, where that is known."""

    name: str
    array: Array
    work: Work | None = None


class Response(Struct):
    """One answer to a call: arrays by name, or the code and the text of an error."""

    outputs: list[tuple[str, Array]] = []
    parameters: dict[str, Value] | None = None
    code: str = ""
    text: str = ""


class Gift:
    """What knows of the arrays that an answer brought, when they go."""

    __slots__ = ("later",)

    def __init__(self, later: Callable[[Handle], None]) -> None:
        self.later = later

    def dropped(self, handle: Handle) -> None:
        """Within the collector."""
        self.later(handle)


class Pending:
    """A call or a question on its way. `over`: nothing more comes."""

    __slots__ = (
        "abandoned", "answers", "blocks", "body", "kept", "number", "over", "taken", "waiters", "window",
    )  # fmt: skip

    def __init__(self, number: int) -> None:
        self.number = number
        self.window = 0
        self.answers: deque[Response] = deque()
        self.body = b""
        self.over = False
        self.abandoned = False
        self.taken = 0
        """Answers that the model has taken since more were asked for."""
        self.blocks: list[Handle] = []
        self.kept: list[Array] = []
        """Inputs that lie where others have put them."""
        self.waiters: list[asyncio.Future[None]] = []

    @property
    def ready(self) -> bool:
        return self.over or bool(self.answers)


def check(message: Call | Ask) -> None:
    """What the broker could not read would be the end of this worker."""
    try:
        packet = codec.encode([message])
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidRequest(f"the request cannot be sent: {error}") from error
    if len(packet) > PACKET_BYTES - 1024:
        raise InvalidRequest(f"names and parameters make a message of {len(packet)} bytes, over {PACKET_BYTES - 1024}")
    (found,) = _codec.decode(packet)
    if isinstance(found, codec.Refused):
        raise InvalidRequest(found.text)


def gift_of(array: Array) -> Gift | None:
    hold = views.hold_of(array)
    gift = getattr(hold.on_drop, "__self__", None) if hold is not None else None
    return gift if isinstance(gift, Gift) else None


def within(place: Handle, work: Work) -> bool:
    """Whether the bytes lie in an input of the request."""
    end = place.offset + place.size
    return any(
        part.segment == place.segment and part.offset <= place.offset and end <= part.offset + part.size
        for tensor in work.inputs
        if isinstance(tensor.data, tuple)
        for part in tensor.data
    )


def wake(pending: Pending) -> None:
    waiters, pending.waiters = pending.waiters, []
    for future in waiters:
        with suppress(RuntimeError):  # its loop has ended, and whoever waited with it
            future.get_loop().call_soon_threadsafe(_settle, future)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
