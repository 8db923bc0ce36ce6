"""PyTorch on a GPU: tensors over memory that PyTorch does not own, streams of others, and CUDA graphs.

Invariant: the caller keeps memory and streams valid as long as the objects made from them exist. All calls that need a
GPU are in this file.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from shmserve.workers.batch.specs import Spec

_BITS16 = "<i2"
_WARM_UPS = 3
"""Runs before a capture: libraries initialise on first use, and TorchScript compiles after it has seen two runs."""


class _Memory:
    def __init__(self, address: int, shape: tuple[int, ...], typestr: str) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": typestr,
            "data": (address, False),
            "strides": None,
            "version": 2,
        }


def over(address: int, shape: tuple[int, ...], spec: Spec, device: torch.device) -> torch.Tensor:
    """Returns a tensor of the spec's type at an address."""
    if spec.dtype == "BF16":
        return as_tensor(_Memory(address, shape, _BITS16), device).view(torch.bfloat16)
    return as_tensor(_Memory(address, shape, spec.numpy.str), device)


def as_tensor(memory: Any, device: torch.device) -> torch.Tensor:
    tensor: torch.Tensor = torch.as_tensor(memory, device=device)
    return tensor


def address_of(tensor: torch.Tensor) -> int:
    address: int = tensor.data_ptr()
    return address


def stream_of(handle: int, device: torch.device) -> torch.cuda.Stream:
    """Returns a stream that was created with the CUDA runtime, for PyTorch."""
    return torch.cuda.ExternalStream(handle, device)


def running_in(stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
    """Queues the work of this thread in the stream. PyTorch reuses the memory that is freed there only for later work
    of the same stream."""
    context: AbstractContextManager[Any] = torch.cuda.stream(stream)
    return context


def graph_pool() -> Any:
    """Returns memory for several graphs. They may share it if they never run at the same time and none of them leaves
    results there, as another graph may write to the same place."""
    return torch.cuda.graph_pool_handle()


def capture(run: Callable[[], object], stream: torch.cuda.Stream, pool: Any) -> Callable[[], None]:
    """Captures what `run` queues as a CUDA graph. Returns the function that queues it again."""
    with running_in(stream):  # also restores the stream after a capture that fails
        for _ in range(_WARM_UPS):
            run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            run()
    replay: Callable[[], None] = graph.replay
    return replay


def free_cached() -> None:
    """Gives the memory back to CUDA that PyTorch keeps for later tensors."""
    torch.cuda.empty_cache()


def settle_all(device: torch.device) -> None:
    """Waits for all work on the GPU, such as copies of weights."""
    torch.cuda.synchronize(device)


def settle(device: torch.device) -> None:
    """Waits for the work that this thread has queued on the GPU."""
    torch.cuda.current_stream(device).synchronize()
