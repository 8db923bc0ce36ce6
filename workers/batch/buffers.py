"""Memory in which the tensors of a batch are put together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shmserve.dtypes import elements
from shmserve.shm.views import address_of

if TYPE_CHECKING:
    from shmserve.workers.batch.specs import Spec

Array = np.ndarray[Any, np.dtype[Any]]
ALIGN = 64
"""Some engines copy inputs that are not aligned to this."""


class Buffers:
    """Memory for each tensor of a model, which grows and is used again by each batch."""

    def __init__(self) -> None:
        self._buffers: dict[int, Array] = {}

    def array(self, index: int, spec: Spec, shape: tuple[int, ...]) -> Array:
        """Returns an array in the memory of a tensor, valid until the next call."""
        size = elements(shape) * spec.item
        buffer = self._buffers.get(index)
        if buffer is None or len(buffer) < size:
            memory: Array = np.empty(size + ALIGN, np.uint8)
            begin = -address_of(memory) % ALIGN
            buffer = self._buffers[index] = memory[begin : begin + size]
        array: Array = buffer[:size].view(spec.numpy).reshape(shape)
        return array
