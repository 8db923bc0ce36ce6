"""The device of a worker on CuPy (`shmserve.gpu.interface.GpuDevice`), for CUDA and ROCm, and TensorRT. Invariant: no
other module of the worker uses cupy.cuda.runtime or tensorrt, so a missing one is a clear error at load.

Addresses, streams and events are plain numbers. Only functions named synchronize or settle wait.
"""

from __future__ import annotations

import sys
from typing import Any

from shmserve.errors import HandleLost, ModelFailed, Unavailable, Unsupported
from shmserve.gpu import runtime as libraries
from shmserve.gpu.interface import ALIGN, DeviceLost, GpuDevice

_REGISTER_PORTABLE, _REGISTER_READ_ONLY = 0x1, 0x8
_NOT_READY = 600
PRIORITIES = {"PRIORITY_DEFAULT": 0, "PRIORITY_MAX": -100, "PRIORITY_MIN": 100}
"""Stream priorities: lower numbers run first, and the runtime clamps them to the range of the device."""


class Cuda:
    """The device of this process: the broker makes only one visible. Only one thread at a time may use it.

    Functions called for each tensor are the library's own, without a wrapper.
    """

    def __init__(self) -> None:
        runtime = libraries.load()
        self._runtime = runtime
        self._platform = libraries.platform_of(runtime)
        self.errors: type[Exception] = runtime.CUDARuntimeError
        """The exception type of the runtime."""
        try:
            runtime.setDevice(0)
            self.capability = libraries.capability_of(runtime, 0)
            self._read_only = libraries.pins_read_only(runtime, 0)
            self.uuid = libraries.uuid_of(runtime, 0)
        except self.errors as error:
            raise Unavailable(f"no GPU can be used here: {error}") from error
        self._ranges = libraries.AddressRanges(self._platform)
        self.copy = runtime.memcpyAsync
        """(target, source, bytes, one of the kinds below, stream)"""
        self.to_device = runtime.memcpyHostToDevice
        self.to_host = runtime.memcpyDeviceToHost
        self.within = runtime.memcpyDeviceToDevice
        self.record = runtime.eventRecord
        """(event, stream)"""
        self.wait_for = runtime.streamWaitEvent
        """(stream, event): work queued in the stream after this call starts after the event."""
        self.synchronize = runtime.eventSynchronize
        self.synchronize_stream = runtime.streamSynchronize
        self.settle = runtime.deviceSynchronize
        """Waits for all work on the device."""
        self.launch = runtime.graphLaunch
        """(graph, stream)"""
        self.free = runtime.free
        self.free_host = runtime.freeHost
        self.destroy_stream = runtime.streamDestroy
        self.destroy_event = runtime.eventDestroy
        self.destroy_graph = runtime.graphExecDestroy
        self.export = runtime.ipcGetMemHandle
        """(address of an allocation) -> bytes that another process can open"""
        self.close_opened = runtime.ipcCloseMemHandle
        self.unregister = runtime.hostUnregister

    # ------------------------------------------------------------------------------------ memory

    def allocate(self, size: int) -> int:
        """Allocates device memory. Raises Unavailable, with the numbers, if there is not enough."""
        try:
            address: int = self._runtime.malloc(max(size, ALIGN))
        except self.errors as error:
            if getattr(error, "status", 0) != libraries.NO_MEMORY:
                raise self.failure(error) from error
            free, total = self._runtime.memGetInfo()
            raise Unavailable(f"no room for {size} bytes on the GPU: {free} of {total} bytes are free") from error
        return address

    def allocate_host(self, size: int) -> int:
        try:
            address: int = self._runtime.hostAlloc(max(size, ALIGN), 0)
        except self.errors as error:
            raise Unavailable(f"no {size} bytes of host memory can be pinned for the GPU: {error}") from error
        return address

    def open(self, exported: bytes) -> int:
        """Opens memory of another process on the same device. Raises HandleLost if it no longer exists."""
        try:
            address: int = self._runtime.ipcOpenMemHandle(exported)
        except self.errors as error:
            raise HandleLost(f"memory of another process on the GPU can no longer be opened: {error}") from error
        return address

    def room(self, address: int) -> int:
        """Returns the number of bytes from the address to the end of its allocation, also of other
        processes' memory."""
        room = self._ranges.room(address)
        return sys.maxsize if room is None else room

    def register(self, address: int, size: int, writable: bool) -> bool:
        """Pins host memory that is already mapped, so that the device can copy from it by DMA. False: not possible."""
        if not self._platform.pins or (not writable and not self._read_only):
            return False
        flags = _REGISTER_PORTABLE | (0 if writable else _REGISTER_READ_ONLY)
        try:
            self._runtime.hostRegister(address, size, flags)
        except self.errors as error:
            if self.lost(error):
                raise self.failure(error) from error
            return False
        return True

    # ------------------------------------------------------------------------------------ streams, events, graphs

    def stream(self, priority: int = 0) -> int:
        handle: int = self._runtime.streamCreateWithPriority(self._runtime.streamNonBlocking, priority)
        return handle

    def event(self, spin: bool = False) -> int:
        """`spin`: waiting for the event keeps a CPU busy, and notices it some microseconds earlier."""
        flags = self._runtime.eventDisableTiming | (0 if spin else self._runtime.eventBlockingSync)
        handle: int = self._runtime.eventCreateWithFlags(flags)
        return handle

    def reached(self, event: int) -> bool:
        """Whether the work before the event has ended, also with an error, which `synchronize` then raises. Does not
        wait."""
        return bool(self._runtime.eventQuery(event) != _NOT_READY)

    def begin_capture(self, stream: int) -> None:
        self._runtime.streamBeginCapture(stream, self._runtime.streamCaptureModeThreadLocal)

    def end_capture(self, stream: int) -> int:
        """Returns the work queued in the stream since `begin_capture`, as a graph that can be launched repeatedly."""
        graph = self._runtime.streamEndCapture(stream)
        try:
            instance: int = self._runtime.graphInstantiate(graph)
        finally:
            self._runtime.graphDestroy(graph)
        return instance

    def give_up_capture(self, stream: int) -> None:
        """Ends a capture after an error and discards it."""
        try:
            graph = self._runtime.streamEndCapture(stream)
        except self.errors:
            return  # the capture was invalid, so this call has ended it
        if graph:
            self._runtime.graphDestroy(graph)

    # ------------------------------------------------------------------------------------ errors

    def lost(self, error: BaseException) -> bool:
        """Whether this process can no longer use the device."""
        return isinstance(error, DeviceLost) or (
            isinstance(error, self.errors) and getattr(error, "status", 0) in self._platform.lost
        )

    def failure(self, error: BaseException) -> ModelFailed:
        """Converts an error of the runtime."""
        return (DeviceLost if self.lost(error) else ModelFailed)(f"the GPU failed: {error}")


def tensorrt() -> Any:
    """Imports TensorRT. Versions other than 10 and 11 are refused, because their functions differ."""
    try:
        import tensorrt as library
    except ImportError as error:
        raise libraries.missing("tensorrt", error) from error
    version = str(getattr(library, "__version__", "unknown"))
    if version.partition(".")[0] not in ("10", "11"):
        raise Unsupported(f"TensorRT {version} is installed; versions 10 and 11 are supported")
    return library


def major(trt: Any) -> int:
    return int(trt.__version__.partition(".")[0])


def open_device() -> GpuDevice:
    """Opens the device of this worker. A test that has its own replaces this function."""
    return Cuda()
