"""Arrays of cupy, as far as models and clients of the tests use them: elementwise, contiguous, one device.

Invariant: as in the real library, an operation is queued in the current stream, and a result exists only once something
has waited for that stream.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from .cuda import current_stream, runtime


class Capsule(tuple[Any, ...]):
    """A DLPack capsule: ("capsule", address, the arguments of __dlpack__). `described`: its CUDA array interface."""

    described: dict[str, Any]


class ndarray:
    """`owner` keeps the memory: another array, or an object of another library."""

    def __init__(self, shape: Any, dtype: Any, address: int | None = None, owner: Any = None) -> None:
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.dtype = np.dtype(dtype)
        self.ndim = len(self.shape)
        self.size = int(np.prod(self.shape))
        self.nbytes = self.size * self.dtype.itemsize
        self.owner = owner if address is not None else _Allocation(max(self.nbytes, 1))
        self.address = self.owner.address if address is None else address
        self.flags = SimpleNamespace(c_contiguous=True)
        self.data = SimpleNamespace(ptr=self.address)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape, "typestr": self.dtype.str, "data": (self.address, False), "strides": None,
            "version": 3, "stream": current_stream() or 1,
        }  # fmt: skip

    def __dlpack__(self, **how: Any) -> Capsule:
        """The real library lets the consumer's stream wait for the current one."""
        runtime.streamSynchronize(current_stream())
        made = Capsule(("capsule", self.address, how))
        made.described = self.__cuda_array_interface__
        return made

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def get(self) -> Any:
        """A copy on the host."""
        made, stream = np.empty(self.shape, self.dtype), current_stream()
        runtime.memcpyAsync(made.ctypes.data, self.address, self.nbytes, runtime.memcpyDeviceToHost, stream)
        runtime.streamSynchronize(stream)
        return made

    def fill(self, value: Any) -> None:
        self[...] = value

    def __getitem__(self, key: Any) -> ndarray:
        part = _view(self)[key]
        assert part.flags.c_contiguous, "the stand-in has contiguous arrays only"
        return ndarray(part.shape, part.dtype, part.__array_interface__["data"][0], self)

    def __setitem__(self, key: Any, value: Any) -> None:
        view, source = _view(self)[key], _view(value) if isinstance(value, ndarray) else value
        _queue(lambda: np.copyto(view, source), self, value)

    def __len__(self) -> int:
        return int(self.shape[0])

    def _with(self, operation: Callable[..., Any], other: Any) -> ndarray:
        left, right = _view(self), _view(other) if isinstance(other, ndarray) else other
        made = ndarray(np.broadcast(left, right).shape, self.dtype)
        target = _view(made)
        _queue(lambda: operation(left, right, out=target), self, other, made)
        return made

    def __add__(self, other: Any) -> ndarray:
        return self._with(np.add, other)

    def __mul__(self, other: Any) -> ndarray:
        return self._with(np.multiply, other)


class _Allocation:
    def __init__(self, size: int) -> None:
        self.address = runtime.malloc(size)
        self._free = runtime.free
        self._state = runtime.state

    def __del__(self) -> None:
        if self.address in self._state.device:  # a test may have ended the device
            self._free(self.address)


def _view(array: ndarray) -> Any:
    memory = (ctypes.c_char * max(array.nbytes, 1)).from_address(array.address)
    return np.ndarray(array.shape, array.dtype, memory)


def _queue(work: Callable[[], object], *kept: Any) -> None:
    """`kept`: what must live until the work is done; the real library's pool ensures that."""

    runtime.state.stream(current_stream()).add(lambda: (work(), kept)[0])


def asarray(source: Any, dtype: Any = None) -> ndarray:
    if isinstance(source, ndarray):
        return source
    interface = getattr(source, "__cuda_array_interface__", None)
    if interface is not None:
        return _over(interface, source)
    values = np.ascontiguousarray(source, dtype)
    made = ndarray(values.shape, values.dtype)
    made[...] = values.copy()
    return made


def from_dlpack(source: Any) -> ndarray:
    """`described`: the CUDA array interface of an object that tests make, or of a capsule."""
    described = getattr(source, "described", None) or source.__dlpack__(stream=current_stream() or 1).described
    return _over(described, source)


def _over(interface: dict[str, Any], owner: Any) -> ndarray:
    if interface.get("stream") is not None:
        runtime.streamSynchronize(interface["stream"])
    made = ndarray(interface["shape"], interface["typestr"], interface["data"][0], owner)
    made.flags.c_contiguous = interface.get("strides") is None
    return made


def asnumpy(array: Any) -> Any:
    return array.get() if isinstance(array, ndarray) else np.asarray(array)


def empty(shape: Any, dtype: Any = np.float64) -> ndarray:
    return ndarray(shape, dtype)


def full(shape: Any, value: Any, dtype: Any = np.float64) -> ndarray:
    made = ndarray(shape, dtype)
    made[...] = value
    return made


def zeros(shape: Any, dtype: Any = np.float64) -> ndarray:
    return full(shape, 0, dtype)
