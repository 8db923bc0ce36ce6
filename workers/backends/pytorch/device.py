"""PyTorch tensors over GPU memory that PyTorch does not own.

Invariant: the caller keeps the memory valid as long as the tensor exists.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from shmserve.workers.batch.specs import Spec

_BITS16 = "<i2"


class _Memory:
    def __init__(self, address: int, shape: tuple[int, ...], typestr: str) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape, "typestr": typestr, "data": (address, False), "strides": None, "version": 2,
        }  # fmt: skip


def over(address: int, shape: tuple[int, ...], spec: Spec, device: torch.device) -> torch.Tensor:
    """Returns a tensor of the spec's type at an address."""
    if spec.dtype == "BF16":
        return as_tensor(_Memory(address, shape, _BITS16), device).view(torch.bfloat16)
    return as_tensor(_Memory(address, shape, spec.numpy.str), device)


def as_tensor(memory: Any, device: torch.device) -> torch.Tensor:
    found: torch.Tensor = torch.as_tensor(memory, device=device)
    return found


def settle(device: torch.device) -> None:
    """Waits for the work that this thread has queued on the GPU."""
    torch.cuda.current_stream(device).synchronize()
