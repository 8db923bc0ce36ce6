"""Tensors of Python models: named numpy arrays, tensors on the GPU of the instance, and DLPack import and export.

Invariant: a tensor never copies its source, unless a consumer could write to read-only memory. Only models that request
it get inputs on the GPU; everything else is in host memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from shmserve import dtypes
from shmserve.repo.parameters import HOST_INPUTS

if TYPE_CHECKING:
    from shmserve.protocol.worker_messages import Work
    from shmserve.workers.gpu.shared import DevicePiece

Array = np.ndarray[Any, np.dtype[Any]]

TRITONSERVER_MEMORY_CPU = 0
TRITONSERVER_MEMORY_GPU = 2

_CPU, _ON_GPU = 1, (2, 10)
"""DLPack device types: host memory, and GPUs (CUDA, ROCm)."""
_BF16 = dtypes.to_numpy("BF16")

# A DLPack capsule holds a struct with the device type and number at this offset, followed 12 bytes later by the element
# type code, one byte.
_CAPSULES = ((b"dltensor", 8), (b"dltensor_versioned", 40))
_TO_CODE = 12
_CODE_UINT, _CODE_BFLOAT = 1, 4
_is_valid: Callable[..., int] = ctypes.pythonapi.PyCapsule_IsValid
_pointer: Callable[..., int] = ctypes.pythonapi.PyCapsule_GetPointer
ctypes.pythonapi.PyCapsule_IsValid.argtypes = [ctypes.py_object, ctypes.c_char_p]
ctypes.pythonapi.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
ctypes.pythonapi.PyCapsule_GetPointer.restype = ctypes.c_void_p


class TritonModelException(Exception):
    """Raised by the functions and classes of this module."""


def text_of(value: Any, what: str = "name") -> str:
    """Converts to str. Elements of string tensors are bytes, and models use them as names."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    raise TypeError(f"{what} must be a string, not {type(value).__name__}")


def _named(name: Any) -> str:
    text = text_of(name)
    if not text:
        raise TritonModelException("Tensor name cannot be an empty string.")
    return text


class Tensor:
    """A named numpy array. Input arrays are read-only; large ones are in the caller's memory."""

    __slots__ = ("_array", "_name", "_work")

    _work: Work
    """The request that it belongs to. Set only for inputs."""

    def __init__(self, name: str, numpy_array: Array) -> None:
        if not isinstance(numpy_array, np.ndarray):
            raise TypeError(f"Tensor '{name}' needs a numpy array, not {type(numpy_array).__name__}")
        self._name = name if type(name) is str and name else _named(name)
        self._array = numpy_array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Array:
        return self._array

    def shape(self) -> list[int]:
        return list(self._array.shape)

    def triton_dtype(self) -> int:
        return dtypes.BY_NUMBER.index(dtypes.from_numpy(self._array.dtype))

    def is_cpu(self) -> bool:
        return True

    def to_dlpack(self) -> Any:
        return self.__dlpack__()

    def __dlpack__(self, stream: Any = None, **options: Any) -> Any:
        """Exports the tensor. Older consumers do not support read-only memory, so they get a copy of a
        read-only array."""
        array = self._array
        if array.dtype.hasobject:
            raise TritonModelException(f"tensor '{self._name}' holds strings, which DLPack cannot describe")
        if not array.flags.writeable and "max_version" not in options:
            array = array.copy()
        brain = array.dtype == _BF16 and array.dtype != np.dtype("uint16")
        try:
            capsule = (array.view(np.uint16) if brain else array).__dlpack__(stream=stream, **options)
        except (BufferError, TypeError) as error:
            raise TritonModelException(f"tensor '{self._name}' cannot be given as DLPack: {error}") from error
        if brain:
            _code_of(capsule).value = _CODE_BFLOAT
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU, 0

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> Tensor:
        """Creates a tensor from an object with `__dlpack__`, or a capsule. It must be contiguous. GPU memory stays on
        the GPU until it is known where it will be read. If it cannot be used there, it is copied to the host, provided
        that its library supports this."""
        name = _named(name)
        try:
            source = tensor if hasattr(tensor, "__dlpack__") else _Capsule(tensor)
            device = source.__dlpack_device__()
            if int(device[0]) in _ON_GPU:
                from shmserve.workers.backends.python.pb_device import device_array, piece_of  # few models need it

                on_device = device_array(source)
                if on_device is not None:
                    check_contiguous(name, on_device)
                    return DeviceTensor(name, piece_of(on_device), dtypes.from_numpy(on_device.dtype))
            if int(device[0]) != _CPU:
                source = _to_host(name, source, device)
            array = _from_capsule(_capsule_of(source))
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise TritonModelException(f"tensor '{name}' cannot be read as DLPack: {error}") from error
        check_contiguous(name, array)
        return Tensor(name, array)


class DeviceTensor(Tensor):
    """A tensor on the GPU: in the sender's memory, which the model must not write to, or in the model's own."""

    __slots__ = ("_host", "_wire", "piece")

    def __init__(self, name: str, piece: DevicePiece, wire: str) -> None:
        self._name = name
        self.piece = piece
        self._wire = wire
        self._host: Array | None = None

    @property
    def _array(self) -> Array:  # type: ignore[override]
        """A copy on the host, for code that cannot use device memory."""
        if self._host is None:
            self._host = self.piece.host()
        return self._host

    def as_numpy(self) -> Array:
        advice = f", or leave out {HOST_INPUTS.name}" if hasattr(self, "_work") else ""
        raise TritonModelException(
            f"tensor '{self._name}' is on a GPU and cannot be a numpy array: use to_dlpack(){advice}"
        )

    def shape(self) -> list[int]:
        return list(self.piece.shape)

    def triton_dtype(self) -> int:
        return dtypes.BY_NUMBER.index(self._wire)

    def is_cpu(self) -> bool:
        return False

    def __dlpack__(self, stream: Any = None, **options: Any) -> Any:
        from shmserve.gpu.runtime import arrays

        return arrays().asarray(self.piece).__dlpack__(stream=stream, **options)

    def __dlpack_device__(self) -> tuple[int, int]:
        from shmserve.gpu.runtime import load, platform_of

        return platform_of(load()).dlpack, 0


def check_contiguous(name: str, array: Any) -> None:
    if not array.flags.c_contiguous:
        raise TritonModelException(f"tensor '{name}' is not contiguous; DLPack tensors must be")


class _Capsule:
    """Wraps a bare DLPack capsule in the protocol that libraries expect."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule
        self._device = _device_of(capsule)

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


def _capsule_of(source: Any) -> Any:
    """Returns a capsule that can be marked read-only, if its library supports that."""
    try:
        return source.__dlpack__(max_version=(1, 0))
    except TypeError:
        return source.__dlpack__()


def _from_capsule(capsule: Any) -> Array:
    """Imports a capsule. numpy does not support bfloat16, so it is shown as an integer of the same size."""
    code = _code_of(capsule)
    brain = code.value == _CODE_BFLOAT
    if brain:
        code.value = _CODE_UINT
    array = np.from_dlpack(_Capsule(capsule))
    return array.view(_BF16) if brain else array


def _code_of(capsule: Any) -> ctypes.c_uint8:
    return ctypes.c_uint8.from_address(_device_at(capsule) + _TO_CODE)


def _device_of(capsule: Any) -> tuple[int, int]:
    kind, number = (ctypes.c_int32 * 2).from_address(_device_at(capsule))
    return kind, number


def _device_at(capsule: Any) -> int:
    for name, offset in _CAPSULES:
        if _is_valid(capsule, name):
            return _pointer(capsule, name) + offset
    raise TypeError("not a DLPack capsule, or already consumed")


def _to_host(name: str, source: Any, device: tuple[int, int]) -> Any:
    """Copies to the host with the method of PyTorch (`cpu`) or CuPy (`get`)."""
    for method in ("cpu", "get"):
        function = getattr(source, method, None)
        if callable(function):
            return function()
    raise TritonModelException(
        f"tensor '{name}' is on device {tuple(map(int, device))}; give one in host memory (1, 0), or one that can be "
        "copied there"
    )


class PreferredMemory:
    """The model's preferred memory for the outputs of a call. It has no effect: outputs are in host memory."""

    __slots__ = ("device_id", "kind")

    def __init__(self, preferred_memory_type: int, preferred_device_id: int = 0) -> None:
        self.kind = preferred_memory_type
        self.device_id = preferred_device_id
