"""The memory of this worker's outputs: one arena for each audience, so that no process can map another audience's
tensors.

Invariants: the audience decides the kind of memory: "internal" and "uid:N" get memfds, "posix..." gets named segments.
One limit applies to the sum of all arenas in host memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import TYPE_CHECKING

from shmserve.errors import InvalidRequest, ServeError, Unavailable
from shmserve.protocol.messages import Handle, Map, Unmap
from shmserve.repo.backends import CUDA_POOL_LIMIT, OUTPUT_LIMIT
from shmserve.shm.arena import Arena
from shmserve.shm.extents import memfd, posix
from shmserve.workers.process.log import log_message

if TYPE_CHECKING:
    from shmserve.shm.arena import Block, Segment
    from shmserve.shm.extents.base import Extent
    from shmserve.shm.mapped import Mapped
    from shmserve.workers.gpu.shared import DeviceMemory
    from shmserve.workers.outbox import Outbox

INTERNAL = "internal"
"""The audience of memory that only workers read."""
LIMIT_BYTES = 4 * 1024 * 1024 * 1024
NEAR_BYTES = 1024 * 1024 * 1024


def near_limit(text: str, device: int) -> int:
    """Parses `GPU:BYTES,...`, the broker's flag, where -1 means all GPUs. An entry for this GPU takes precedence."""
    limit = NEAR_BYTES
    pairs = [part.split(":") for part in text.split(",") if part]
    for gpu, size in sorted(pairs, key=lambda pair: pair[0] != "-1"):
        if int(gpu) in (-1, device):
            limit = int(size)
    return limit


class Arenas:
    """Arenas by audience, created on first use. Segments are announced to the broker and also mapped here, because
    outputs of one batch may be inputs of the next."""

    def __init__(
        self,
        owner: int,
        outbox: Outbox | None,
        mapped: Mapped,
        limit: int = LIMIT_BYTES,
        near_limit: int = NEAR_BYTES,
    ) -> None:
        """`outbox`: None without a broker. `near_limit`: the limit on this process's GPU."""
        self.limit = limit
        self.near_limit = near_limit
        self._near_full = False
        self._numbers = count(1)
        """Segment numbers, shared by all arenas."""
        self._owner = owner
        self._outbox = outbox
        self._mapped = mapped
        self._arenas: dict[str, Arena] = {}
        self._near: dict[str, Arena] = {}
        """The arenas on this process's GPU."""
        self._by_segment: dict[int, Arena] = {}
        self.audiences: dict[int, str] = {}
        """The audience of each known segment: this worker's and those mapped from other processes."""

    def allocate(self, audience: str, size: int) -> Block:
        arena = self._arenas.get(audience) or self._new(audience)
        return arena.allocate(size)

    def allocate_near(self, audience: str, size: int) -> Block:
        """Allocates on this process's GPU, for readers that can map its memory. The block's address is a device
        address. Raises Unavailable if the limit is reached; the caller then uses the host, and the first time is
        logged."""
        arena = self._near.get(audience)
        if arena is None:
            arena = self._near[audience] = self._arena(audience, self._on_gpu, on_gpu=True)
        try:
            return arena.allocate(size)
        except Unavailable as error:
            if self.near_limit and not self._near_full:
                self._near_full = True
                log_message(f"outputs on the GPU are copied through the host: {error}", "warning")
            raise

    def split(self, block: Block, sizes: Sequence[int]) -> list[Block]:
        return self._by_segment[block.segment].split(block, sizes)

    def owns(self, segment: int) -> bool:
        return segment in self._by_segment

    def free(self, handles: Iterable[Handle]) -> None:
        """Frees returned blocks. An invalid handle is logged and otherwise ignored."""
        for segment, offset, size in [(handle.segment, handle.offset, handle.size) for handle in handles]:
            arena = self._by_segment.get(segment)
            try:
                if arena is None:
                    raise InvalidRequest(f"segment {segment} is not one of this worker's")
                arena.free(segment, offset, size)
            except ServeError as error:
                log_message(f"a returned handle cannot be freed: {error}")

    def trim(self) -> None:
        """Frees host memory that has not been used since the last call."""
        for arena in self._arenas.values():
            for segment in arena.trim_idle():
                self._withdraw(segment)

    def close(self, keep_names: bool = False) -> None:
        """`keep_names`: POSIX segments in use keep their names, which the broker removes when they are no longer
        used."""
        for arena in (*self._arenas.values(), *self._near.values()):
            for segment in arena.segments if keep_names else ():
                if isinstance(segment.extent, posix.PosixExtent) and segment.blocks.used:
                    segment.extent.keep_name()
            arena.close()

    @property
    def used(self) -> int:
        """Bytes of outputs that are still held."""
        return sum(arena.used for arena in (*self._arenas.values(), *self._near.values()))

    # ------------------------------------------------------------------------------------ segments

    def _arena(self, audience: str, make: Callable[[int], Extent], on_gpu: bool = False) -> Arena:
        """`on_gpu`: in GPU memory, which must not be freed while other processes have it open, so it is kept until
        close."""

        def announce(segment: Segment) -> None:
            self._announce(segment, audience)
            if on_gpu:
                self._gpu.own(segment.id, segment.address)
            self._by_segment[segment.id] = arena

        arena = Arena(
            self._owner,
            make,
            limit_bytes=self.near_limit if on_gpu else self.limit,
            announce=announce,
            withdraw=None if on_gpu else self._withdraw,
            setting=CUDA_POOL_LIMIT if on_gpu else OUTPUT_LIMIT,
            numbers=self._numbers,
            what="GPU memory" if on_gpu else "shared memory",
        )
        return arena

    def _new(self, audience: str) -> Arena:
        make = self._memfd
        if audience.startswith("posix"):
            # The user's own server may open it; any other user only reads it, through the service's group.
            uid = audience.rpartition(":")[2]
            make = self._posix_private if uid in ("", str(os.geteuid())) else self._posix_group
        arena = self._arenas[audience] = self._arena(audience, make)
        return arena

    def _on_gpu(self, size: int) -> Extent:
        """Enforces the limit across arenas. Nothing can be freed to make room, because others may have it open."""
        from shmserve.gpu.interface import UNIT_BYTES, whole_units  # without tensors on a GPU it is not imported

        size = whole_units(size)
        committed = sum(arena.committed for arena in self._near.values())
        if committed + size > self.near_limit:
            raise Unavailable(
                f"no room for {size} bytes of GPU memory, which is allocated in units of {UNIT_BYTES}: {committed} of "
                f"{self.near_limit} bytes are committed; raise {CUDA_POOL_LIMIT}"
            )
        return self._gpu.make(size)

    @property
    def _gpu(self) -> DeviceMemory:
        from shmserve.workers.gpu.shared import memory_of  # without tensors on a GPU it is not imported

        return memory_of(self._mapped)

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
        """Enforces the limit across arenas: frees idle segments of all of them before a request fails."""
        arenas = self._arenas.values()
        committed = sum(arena.committed for arena in arenas)
        if committed + size <= self.limit:
            return
        for arena in arenas:
            for segment in arena.trim():
                self._withdraw(segment)
        committed = sum(arena.committed for arena in arenas)
        if committed + size > self.limit:
            raise Unavailable(
                f"no room for outputs: {self.used} bytes are held by callers, {committed} of {self.limit} bytes are "
                f"committed and {size} more are needed; raise {OUTPUT_LIMIT}, or drop results that are no longer needed"
            )

    def _announce(self, segment: Segment, audience: str) -> None:
        message: Map = segment.map(audience)
        if message.name is None:
            self._mapped.add(segment.id, segment.size, fd=os.dup(segment.fd))
            self._send(message, segment.fd)
        else:
            self._mapped.add(segment.id, segment.size, name=message.name)
            self._send(message)
        self.audiences[segment.id] = audience

    def _withdraw(self, segment: int) -> None:
        del self._by_segment[segment]
        self.audiences.pop(segment, None)
        self._mapped.remove(segment)
        self._send(Unmap(segment))

    def _send(self, message: Map | Unmap, descriptor: int | None = None) -> None:
        if self._outbox is not None:
            self._outbox.add(message, descriptor)
