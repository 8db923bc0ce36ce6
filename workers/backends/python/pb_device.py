"""Tensors of python models that are on their GPU, and stay there: taken and given by DLPack, as with the server whose
API this is.

The rule: only models that have asked for it get inputs so; what cannot be taken or given so is in host memory, as ever.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shmserve.dtypes import from_numpy
from shmserve.repo.config.schema import HOST_ONLY
from shmserve.workers.backends.python.pb_tensor import (
    CUDA,
    NUMBERS,
    Array,
    Tensor,
    TritonModelException,
    check_contiguous,
)
from shmserve.workers.gpu.shared import DevicePiece

if TYPE_CHECKING:
    from shmserve.workers.backends.python.pb_requests import InferenceRequest


class DeviceTensor(Tensor):
    """A tensor in memory of its sender, which the model must not write, or in the model's own."""

    __slots__ = ("_host", "_wire", "piece")

    def __init__(self, name: str, piece: DevicePiece, wire: str) -> None:
        self._name = name
        self.piece = piece
        self._wire = wire
        self._host: Array | None = None

    @property
    def _array(self) -> Array:  # type: ignore[override]
        """On the host, for who does not take it there."""
        if self._host is None:
            self._host = self.piece.host()
        return self._host

    def as_numpy(self) -> Array:
        advice = f", or leave out {HOST_ONLY}" if hasattr(self, "_work") else ""
        raise TritonModelException(
            f"tensor '{self._name}' is on a GPU, and no numpy array: take it by to_dlpack(){advice}"
        )

    def shape(self) -> list[int]:
        return list(self.piece.shape)

    def triton_dtype(self) -> int:
        return NUMBERS[self._wire]

    def is_cpu(self) -> bool:
        return False

    def __dlpack__(self, stream: Any = None, **options: Any) -> Any:
        cupy = importlib.import_module("cupy")
        return cupy.asarray(self.piece).__dlpack__(stream=stream, **options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, 0


def on_gpu(requests: Sequence[InferenceRequest]) -> None:
    """Inputs of these requests that are pieces of device memory become tensors that say so."""
    for request in requests:
        for place, tensor in enumerate(request._inputs):
            piece: Any = tensor._array
            if not isinstance(piece, DevicePiece):
                continue
            wire = next(given.dtype for given in request._work.inputs if given.name == tensor._name)
            if wire == "BF16":  # which no library takes by its address
                tensor._array = piece.host()
            else:
                there = request._inputs[place] = DeviceTensor(tensor._name, piece, wire)
                there._work = tensor._work


class OwnPiece(DevicePiece):
    """What the model has made there. It lives as long as this, and is complete."""

    __slots__ = ("_made",)

    def __init__(self, made: Any) -> None:
        """`made`: an array of cupy's over it."""
        self._made = made
        self.address = made.__cuda_array_interface__["data"][0]
        self.dtype = made.dtype
        self.shape = made.shape
        self.nbytes = made.nbytes

    def host(self) -> Array:
        found: Array = self._made.get()
        return found


def given(name: str, source: Any) -> DeviceTensor | None:
    """What DLPack says is on the process's GPU. None: it cannot be used there."""
    if source.__dlpack_device__()[1] != 0:
        return None
    try:
        cupy = importlib.import_module("cupy")
        made = cupy.from_dlpack(source)
    except (ImportError, BufferError, RuntimeError, TypeError, ValueError):  # its own library may copy it to the host
        return None
    check_contiguous(name, made)
    cupy.cuda.runtime.deviceSynchronize()  # a capsule does not say in which stream it is written
    return DeviceTensor(name, OwnPiece(made), from_numpy(made.dtype))
