"""Arrays on a GPU as in other libraries, in the memory of the fake CUDA."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from shmserve.session.gpu import tensors

Array = np.ndarray[Any, np.dtype[Any]]


class Foreign:
    """An array of a library, somewhere in its pool, written in one of its streams: its values exist only after waiting
    for the stream."""

    def __init__(self, runtime: Any, array: Array, offset: int = 512) -> None:
        self._runtime = runtime
        self.pool = runtime.malloc(array.nbytes + offset)
        self.stream = runtime.streamCreateWithFlags(1)
        self._source = np.ascontiguousarray(array)
        address = self.pool + offset
        runtime.memcpyAsync(address, self._source.ctypes.data, array.nbytes, runtime.memcpyHostToDevice, self.stream)
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": array.shape,
            "typestr": array.dtype.str,
            "data": (address, False),
            "version": 3,
            "stream": self.stream,
        }

    def read(self) -> Array:
        """The current values."""
        interface = self.__cuda_array_interface__
        self._runtime.streamSynchronize(self.stream)
        return read(interface)

    def close(self) -> None:
        self._runtime.streamSynchronize(self.stream)
        self._runtime.streamDestroy(self.stream)
        self._runtime.free(self.pool)


def read(interface: dict[str, Any]) -> Array:
    """The bytes at the address of the interface."""
    dtype, shape = np.dtype(interface["typestr"]), interface["shape"]
    size = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(ctypes.string_at(interface["data"][0], size), dtype).reshape(shape)


def view(memory: Any) -> Array:
    """The memory itself, since that of the fakes is on the host."""
    interface = memory.__cuda_array_interface__
    dtype, size = np.dtype(interface["typestr"]), int(np.prod(interface["shape"]))
    raw = (ctypes.c_uint8 * (size * dtype.itemsize)).from_address(interface["data"][0])
    return np.frombuffer(raw, dtype).reshape(interface["shape"])


def write(interface: dict[str, Any], array: Array) -> None:
    ctypes.memmove(interface["data"][0], np.ascontiguousarray(array).ctypes.data, array.nbytes)


def end(runtime: Any) -> None:
    """Frees exports of clients. The library keeps them, because it cannot know when others have closed them; a test
    can."""
    tensors._spare.clear()  # noqa: SLF001 - the library keeps them for good
    for address in list(runtime.state.device):
        runtime.free(address)
