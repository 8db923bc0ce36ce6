"""Segment ids of one session, and the segments not yet announced to the server.

Host memory, GPU memory and foreign memory share one `Announcements`, because the server counts all segments of a
connection together. Ids start with the connection's owner number, so each new connection assigns new ones.
"""

from __future__ import annotations

from itertools import count
from typing import Protocol

from shmserve.protocol.messages import OWNER_SHIFT, Map


class Announceable(Protocol):
    """A segment that the server can map. A segment without a name is passed by its descriptor `fd`."""

    @property
    def id(self) -> int: ...

    @property
    def name(self) -> str | None: ...

    @property
    def fd(self) -> int: ...

    def map(self, audience: str = "") -> Map: ...


class Announcements:
    """Pending Map and Unmap messages; the outbox sends them before any message that refers to a segment."""

    __slots__ = ("device_memory", "maps", "named_memory", "numbers", "owner", "unmaps")

    def __init__(self, device_memory: bool) -> None:
        self.device_memory = device_memory
        """Whether the server accepts GPU memory from this connection; assumed until the first Welcome."""
        self.named_memory = False
        """Whether the server accepts foreign host memory by name."""
        self.maps: list[Announceable] = []
        """Segments not yet announced."""
        self.unmaps: list[int] = []
        """Ids of segments that were announced and no longer exist."""
        self.owner = 0
        self.numbers = count(1)

    def new_id(self) -> int:
        return self.owner << OWNER_SHIFT | next(self.numbers)

    def connected(self, owner: int, device_memory: bool, named_memory: bool) -> None:
        """Resets for a new connection. The owners of segments announce them again."""
        self.owner = owner
        self.device_memory = device_memory
        self.named_memory = named_memory
        self.maps.clear()
        self.unmaps.clear()
