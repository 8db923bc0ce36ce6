"""Writes outputs into memory that the caller provides, on the host or on this process's GPU.

Invariant: nothing is written outside the region that the caller named, and on the host an output that does not fit is
not written at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shmserve.errors import InvalidRequest
from shmserve.protocol.messages import Handle

if TYPE_CHECKING:
    from shmserve.shm.mapped import Mapped
    from shmserve.workers.batch.specs import Spec
    from shmserve.workers.gpu.shared import DeviceMemory

Array = np.ndarray[Any, np.dtype[Any]]
_BYTE = np.dtype(np.uint8)


class Placing:
    """Access to the memory that callers provide for a model's outputs."""

    def __init__(self, model: str, mapped: Mapped) -> None:
        self._model = model
        self._mapped = mapped

    def is_on_device(self, place: Handle) -> bool:
        return place.segment in self._mapped.on_device

    @property
    def gpu(self) -> DeviceMemory:
        """The memory of this process's GPU. Raises HandleLost if the model is not on one."""
        from shmserve.workers.gpu.shared import memory_of  # without tensors on a GPU it is not imported

        return memory_of(self._mapped)

    def writable(self, spec: Spec, place: Handle, shape: tuple[int, ...], size: int) -> Array:
        """Returns a region on the host as an array for an output of this shape and `size` bytes."""
        self._check(spec, place, size)
        used = Handle(place.segment, place.offset, size)
        if not spec.item:
            return self._mapped.writable(used, _BYTE, (size,))
        return self._mapped.writable(used, spec.numpy, shape)

    def write(self, spec: Spec, place: Handle, shape: tuple[int, ...], source: Array) -> None:
        """Copies an output of this shape, encoded as `source`, to a region on the host or the GPU."""
        if not self.is_on_device(place):
            np.copyto(self.writable(spec, place, shape, source.nbytes), source)
            return
        self._check(spec, place, source.nbytes)
        self.gpu.store(place, source)

    def _check(self, spec: Spec, place: Handle, size: int) -> None:
        if place.size < size:
            raise InvalidRequest(
                f"output '{spec.name}' of model '{self._model}' has {size} bytes; the memory given for it has "
                f"{place.size}"
            )
