"""Memory that a backend gets from the server beside the ordinary one: on the GPU of its instance, and pinned.

Invariant: the device is opened by the first allocation, and used only with the turn.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from shmserve.errors import InvalidRequest, ServeError, Unavailable, Unsupported
from shmserve.repo.backends import PINNED_LIMIT
from shmserve.workers.backends.native.records import GPU, PINNED
from shmserve.workers.model_calls.answer import triton_number

if TYPE_CHECKING:
    from shmserve.gpu.interface import GpuDevice
    from shmserve.workers.backends.base import Context


class MemoryManager:
    def __init__(self, host: ctypes.CDLL, turn: threading.Lock, context: Context, on_gpu: bool) -> None:
        """`on_gpu`: whether the instance is. `turn`: the lock of the worker."""
        self._host = host
        self._turn = turn
        self._instance = context.instance
        self._on_gpu = on_gpu
        self._settings = context.settings
        self._device: GpuDevice | None = None
        self._blocks: dict[tuple[int, int], int] = {}
        """By kind and address: the sizes of what was allocated."""

    @property
    def callbacks(self) -> dict[str, Callable[..., object]]:
        return {"allocate": self._allocate, "deallocate": self._deallocate}

    def close(self) -> None:
        """Frees what the backend has kept."""
        with self._turn:
            for kind, address in self._blocks:
                self._free(kind, address)
            self._blocks.clear()

    # ------------------------------------------------------------------------------------ in any thread

    def _allocate(self, kind: int, size: int) -> int:
        try:
            with self._turn:
                address = self._new(kind, size)
                self._blocks[kind, address] = size
                return address
        except ServeError as error:
            self._refuse(error)
            return 0

    def _deallocate(self, kind: int, address: int) -> bool:
        try:
            with self._turn:
                if self._blocks.pop((kind, address), None) is None:
                    raise InvalidRequest("the memory was not allocated by the server, or was freed before")
                self._free(kind, address)
                return True
        except ServeError as error:
            self._refuse(error)
            return False

    # ------------------------------------------------------------------------------------ with the turn

    def _new(self, kind: int, size: int) -> int:
        if not self._on_gpu:
            raise Unsupported(f"instance '{self._instance}' is not on a GPU: use memory on the host")
        from shmserve.workers.backends.device_buffers import pinned_limit  # only with a GPU
        from shmserve.workers.gpu import api

        device = self._device = self._device or api.open_device()
        if kind == GPU:
            return device.allocate(size)
        used = sum(pinned for (block_kind, _), pinned in self._blocks.items() if block_kind == PINNED)
        limit = pinned_limit(self._settings)
        if used + size > limit:
            raise Unavailable(
                f"no {size} bytes of pinned memory for instance '{self._instance}': {used} of {limit} bytes are in use "
                f"(--{PINNED_LIMIT})"
            )
        return device.allocate_host(size)

    def _free(self, kind: int, address: int) -> None:
        device = self._device
        assert device is not None
        try:
            (device.free if kind == GPU else device.free_host)(address)
        except device.errors as error:
            raise device.failure(error) from error

    def _refuse(self, error: ServeError) -> None:
        self._host.host_refuse(triton_number(error.code), str(error).encode())
