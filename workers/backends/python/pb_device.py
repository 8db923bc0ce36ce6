"""Memory on a GPU that a Python model allocated, as a piece of an output. Imported when a model makes the first one."""

from __future__ import annotations

from typing import Any

import numpy as np

from shmserve.gpu.interface import GpuDevice
from shmserve.gpu.runtime import arrays, load
from shmserve.workers.gpu.api import open_device
from shmserve.workers.gpu.shared import DevicePiece

Array = np.ndarray[Any, np.dtype[Any]]


class _ModelMemory:
    """Device memory that the model allocated. `array`, CuPy's view of it, keeps it alive."""

    def __init__(self, array: Any) -> None:
        self._array = array

    @property
    def cuda(self) -> GpuDevice:
        return open_device()

    def fetch(self, piece: DevicePiece) -> Array:
        host: Array = self._array.get()
        return host.reshape(piece.shape)


def device_array(source: Any) -> Any:
    """Returns CuPy's view of a DLPack source on the process's GPU; None if it cannot be used there."""
    if source.__dlpack_device__()[1] != 0:
        return None
    try:
        array = arrays().from_dlpack(source)
    except (ImportError, BufferError, RuntimeError, TypeError, ValueError):  # the library may copy it to the host
        return None
    load().deviceSynchronize()  # a capsule does not name the stream that writes it
    return array


def piece_of(array: Any) -> DevicePiece:
    return DevicePiece(_ModelMemory(array), array.__cuda_array_interface__["data"][0], array.dtype, array.shape)
