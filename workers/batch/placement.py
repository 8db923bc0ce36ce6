"""Outputs that go into memory of the caller's own, where it asked for that: on the host, or on this process's GPU.

The rule: nothing is written outside of what the caller named, and on the host what does not fit there is not written at
all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shmserve.errors import InvalidRequest
from shmserve.protocol.messages import Handle

if TYPE_CHECKING:
    from shmserve.shm.mapped import Mapped
    from shmserve.workers.batch.specs import Spec
    from shmserve.workers.gpu.shared import DevicePiece

Array = np.ndarray[Any, np.dtype[Any]]
_BYTE = np.dtype(np.uint8)


class Placing:
    """The memory of callers, as far as a model's outputs go there."""

    def __init__(self, model: str, mapped: Mapped) -> None:
        self._model = model
        self._mapped = mapped

    def is_on_device(self, place: Handle) -> bool:
        return place.segment in self._mapped.on_device

    def address(self, place: Handle) -> int:
        """Where a place on this process's GPU is. HandleLost: it is not there."""
        from shmserve.workers.gpu.shared import memory_of  # few models need it

        return memory_of(self._mapped).address(place)

    def writable(self, spec: Spec, place: Handle, shape: tuple[int, ...], size: int) -> Array:
        """A place on the host, as an array for an output of this shape and so many bytes."""
        self._check(spec, place, size)
        used = Handle(place.segment, place.offset, size)
        if not spec.item:
            return self._mapped.writable(used, _BYTE, (size,))
        return self._mapped.writable(used, spec.numpy, shape)

    def write(self, spec: Spec, place: Handle, shape: tuple[int, ...], source: Array) -> None:
        """Copies an output of this shape, whose bytes are `source`, to a place wherever it is."""
        if not self.is_on_device(place):
            np.copyto(self.writable(spec, place, shape, source.nbytes), source)
            return
        from shmserve.workers.gpu.shared import memory_of

        self._check(spec, place, source.nbytes)
        memory_of(self._mapped).store(place, source)

    def move(self, target: int, piece: DevicePiece) -> None:
        """Copies what is on this process's GPU to an address there."""
        from shmserve.workers.gpu.shared import memory_of

        memory_of(self._mapped).move(target, piece)

    def spread(self, source: int, places: Sequence[Handle], sizes: Sequence[int]) -> None:
        """Copies what lies one behind the other at an address of this process's GPU to places there."""
        from shmserve.workers.gpu.shared import memory_of

        memory_of(self._mapped).spread(source, places, sizes)

    def _check(self, spec: Spec, place: Handle, size: int) -> None:
        if place.size < size:
            raise InvalidRequest(
                f"output '{spec.name}' of model '{self._model}' has {size} bytes; the memory given for it has "
                f"{place.size}"
            )
