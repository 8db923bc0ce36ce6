"""CUDA as a client uses it. The rule of the file: nothing else of the session imports cupy, and the thread's current
device is afterwards what it was before.

Unlike a worker a client may see many devices, and does not own them: what it copies it waits for at once.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shmserve.errors import ModelFailed, Unavailable, Unsupported
from shmserve.shm.extents import cuda
from shmserve.shm.extents.cuda import CudaExtent

_NO_MEMORY = 2
_UNIT_BYTES = 2 * 1024 * 1024


class ClientCuda:
    """The devices that this process sees."""

    def __init__(self) -> None:
        try:
            self._runtime: Any = importlib.import_module("cupy.cuda.runtime")
        except ImportError as error:
            raise Unsupported(
                f"tensors on a GPU need a package that is not installed, cupy ({error}): pip install 'shmserve[gpu]'"
            ) from error
        self._error: type[Exception] = self._runtime.CUDARuntimeError

    @contextmanager
    def on(self, device: int) -> Iterator[Any]:
        """The runtime, with that device as the current one of this thread. Its errors become ours."""
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
        """The device that an address is on."""
        try:
            found: int = self._runtime.pointerGetAttributes(address).device
        except self._error as error:
            raise _failure(error) from error
        return found

    def extent(self, device: int, size: int) -> CudaExtent:
        """At least `size` bytes, in whole units of the driver: what shares a unit is exported together."""
        size = -(-size // _UNIT_BYTES) * _UNIT_BYTES
        with self.on(device) as runtime:
            uuid = runtime.getDeviceProperties(device)["uuid"]
            return cuda.create(size, runtime.malloc, runtime.ipcGetMemHandle, _keep, uuid)

    def copy(self, device: int, target: int, source: int, size: int, kind: str, stream: int) -> None:
        """`kind` as the runtime calls it, `memcpyDeviceToHost`. It is done when this returns."""
        with self.on(device) as runtime:
            runtime.memcpyAsync(target, source, size, getattr(runtime, kind), stream)
            runtime.streamSynchronize(stream)

    def stream(self, device: int) -> int:
        """One of our own, which waits for nothing of the caller's."""
        with self.on(device) as runtime:
            made: int = runtime.streamCreateWithFlags(runtime.streamNonBlocking)
        return made

    def end_stream(self, device: int, stream: int) -> None:
        with self.on(device) as runtime:
            runtime.streamDestroy(stream)

    def settle(self, device: int, stream: int | None) -> None:
        """Waits for what writes a tensor: in that stream, or, where nobody says in which, on the whole device."""
        with self.on(device) as runtime:
            if stream is None:
                runtime.deviceSynchronize()
            else:
                runtime.streamSynchronize(stream)


def _keep(address: int) -> None:
    """Memory that was exported is not freed: others may have it open, and nobody can tell when they have closed it."""


def _failure(error: Exception) -> Exception:
    if getattr(error, "status", 0) == _NO_MEMORY:
        return Unavailable(f"there is not enough memory on the GPU: {error}")
    return ModelFailed(f"the GPU failed: {error}")
