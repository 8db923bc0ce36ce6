"""Descriptors of segments that other processes own, kept to pass them on. The broker never maps clients' memory.

It maps only worker outputs that are sent as frames, read-only. The response cache copies data with pread.
"""

from __future__ import annotations

import os

from shmserve.errors import InvalidRequest, ServeError
from shmserve.protocol.messages import OWNER_SHIFT, Handle, Map
from shmserve.shm.extents import memfd, posix
from shmserve.shm.mapped import Mapped


class Segments:
    def __init__(self) -> None:
        self._descriptors: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._names: dict[int, tuple[str, int | None]] = {}
        """Segment -> the name of a worker's named segment, and the descriptor that holds it."""
        self._mapped = Mapped()

    def add(self, peer: int, message: Map, descriptor: int) -> None:
        """Takes ownership of the descriptor. Raises InvalidRequest unless it is a sealed memfd of the announced
        size."""
        try:
            if message.segment >> OWNER_SHIFT != peer or message.segment in self._descriptors:
                raise InvalidRequest(
                    f"segment {message.segment} is not a new one in this connection's range; its upper bits must be "
                    f"{peer}, the owner number from Welcome"
                )
            memfd.verify(descriptor, message.size)
        except (ServeError, OSError):
            os.close(descriptor)
            raise
        self._descriptors[message.segment] = descriptor
        self._sizes[message.segment] = message.size

    def add_named(self, message: Map, pid: int) -> None:
        """Records a worker's named segment, and holds it until `forget` unlinks it. The worker may exit before clients
        have opened the segment, and any server that starts sweeps the names of exited processes."""
        if message.name is not None and posix.is_made_by(pid, message.name):
            self._names[message.segment] = message.name, posix.hold(message.name)

    def worker_ended(self, pid: int) -> None:
        """Unlinks named segments that the worker created but did not announce, as no handle refers to them. Pid 0: the
        process was never started."""
        if pid:
            posix.sweep(pid)

    def lend(self, message: Map, descriptor: int) -> None:
        """Adds one of the broker's own segments, with a duplicate of the descriptor, which stays with the arena."""
        self._descriptors[message.segment] = os.dup(descriptor)
        self._sizes[message.segment] = message.size

    def descriptor(self, segment: int) -> int | None:
        return self._descriptors.get(segment)

    def read(self, handle: Handle) -> bytes:
        """Copies a worker's output, to be sent as a frame."""
        segment = handle.segment
        if segment not in self._mapped:
            self._mapped.add(segment, self._sizes[segment], fd=os.dup(self._descriptors[segment]))
        return bytes(self._mapped.memory(handle))

    def copy(self, handle: Handle) -> bytes | None:
        """Copies the bytes without mapping memory that other processes may write. None for a named segment, or one on a
        GPU."""
        descriptor = self._descriptors.get(handle.segment)
        return os.pread(descriptor, handle.size, handle.offset) if descriptor is not None else None

    def forget(self, segment: int) -> None:
        descriptor = self._descriptors.pop(segment, None)
        if descriptor is not None:
            os.close(descriptor)
            del self._sizes[segment]
        if segment in self._mapped:
            self._mapped.remove(segment)
        name, held = self._names.pop(segment, ("", None))
        if name:
            posix.remove(name)
        if held is not None:
            os.close(held)

    def close(self) -> None:
        for segment in [*self._descriptors, *self._names]:
            self.forget(segment)
        self._mapped.close()
