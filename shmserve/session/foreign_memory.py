"""Memory that another process has exported on a GPU or created on the host, announced to the server by name.

Invariant: it is only passed on, never opened here.
"""

from __future__ import annotations

from typing import NamedTuple

from shmserve.errors import Unsupported
from shmserve.protocol.messages import DEVICE, Handle, Map
from shmserve.session.announcements import Announcements


class ForeignRegion:
    fd = -1

    def __init__(self, id: int, size: int, name: str) -> None:
        self.id = id
        self.size = size
        self.name = name
        self.lost = False
        """Whether a worker failed to open it."""

    @property
    def on_gpu(self) -> bool:
        return self.name.startswith(DEVICE)

    def map(self, audience: str = "") -> Map:
        return Map(self.id, self.size, self.name, audience)


class RegionPart(NamedTuple):
    """A tensor in a foreign region, used as an input or as the place of an output."""

    region: ForeignRegion
    offset: int
    size: int

    @property
    def handle(self) -> Handle:
        return Handle(self.region.id, self.offset, self.size)


class ForeignMemory:
    """The foreign regions of one session, with ids from the same sequence as its own segments."""

    def __init__(self, announcements: Announcements) -> None:
        self.regions: dict[int, ForeignRegion] = {}
        self._announcements = announcements

    @property
    def takes_names(self) -> bool:
        """Whether host memory can be announced."""
        return self._announcements.named_memory

    def announce(self, size: int, name: str) -> ForeignRegion:
        if not self._takes(name):
            raise Unsupported("the server accepts foreign memory only from connections with the role operate")
        region = ForeignRegion(self._announcements.new_id(), size, name)
        self.regions[region.id] = region
        self._announcements.maps.append(region)
        return region

    def withdraw(self, region: ForeignRegion) -> None:
        """Withdraws a region. Requests that already refer to it can still use it."""
        if self.regions.pop(region.id, None) is None:
            return
        if region in self._announcements.maps:
            self._announcements.maps.remove(region)
        else:
            self._announcements.unmaps.append(region.id)

    def connected(self) -> dict[int, int]:
        """Assigns new ids after a reconnect and announces the regions again. Returns old id -> new id."""
        numbers: dict[int, int] = {}
        for old, region in self.regions.items():
            numbers[old] = region.id = self._announcements.new_id()
            if self._takes(region.name):
                self._announcements.maps.append(region)
        self.regions = {region.id: region for region in self.regions.values()}
        return numbers

    def _takes(self, name: str) -> bool:
        return self._announcements.device_memory if name.startswith(DEVICE) else self._announcements.named_memory
