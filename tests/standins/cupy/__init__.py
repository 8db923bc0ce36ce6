"""The required part of cupy: its binding of the CUDA runtime, and arrays as far as others create them."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from . import cuda

__all__ = ["asarray", "cuda", "from_dlpack"]


class _Array:
    def __init__(self, interface: dict[str, Any], owner: Any) -> None:
        self.__cuda_array_interface__ = interface
        self.owner = owner
        self.shape = tuple(interface["shape"])
        self.dtype = np.dtype(interface["typestr"])
        self.nbytes = int(np.prod(self.shape)) * self.dtype.itemsize
        self.flags = SimpleNamespace(c_contiguous=interface.get("strides") is None)

    def get(self) -> Any:
        """A copy on the host."""
        made, runtime = np.empty(self.shape, self.dtype), cuda.runtime
        source = self.__cuda_array_interface__["data"][0]
        runtime.memcpyAsync(made.ctypes.data, source, self.nbytes, runtime.memcpyDeviceToHost, 0)
        runtime.streamSynchronize(0)
        return made

    def __dlpack__(self, **how: Any) -> Any:
        return "capsule", self.__cuda_array_interface__["data"][0], how


def asarray(owner: Any) -> _Array:
    return _Array(owner.__cuda_array_interface__, owner)


def from_dlpack(owner: Any) -> _Array:
    """`described` is the CUDA array interface of the capsule's memory."""
    return _Array(owner.described, owner)
