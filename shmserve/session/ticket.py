"""One question in flight. The rule of the file: a ticket knows nothing of how its asker waits for the answer."""

from __future__ import annotations

from typing import Any

from shmserve.errors import InvalidRequest, ServeError
from shmserve.protocol.messages import Ask, Infer
from shmserve.session.gpu.tensors import DeviceRef
from shmserve.shm.arena import Block
from shmserve.shm.views import Array


class KeptInputs:
    """What must stay as it is until the server no longer needs the inputs of a request."""

    __slots__ = ("arrays", "blocks", "devices", "frames", "places", "received")

    def __init__(self) -> None:
        self.arrays: list[Array] = []
        """Arrays whose memory the request refers to."""
        self.blocks: list[Block] = []
        """Blocks of the own arena made for this request alone."""
        self.devices: dict[int, DeviceRef] | None = None
        """Number of an input -> the array on a GPU that it is. Not None: there is such an input, or such a place."""
        self.frames: list[bytes] = []
        """Bytes that travel behind the packet."""
        self.received: dict[int, Array] = {}
        """Number of an input -> the received output that it is."""
        self.places: dict[str, Array | DeviceRef] = {}
        """Name of an output -> the array that the caller wants it in."""

    def add_frame(self, name: str, array: Array, most: int) -> int:
        """Puts the bytes of an input behind the packet, where `most` bytes fit. Gives the number of their frame."""
        total = array.nbytes + sum(map(len, self.frames))
        if total > most:
            raise InvalidRequest(
                f"inputs of {total} bytes up to '{name}' are over the {most} that one message may carry beside it; "
                "on the same machine use a client with shared memory, Client() or memory='posix'"
            )
        self.frames.append(array.tobytes())
        return len(self.frames) - 1


class Ticket:
    """A question and what belongs to it. The session fills the fields; subclasses say what an answer does."""

    __slots__ = ("deadline", "kept", "message", "number")

    deadline: float | None
    kept: KeptInputs | None
    message: Infer | Ask | None
    number: int

    def settle(self, answer: Any) -> None:
        """The answer is here: a Reply (all its outputs inline), a Result, or what a JSON document says."""
        raise NotImplementedError

    def fail(self, error: ServeError) -> None:
        raise NotImplementedError


class Abandoned(Ticket):
    """Takes the place of a ticket whose asker no longer waits, until the server is done with the inputs."""

    __slots__ = ()

    def __init__(self, number: int, kept: KeptInputs | None) -> None:
        self.deadline = None
        self.kept = kept
        self.message = None
        self.number = number

    def settle(self, answer: Any) -> None:
        """Nobody wants it. Handles in it were made views, which return them as they go now."""

    def fail(self, error: ServeError) -> None:
        """Nobody wants to know."""
