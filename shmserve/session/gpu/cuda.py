"""CUDA for clients.

Invariant: all CUDA calls of the session are made here (`tensors` uses cupy only for DLPack), and every call leaves the
thread's current device unchanged. Unlike a worker, a client may see several devices and does not own them, so copies
are synchronous.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shmserve.errors import ModelFailed, Unavailable, Unsupported
from shmserve.extras import install_command
from shmserve.shm.extents import cuda
from shmserve.shm.extents.cuda import CudaExtent

_NO_MEMORY = 2
_UNIT_BYTES = 2 * 1024 * 1024


class ClientCuda:
    """The CUDA devices that this process sees."""

    def __init__(self) -> None:
        try:
            self._runtime: Any = importlib.import_module("cupy.cuda.runtime")
        except ImportError as error:
            raise Unsupported(
                f"tensors on a GPU need a package that is not installed, cupy ({error}): {install_command('gpu')}"
            ) from error
        self._error: type[Exception] = self._runtime.CUDARuntimeError

    @contextmanager
    def on(self, device: int) -> Iterator[Any]:
        """The runtime, with `device` as this thread's current device. CUDA errors become ServeErrors."""
        runtime = self._runtime
        try:
            before = runtime.getDevice()
            if before == device:
                yield runtime
                return
            runtime.setDevice(device)
            try:
                yield runtime
            finally:
                runtime.setDevice(before)
        except self._error as error:
            raise _failure(error) from error

    def device_of(self, address: int) -> int:
        """The device on which an address lies."""
        try:
            found: int = self._runtime.pointerGetAttributes(address).device
        except self._error as error:
            raise _failure(error) from error
        return found

    def extent(self, device: int, size: int) -> CudaExtent:
        """Allocate at least `size` bytes, in whole allocation units of the driver: a unit is exported as a whole."""
        size = -(-size // _UNIT_BYTES) * _UNIT_BYTES
        with self.on(device) as runtime:
            found = runtime.getDeviceProperties(device)["uuid"]
            uuid = cuda.uuid_of(found, os.environ.get("CUDA_VISIBLE_DEVICES", ""))
            return cuda.create(size, runtime.malloc, runtime.ipcGetMemHandle, _keep, uuid)

    def copy(self, device: int, target: int, source: int, size: int, kind: str, stream: int) -> None:
        """Copy synchronously. `kind` is the runtime's name for it, e.g. `memcpyDeviceToHost`."""
        with self.on(device) as runtime:
            runtime.memcpyAsync(target, source, size, getattr(runtime, kind), stream)
            runtime.streamSynchronize(stream)

    def stream(self, device: int) -> int:
        """A new stream that does not synchronise with the caller's streams."""
        with self.on(device) as runtime:
            made: int = runtime.streamCreateWithFlags(runtime.streamNonBlocking)
        return made

    def end_stream(self, device: int, stream: int) -> None:
        with self.on(device) as runtime:
            runtime.streamDestroy(stream)

    def synchronize(self, device: int, stream: int | None) -> None:
        """Wait for pending writes to a tensor: on that stream, or, if None, on the whole device."""
        with self.on(device) as runtime:
            if stream is None:
                runtime.deviceSynchronize()
            else:
                runtime.streamSynchronize(stream)


def _keep(address: int) -> None:
    """Do not free exported memory: other processes may have it open, and there is no way to detect that they have
    closed it.
    """


def _failure(error: Exception) -> Exception:
    if getattr(error, "status", 0) == _NO_MEMORY:
        return Unavailable(f"there is not enough memory on the GPU: {error}")
    return ModelFailed(f"the GPU failed: {error}")
