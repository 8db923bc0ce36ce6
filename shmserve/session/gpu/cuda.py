"""The devices of a client on CuPy (`shmserve.gpu.interface.ClientDevices`), for CUDA and ROCm.

Invariant: every call leaves the thread's current device unchanged. Unlike a worker, a client may see several devices
and does not own them, so copies are synchronous.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shmserve.errors import ModelFailed, Unavailable
from shmserve.gpu.interface import ClientDevices, Direction, whole_units
from shmserve.gpu.runtime import NO_MEMORY, load, uuid_of
from shmserve.shm.extents import cuda
from shmserve.shm.extents.cuda import CudaExtent


class ClientCuda:
    """The devices that this process sees."""

    def __init__(self) -> None:
        runtime = self._runtime = load()
        self._error: type[Exception] = runtime.CUDARuntimeError
        self._kinds: dict[Direction, int] = {
            "to_device": runtime.memcpyHostToDevice,
            "to_host": runtime.memcpyDeviceToHost,
            "within": runtime.memcpyDeviceToDevice,
        }

    @contextmanager
    def on(self, device: int) -> Iterator[Any]:
        """The runtime, with `device` as this thread's current device. Its errors become ServeErrors."""
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
            number: int = self._runtime.pointerGetAttributes(address).device
        except self._error as error:
            raise _failure(error) from error
        return number

    def extent(self, device: int, size: int) -> CudaExtent:
        """Allocates at least `size` bytes, in whole allocation units of the driver: a unit is exported as a whole."""
        with self.on(device) as runtime:
            return cuda.create(
                whole_units(size), runtime.malloc, runtime.ipcGetMemHandle, _keep, uuid_of(runtime, device)
            )

    def copy(self, device: int, target: int, source: int, size: int, direction: Direction, stream: int) -> None:
        """Copies synchronously."""
        with self.on(device) as runtime:
            runtime.memcpyAsync(target, source, size, self._kinds[direction], stream)
            runtime.streamSynchronize(stream)

    def stream(self, device: int) -> int:
        """A new stream that does not synchronise with the caller's streams."""
        with self.on(device) as runtime:
            handle: int = runtime.streamCreateWithFlags(runtime.streamNonBlocking)
        return handle

    def end_stream(self, device: int, stream: int) -> None:
        with self.on(device) as runtime:
            runtime.streamDestroy(stream)

    def synchronize(self, device: int, stream: int | None) -> None:
        """Waits for pending writes to a tensor: on that stream, or, if None, on the whole device."""
        with self.on(device) as runtime:
            if stream is None:
                runtime.deviceSynchronize()
            else:
                runtime.streamSynchronize(stream)


def _keep(address: int) -> None:
    """Does not free exported memory: other processes may have it open, and there is no way to detect that they have
    closed it."""


def _failure(error: Exception) -> Exception:
    if getattr(error, "status", 0) == NO_MEMORY:
        return Unavailable(f"there is not enough memory on the GPU: {error}")
    return ModelFailed(f"the GPU failed: {error}")


def open_devices() -> ClientDevices:
    """Opens the devices of this process. A test that has its own replaces this function."""
    return ClientCuda()
