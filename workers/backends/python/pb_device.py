"""Memory on a GPU that a Python model allocated, as a piece of an output. Imported when a model makes the first one."""

from __future__ import annotations

from typing import Any

import numpy as np

from shmserve.gpu.runtime import arrays, load
from shmserve.workers.gpu.shared import DevicePiece

Array = np.ndarray[Any, np.dtype[Any]]


class OwnPiece(DevicePiece):
    """Device memory that the model allocated. It is complete, and `array`, CuPy's view of it, keeps it alive."""

    __slots__ = ("array",)

    def __init__(self, array: Any) -> None:
        self.array = array
        self.address = array.__cuda_array_interface__["data"][0]
        self.dtype = array.dtype
        self.shape = array.shape
        self.nbytes = array.nbytes

    def host(self) -> Array:
        found: Array = self.array.get()
        return found


def own_piece(source: Any) -> OwnPiece | None:
    """Returns the memory of a DLPack source on the process's GPU; None if it cannot be used there."""
    if source.__dlpack_device__()[1] != 0:
        return None
    try:
        array = arrays().from_dlpack(source)
    except (ImportError, BufferError, RuntimeError, TypeError, ValueError):  # the library may copy it to the host
        return None
    load().deviceSynchronize()  # a capsule does not name the stream that writes it
    return OwnPiece(array)
