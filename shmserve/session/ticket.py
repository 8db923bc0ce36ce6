"""Requests and queries in flight. A ticket does not depend on how its caller waits for the answer."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from shmserve.errors import InvalidRequest, ServeError
from shmserve.protocol.messages import Ask, Infer
from shmserve.shm.arena import Block
from shmserve.shm.views import Array

if TYPE_CHECKING:
    from shmserve.session.gpu.tensors import DeviceRef


class KeptInputs(Struct, eq=False):
    """Memory that must stay unchanged while the server needs the inputs of a request."""

    arrays: list[Array] = []
    """Arrays whose memory the request refers to."""
    blocks: list[Block] = []
    """Arena blocks allocated for this request only."""
    devices: dict[int, DeviceRef] | None = None
    """Input index -> its array on a GPU. Not None if any input or place is on a GPU."""
    frames: list[bytes] = []
    """Frames to send after the packet."""
    received: dict[int, Array] = {}
    """Input index -> the received output that is passed on."""
    places: dict[str, Array | DeviceRef] = {}
    """Output name -> the array that the caller supplied for it."""

    def add_frame(self, name: str, array: Array, limit: int) -> int:
        """Appends the bytes of an input as a frame; a message may carry `limit` bytes of frames. Returns the frame's
        number.
        """
        total = array.nbytes + sum(map(len, self.frames))
        if total > limit:
            raise InvalidRequest(
                f"the inputs up to '{name}' have {total} bytes, over the limit of {limit} for one message; on the same "
                "machine use a client with shared memory, Client() or memory='posix'"
            )
        self.frames.append(array.tobytes())
        return len(self.frames) - 1


class Ticket:
    """A request or question in flight. The session begins it and ends it; subclasses process the answer.

    Not an ABC, because isinstance() would take 0.1 us longer, for each request and each part. The type checker refuses
    incomplete subclasses nevertheless."""

    __slots__ = ("deadline", "kept", "message", "number")

    deadline: float | None
    kept: KeptInputs | None
    message: Infer | Ask | None
    number: int

    def begin(self, number: int, message: Infer | Ask | None, kept: KeptInputs | None, deadline: float | None) -> None:
        """Called by the session with what it sends for this ticket."""
        self.number = number
        self.message = message
        self.kept = kept
        self.deadline = deadline

    @abstractmethod
    def settle(self, answer: Any) -> None:
        """Processes the answer: a Reply (all outputs inline), a Result, or a parsed JSON document."""

    @abstractmethod
    def fail(self, error: ServeError) -> None: ...


class Abandoned(Ticket):
    """Replaces a ticket whose caller no longer waits, until the server has released the inputs."""

    __slots__ = ()

    def __init__(self, number: int, kept: KeptInputs | None) -> None:
        self.begin(number, None, kept, None)

    def settle(self, answer: Any) -> None:
        """Drops the answer. Its handles are already views; dropping the views returns the handles."""

    def fail(self, error: ServeError) -> None:
        """Drops the error."""
