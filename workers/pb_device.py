"""Inputs of python models that are on their GPU, and stay there: taken by DLPack, as from the server whose API this is.

The rule: only models that have asked for it get them; what cannot be taken so is in host memory, as ever.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shmserve.workers.cuda.shared import DevicePiece
from shmserve.workers.pb_tensor import NUMBERS, Array, Tensor, TritonModelException

HOST_ONLY = "FORCE_CPU_ONLY_INPUT_TENSORS"

if TYPE_CHECKING:
    from shmserve.repo.schema import ModelConfig
    from shmserve.workers.pb_requests import InferenceRequest

_CUDA = 2
"""The device type in DLPack."""


def wanted(config: ModelConfig) -> bool:
    """Whether the model takes inputs on its GPU."""
    found = config.parameters.get(HOST_ONLY)
    return found is not None and found.string_value.lower() in ("no", "false")


class DeviceTensor(Tensor):
    """A tensor in memory of its sender, which the model must not write."""

    __slots__ = ("_host", "_piece", "_wire")

    def __init__(self, tensor: Tensor, piece: DevicePiece, wire: str) -> None:
        self._name = tensor._name
        self._work = tensor._work
        self._piece = piece
        self._wire = wire
        self._host: Array | None = None

    @property
    def _array(self) -> Array:  # type: ignore[override]
        """On the host, for what is handed on to other models."""
        if self._host is None:
            self._host = self._piece.host()
        return self._host

    def as_numpy(self) -> Array:
        raise TritonModelException(
            f"tensor '{self._name}' is on a GPU, and no numpy array: take it by to_dlpack(), or leave out {HOST_ONLY}"
        )

    def shape(self) -> list[int]:
        return list(self._piece.shape)

    def triton_dtype(self) -> int:
        return NUMBERS[self._wire]

    def is_cpu(self) -> bool:
        return False

    def __dlpack__(self, stream: Any = None, **options: Any) -> Any:
        cupy = importlib.import_module("cupy")
        return cupy.asarray(self._piece).__dlpack__(stream=stream, **options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, 0


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
                request._inputs[place] = DeviceTensor(tensor, piece, wire)
