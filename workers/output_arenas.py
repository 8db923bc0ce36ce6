"""The memory of this worker's outputs: one arena for each audience, so that nobody can map another's tensors.

The rule: the audience decides the kind of memory. "internal" and "uid:N" get descriptors, "posix..." gets names. The
limit is one for all of them together.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import TYPE_CHECKING

from shmserve.errors import InvalidRequest, ServeError, Unavailable
from shmserve.protocol.messages import Handle, Map, Unmap
from shmserve.shm.arena import Arena
from shmserve.shm.extents import memfd, posix
from shmserve.workers.process.log import say

if TYPE_CHECKING:
    from shmserve.shm.arena import Block, Segment
    from shmserve.shm.extents.base import Extent
    from shmserve.shm.mapped import Mapped
    from shmserve.workers.outbox import Outbox

INTERNAL = "internal"
"""The audience of what only workers read."""
LIMIT_BYTES = 4 * 1024 * 1024 * 1024
KNOB = "worker-output-bytes"
NEAR = "@gpu"
"""Behind the audience, in the name of an arena on the GPU."""
NEAR_BYTES = 1024 * 1024 * 1024
NEAR_KNOB = "cuda-memory-pool-byte-size"


def near_limit(text: str, device: int) -> int:
    """`GPU:BYTES,...` as the broker's flag has it, -1 for all GPUs: the last that is meant for this one."""
    found = NEAR_BYTES
    pairs = [part.split(":") for part in text.split(",") if part]
    for gpu, size in sorted(pairs, key=lambda pair: pair[0] != "-1"):
        if int(gpu) in (-1, device):
            found = int(size)
    return found


class _AudienceArena(Arena):
    """An arena that shares its owner's ids with other arenas."""

    def __init__(
        self,
        owner: int,
        make: Callable[[int], Extent],
        arenas: Arenas,
        audience: str,
        near: str = "",
    ) -> None:
        """`near`: on a GPU. Such memory must not be freed while others have it open, so it is kept to the end."""
        super().__init__(
            owner,
            make,
            limit_bytes=arenas.near_limit if near else arenas.limit,
            announce=lambda segment: arenas.announce(segment, audience, near),
            withdraw=None if near else arenas.withdraw,
            knob=NEAR_KNOB if near else KNOB,
            numbers=arenas.numbers,
        )

    def give_up_idle(self) -> list[int]:
        """Gives up every segment in which nothing is allocated, and says which. Trim would keep one."""
        idle = [segment for segment in self.segments if not segment.blocks.used]
        for segment in idle:
            self._give_up(segment)
        return [segment.id for segment in idle]


class Arenas:
    """Arenas by audience, made when first needed. Segments are announced to the broker, and mapped here too: what one
    batch wrote may be what the next one reads."""

    def __init__(self, owner: int, outbox: Outbox, mapped: Mapped, limit: int = LIMIT_BYTES) -> None:
        self.limit = limit
        self.near_limit = NEAR_BYTES
        self.numbers = count(1)
        """Of the segments of all arenas."""
        self._owner = owner
        self._outbox = outbox
        self._mapped = mapped
        self._arenas: dict[str, _AudienceArena] = {}
        self._by_segment: dict[int, _AudienceArena] = {}
        self.audiences: dict[int, str] = {}
        """Who may be given handles into a segment, of this worker's and of all others that it knows."""

    def allocate(self, audience: str, size: int) -> Block:
        arena = self._arenas.get(audience) or self._new(audience)
        return arena.allocate(size)

    def allocate_near(self, audience: str, size: int) -> Block:
        """On the GPU of this process, for readers that can read it there. Its address is the device's."""
        arena = self._arenas.get(audience + NEAR) or self._new_near(audience)
        return arena.allocate(size)

    def split(self, block: Block, sizes: Sequence[int]) -> list[Block]:
        return self._by_segment[block.segment].split(block, sizes)

    def owns(self, segment: int) -> bool:
        return segment in self._by_segment

    def free(self, handles: Iterable[Handle]) -> None:
        """Takes blocks back. A return that is wrong changes nothing and stops nothing; the operator is told."""
        for segment, offset, size in [(handle.segment, handle.offset, handle.size) for handle in handles]:
            arena = self._by_segment.get(segment)
            try:
                if arena is None:
                    raise InvalidRequest(f"segment {segment} is not one of this worker's")
                arena.free(segment, offset, size)
            except ServeError as error:
                say(f"a handle came back that cannot be freed: {error}")

    def close(self, bequeath: bool = False) -> None:
        """`bequeath`: what callers still hold keeps its names, which the broker removes when nobody needs them."""
        for arena in self._arenas.values():
            for segment in arena.segments if bequeath else ():
                if isinstance(segment.extent, posix.PosixExtent) and segment.blocks.used:
                    segment.extent.bequeath()
            arena.close()

    @property
    def used(self) -> int:
        """Bytes of outputs that somebody still holds."""
        return sum(arena.used for arena in self._arenas.values())

    # ------------------------------------------------------------------------------------ segments

    def _new(self, audience: str) -> _AudienceArena:
        make = self._memfd
        if audience.startswith("posix"):
            # Its own user may open it; another one only by way of the service's group, and only to read.
            uid = audience.rpartition(":")[2]
            make = self._posix_private if uid in ("", str(os.geteuid())) else self._posix_group
        arena = _AudienceArena(self._owner, make, self, audience)
        self._arenas[audience] = arena
        return arena

    def _new_near(self, audience: str) -> _AudienceArena:
        from shmserve.workers.gpu.shared import memory_of  # few models need it

        made = memory_of(self._mapped).make
        arena = _AudienceArena(self._owner, made, self, audience, NEAR)
        self._arenas[audience + NEAR] = arena
        return arena

    def _memfd(self, size: int) -> Extent:
        self._make_room(size)
        return memfd.create(size, seal_future_write=True)

    def _posix_private(self, size: int) -> Extent:
        self._make_room(size)
        return posix.create(size)

    def _posix_group(self, size: int) -> Extent:
        self._make_room(size)
        return posix.create(size, 0o640, os.getegid())

    def _make_room(self, size: int) -> None:
        """The limit holds for all arenas: what others keep for later is given up before a request fails."""
        arenas = [arena for audience, arena in self._arenas.items() if not audience.endswith(NEAR)]
        committed = sum(arena.committed for arena in arenas)
        if committed + size <= self.limit:
            return
        for arena in arenas:
            for segment in arena.give_up_idle():
                self.withdraw(segment)
        committed = sum(arena.committed for arena in arenas)
        if committed + size > self.limit:
            raise Unavailable(
                f"no room for outputs: {self.used} bytes are held by callers, {committed} of {self.limit} bytes are "
                f"committed and {size} more are needed; raise {KNOB}, or drop results that are no longer needed"
            )

    def announce(self, segment: Segment, audience: str, near: str = "") -> None:
        message: Map = segment.map(audience)
        if message.name is None:
            self._mapped.add(segment.id, segment.size, fd=os.dup(segment.fd))
            self._outbox.add(message, segment.fd)
        else:
            self._mapped.add(segment.id, segment.size, name=message.name)
            self._outbox.add(message)
        if near:
            from shmserve.workers.gpu.shared import memory_of

            memory_of(self._mapped).own(segment.id, segment.address)
        self._by_segment[segment.id] = self._arenas[audience + near]
        self.audiences[segment.id] = audience

    def withdraw(self, segment: int) -> None:
        del self._by_segment[segment]
        self.audiences.pop(segment, None)
        self._mapped.remove(segment)
        self._outbox.add(Unmap(segment))
