"""The segments of one session: the ids that they go by, and which the server must still be told of.

Host memory, GPU memory and memory made by others share one `Announcements`, since the server counts all segments of a
connection together. Ids begin with the connection's owner number, so every new connection numbers them again.
"""

from __future__ import annotations

from itertools import count
from typing import Protocol

from shmserve.protocol.messages import OWNER_SHIFT, Map


class Announceable(Protocol):
    """A segment that the server can map. `fd` is sent along where there is no name."""

    @property
    def id(self) -> int: ...

    @property
    def name(self) -> str | None: ...

    @property
    def fd(self) -> int: ...

    def map(self, audience: str = "") -> Map: ...


class Announcements:
    """What the outbox sends as Map and Unmap, before any message that refers to a segment."""

    __slots__ = ("device_memory", "maps", "named_memory", "numbers", "owner", "unmaps")

    def __init__(self, device_memory: bool) -> None:
        self.device_memory = device_memory
        """The server accepts memory on GPUs from this connection. Before the first Welcome: an assumption."""
        self.named_memory = False
        """The server accepts memory that others have made, by its name."""
        self.maps: list[Announceable] = []
        """Segments that the server has not been told of."""
        self.unmaps: list[int] = []
        """Ids of segments that it has been told of and that are gone."""
        self.owner = 0
        self.numbers = count(1)

    def new_id(self) -> int:
        return self.owner << OWNER_SHIFT | next(self.numbers)

    def connected(self, owner: int, device_memory: bool, named_memory: bool) -> None:
        """On a new connection nothing has been announced. The owners of segments announce them again."""
        self.owner = owner
        self.device_memory = device_memory
        self.named_memory = named_memory
        self.maps.clear()
        self.unmaps.clear()
