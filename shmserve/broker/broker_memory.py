"""The broker's own memory: one arena for tensors received as frames, and one per audience for cached responses.

An audience is the set of processes that may read a segment.
Invariant: cached data of different audiences never shares a segment, and only the broker can write to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count

from shmserve.broker.segments import Segments
from shmserve.core.ledger import INTERNAL
from shmserve.core.owners.cache import Placed
from shmserve.errors import Unavailable
from shmserve.protocol.messages import OWNER_SHIFT, Handle, Map
from shmserve.shm.arena import Arena, Segment
from shmserve.shm.extents import memfd


class BrokerMemory:
    """All memory of the broker. `announce` is called with each new segment for frames, before data is placed in it."""

    def __init__(
        self, segments: Segments, frames_bytes: int, cache_bytes: int, announce: Callable[[Map], object]
    ) -> None:
        self.segments = segments
        self._numbers = count(1)
        self._cache_bytes = cache_bytes
        self._cache_arenas: dict[str, Arena] = {}
        self._arenas_by_segment: dict[int, Arena] = {}
        """The arena of each segment."""
        self._new_segment: Map | None = None
        self.frames = Arena(
            0,
            memfd.create,
            limit_bytes=frames_bytes,
            announce=lambda segment: announce(self._lend(self.frames, segment, INTERNAL)),
            setting="broker-arena-bytes",
            numbers=self._numbers,
        )

    def _lend(self, arena: Arena, segment: Segment, audience: str) -> Map:
        message = segment.map(audience)
        self.segments.lend(message, segment.fd)
        self._arenas_by_segment[segment.id] = arena
        return message

    # ------------------------------------------------------------------------------------ cached responses

    def read(self, parts: Sequence[Handle]) -> bytes | None:
        pieces = []
        for part in parts:
            arena = self._arenas_by_segment.get(part.segment) if not part.segment >> OWNER_SHIFT else None
            data = self.segments.copy(part) if arena is None else bytes(arena.memory(part))
            if data is None:
                return None
            pieces.append(data)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def place(self, data: bytes, audience: str) -> Placed | None:
        if audience.startswith("posix:"):  # these clients map segments by name, but a memfd has none
            return None
        arena = self._cache_arenas.get(audience) or self._arena_for(audience)
        try:
            block = arena.allocate(len(data))
        except Unavailable:
            return None
        block.memory()[: len(data)] = data
        new, self._new_segment = self._new_segment, None
        return Placed(block.handle(), new)

    def _arena_for(self, audience: str) -> Arena:
        def announce(segment: Segment) -> None:
            self._new_segment = self._lend(arena, segment, audience)

        arena = self._cache_arenas[audience] = Arena(
            0,
            self._make,
            limit_bytes=self._cache_bytes,
            announce=announce,
            setting="cache-config",
            numbers=self._numbers,
        )
        return arena

    def _make(self, size: int) -> memfd.MemfdExtent:
        """Limits the total of all arenas to twice the cache limit, as the segments of many audiences are only partly
        filled."""
        if size + sum(arena.committed for arena in self._cache_arenas.values()) > 2 * self._cache_bytes:
            raise Unavailable(f"cached responses occupy twice the {self._cache_bytes} bytes of --cache-config")
        return memfd.create(size, seal_future_write=True)

    # ------------------------------------------------------------------------------------ release

    def free(self, handles: Iterable[Handle]) -> None:
        for handle in handles:
            self._arenas_by_segment[handle.segment].free(handle.segment, handle.offset)

    def trim(self) -> list[int]:
        """Releases segments that have not been used since the last call, and returns their numbers."""
        gone = [number for arena in (self.frames, *self._cache_arenas.values()) for number in arena.trim_idle()]
        for number in gone:
            del self._arenas_by_segment[number]
        return gone

    def close(self) -> None:
        for arena in (self.frames, *self._cache_arenas.values()):
            arena.close()
