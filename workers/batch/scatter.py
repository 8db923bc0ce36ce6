"""What the outputs of all batches of a model share: buffers, checks, arenas, and memory that callers provide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shmserve.errors import InvalidRequest
from shmserve.protocol.messages import Handle, Tensor
from shmserve.workers.batch.buffers import Buffers
from shmserve.workers.batch.output_checks import OutputChecks

if TYPE_CHECKING:
    from shmserve.shm.mapped import Mapped
    from shmserve.workers.batch.specs import Spec
    from shmserve.workers.gpu.shared import DeviceMemory
    from shmserve.workers.model_calls.calls import OutgoingCalls
    from shmserve.workers.output_arenas import Arenas

Array = np.ndarray[Any, np.dtype[Any]]
_BYTE = np.dtype(np.uint8)


class Scatter:
    """State shared by all batches of a model. Owns the buffers of outputs that are copied into messages."""

    def __init__(
        self,
        model: str,
        specs: Sequence[Spec],
        arenas: Arenas,
        mapped: Mapped,
        labels: Sequence[Sequence[str]] = (),
        calls: OutgoingCalls | None = None,
        strict: bool = True,
    ) -> None:
        """`labels`: the class labels of each output, empty if it has none. `calls`: arrays that came from a call are
        passed on by handle, without a copy. `strict`: outputs must match the configuration."""
        self.calls = calls
        self.checks = OutputChecks(model, strict)
        self.model = model
        self.specs = tuple(specs)
        self.labels = tuple(labels) or ((),) * len(self.specs)
        self.names = {spec.name: index for index, spec in enumerate(self.specs)}
        self.arenas = arenas
        self.placing = Placing(model, mapped)
        self.buffers, self._others = Buffers(), Buffers()

    def exchange_buffers(self) -> None:
        """Called when a batch begins while the one before may still be written to its buffers."""
        self.buffers, self._others = self._others, self.buffers

    def release(self, tensors: Sequence[Tensor | None]) -> None:
        """Frees outputs that will not be sent, as far as they are in this worker's arenas."""
        for tensor in tensors:
            if tensor is None or not isinstance(tensor.data, tuple):
                continue
            if self.calls is None or not self.calls.not_passed_on(tensor):
                self.arenas.free([part for part in tensor.data if self.arenas.owns(part.segment)])


class Placing:
    """Writes outputs into memory that callers provide, on the host or on this process's GPU.

    Invariant: nothing is written outside the region that the caller named, and on the host an output that does not fit
    is not written at all.
    """

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
