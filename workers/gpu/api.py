"""CUDA and TensorRT as they are used here. The rule: no other module imports cupy or tensorrt, so that all that is
asked of these libraries can be seen in this file, and a missing one is a clear error at load.

Addresses, streams and events are plain numbers. Nothing here waits, except what is called synchronize.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from typing import Any

from shmserve.errors import HandleLost, ModelFailed, Unavailable, Unsupported
from shmserve.shm.extents.cuda import device_id

EXTRA = "gpu"
ALIGN = 256
"""What the runtime gives memory at, and engines want tensors at."""
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76
_READ_ONLY_REGISTRATION = 113
_REGISTER_PORTABLE, _REGISTER_READ_ONLY = 0x1, 0x8
_NO_MEMORY = 2
_LOST = frozenset({214, 700, 702, 710, 714, 715, 716, 717, 718, 719, 999})
"""Errors after which nothing in this process can use the device again."""
PRIORITIES = {"PRIORITY_DEFAULT": 0, "PRIORITY_MAX": -100, "PRIORITY_MIN": 100}
"""Of streams: lower numbers go first, and the runtime brings them into the range that the device has."""


class DeviceLost(ModelFailed):
    """The device cannot be used by this process any more: it has to end."""


class Cuda:
    """The device of this process: the broker lets a worker see no other. One thread at a time may use it.

    What is called for each tensor is the library's own function, without one of ours in between.
    """

    def __init__(self) -> None:
        try:
            runtime: Any = importlib.import_module("cupy.cuda.runtime")
        except ImportError as error:
            raise _missing("cupy", error) from error
        self._runtime = runtime
        self._error: type[Exception] = runtime.CUDARuntimeError
        try:
            count = runtime.getDeviceCount()
            runtime.setDevice(0)
            self.capability = (
                f"{runtime.deviceGetAttribute(_CAPABILITY_MAJOR, 0)}.{runtime.deviceGetAttribute(_CAPABILITY_MINOR, 0)}"
            )
            self._read_only = bool(runtime.deviceGetAttribute(_READ_ONLY_REGISTRATION, 0))
            self.uuid = device_id(runtime.getDeviceProperties(0)["uuid"])
        except self._error as error:
            raise Unavailable(f"no GPU can be used here: {error}") from error
        self._driver = _driver()
        self.devices = count
        self.copy = runtime.memcpyAsync
        """(target, source, bytes, one of the kinds below, stream)"""
        self.to_device = runtime.memcpyHostToDevice
        self.to_host = runtime.memcpyDeviceToHost
        self.within = runtime.memcpyDeviceToDevice
        self.record = runtime.eventRecord
        """(event, stream)"""
        self.wait_for = runtime.streamWaitEvent
        """(stream, event): what the stream is given from now on is done after the event."""
        self.synchronize = runtime.eventSynchronize
        self.synchronize_stream = runtime.streamSynchronize
        self.settle = runtime.deviceSynchronize
        """Waits for everything that was ever asked of the device."""
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
        """Device memory; Unavailable, with the numbers, where there is not as much."""
        try:
            address: int = self._runtime.malloc(max(size, ALIGN))
        except self._error as error:
            if getattr(error, "status", 0) != _NO_MEMORY:
                raise self.failure(error) from error
            free, total = self._runtime.memGetInfo()
            raise Unavailable(f"no room for {size} bytes on the GPU: {free} of {total} bytes are free") from error
        return address

    def allocate_host(self, size: int) -> int:
        """Host memory that the device reads and writes by itself."""
        try:
            address: int = self._runtime.hostAlloc(max(size, ALIGN), 0)
        except self._error as error:
            raise Unavailable(f"no {size} bytes of host memory can be pinned for the GPU: {error}") from error
        return address

    def open(self, exported: bytes) -> int:
        """Memory of another process, on the same device; HandleLost where that has gone."""
        try:
            address: int = self._runtime.ipcOpenMemHandle(exported)
        except self._error as error:
            raise HandleLost(f"memory of another process on the GPU cannot be opened any more: {error}") from error
        return address

    def room(self, address: int) -> int:
        """How many bytes there are from there to the end of the allocation, whoever made it."""
        if self._driver is None:
            return sys.maxsize
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        status = self._driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        if status:
            raise HandleLost(f"memory of another process on the GPU has no known size: error {status} of the driver")
        return base.value + size.value - address

    def register(self, address: int, size: int, writable: bool) -> bool:
        """Pins host memory that is mapped already, so that the device copies from it by itself. False: it cannot be."""
        if not writable and not self._read_only:
            return False
        flags = _REGISTER_PORTABLE | (0 if writable else _REGISTER_READ_ONLY)
        try:
            self._runtime.hostRegister(address, size, flags)
        except self._error as error:
            if self.lost(error):
                raise self.failure(error) from error
            return False
        return True

    def memory(self) -> tuple[int, int]:
        """Bytes that are free, and all."""
        free, total = self._runtime.memGetInfo()
        return free, total

    # ------------------------------------------------------------------------------------ streams, events, graphs

    def stream(self, priority: int = 0) -> int:
        handle: int = self._runtime.streamCreateWithPriority(self._runtime.streamNonBlocking, priority)
        return handle

    def event(self, spin: bool = False) -> int:
        """`spin`: who waits for it keeps its core busy, and knows of it some microseconds earlier."""
        flags = self._runtime.eventDisableTiming | (0 if spin else self._runtime.eventBlockingSync)
        handle: int = self._runtime.eventCreateWithFlags(flags)
        return handle

    def begin_capture(self, stream: int) -> None:
        self._runtime.streamBeginCapture(stream, self._runtime.streamCaptureModeThreadLocal)

    def end_capture(self, stream: int) -> int:
        """What was given to the stream since then, as a graph that can be launched again and again."""
        graph = self._runtime.streamEndCapture(stream)
        try:
            instance: int = self._runtime.graphInstantiate(graph)
        finally:
            self._runtime.graphDestroy(graph)
        return instance

    def give_up_capture(self, stream: int) -> None:
        """Something went wrong between: whatever was captured is forgotten."""
        try:
            graph = self._runtime.streamEndCapture(stream)
        except self._error:
            return  # the capture was invalid, and has ended with that
        if graph:
            self._runtime.graphDestroy(graph)

    # ------------------------------------------------------------------------------------ what goes wrong

    def lost(self, error: BaseException) -> bool:
        """Whether the device cannot be used by this process any more."""
        return isinstance(error, DeviceLost) or (
            isinstance(error, self._error) and getattr(error, "status", 0) in _LOST
        )

    def failure(self, error: BaseException) -> ModelFailed:
        """An error of the runtime as one of ours."""
        return (DeviceLost if self.lost(error) else ModelFailed)(f"the GPU failed: {error}")

    @property
    def errors(self) -> type[Exception]:
        """What the runtime raises."""
        return self._error


def _driver() -> Any:
    """The driver's library, which is there wherever a device is."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def tensorrt() -> Any:
    """The module. TensorRT 10 and 11 are known; others are refused, as they have other functions."""
    try:
        found: Any = importlib.import_module("tensorrt")
    except ImportError as error:
        raise _missing("tensorrt", error) from error
    version = str(getattr(found, "__version__", "unknown"))
    if version.partition(".")[0] not in ("10", "11"):
        raise Unsupported(f"TensorRT {version} is installed; versions 10 and 11 are supported")
    return found


def major(trt: Any) -> int:
    return int(trt.__version__.partition(".")[0])


def _missing(name: str, error: ImportError) -> Unsupported:
    return Unsupported(
        f"a model for the GPU needs a package that is not installed, {name} ({error}): pip install 'shmserve[{EXTRA}]'"
    )
