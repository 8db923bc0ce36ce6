"""Memory that somebody else has exported on a GPU, or has made on the host: the server is told of it by its name. The
rule of the file: it is only passed on, and never opened here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shmserve.errors import Unsupported
from shmserve.protocol.messages import OWNER_SHIFT, Handle, Map
from shmserve.shm.extents.cuda import is_device

if TYPE_CHECKING:
    from shmserve.session.memory import Memory


class Region:
    fd = -1

    def __init__(self, id: int, size: int, name: str) -> None:
        self.id = id
        self.size = size
        self.name = name
        self.lost = False
        """A worker could not open it."""

    @property
    def on_gpu(self) -> bool:
        return is_device(self.name)

    def map(self, audience: str = "") -> Map:
        return Map(self.id, self.size, self.name, audience)


class RegionPart(NamedTuple):
    """A tensor in it, as an input, or in the place of an output."""

    region: Region
    offset: int
    size: int

    @property
    def handle(self) -> Handle:
        return Handle(self.region.id, self.offset, self.size)


class Foreign:
    """All that one session has told of, or will; numbered as its own memory is."""

    def __init__(self, memory: Memory) -> None:
        self.regions: dict[int, Region] = {}
        self._memory = memory

    @property
    def takes_names(self) -> bool:
        """Whether memory on the host can be announced."""
        return self._memory.by_name

    def announce(self, size: int, name: str) -> Region:
        if not self._takes(name):
            raise Unsupported("the server takes no memory of others from this connection: that needs the role operate")
        region = Region(self._memory.owner << OWNER_SHIFT | next(self._memory.numbers), size, name)
        self.regions[region.id] = region
        self._memory.maps.append(region)
        return region

    def withdraw(self, region: Region) -> None:
        """Requests that name it already still find it."""
        if self.regions.pop(region.id, None) is None:
            return
        if region in self._memory.maps:
            self._memory.maps.remove(region)
        else:
            self._memory.unmaps.append(region.id)

    def connected(self, owner: int) -> dict[int, int]:
        """As of the session's own memory."""
        numbers: dict[int, int] = {}
        for old, region in self.regions.items():
            numbers[old] = region.id = owner << OWNER_SHIFT | next(self._memory.numbers)
            if self._takes(region.name):
                self._memory.maps.append(region)
        self.regions = {region.id: region for region in self.regions.values()}
        return numbers

    def _takes(self, name: str) -> bool:
        return self._memory.on_gpu if is_device(name) else self._memory.by_name
