"""Processes of the tests, started by `bench.lib.child.Child`: memory that one exports and another opens, and clients.

An answer with `error` is that of CUDA, and leaves the process running.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from typing import Any

import numpy as np

from bench.lib.child import Answer, Handler


class DeviceMemoryPeer:
    """Device memory by name: allocated and exported here, or opened."""

    def __init__(self) -> None:
        self._runtime: Any = importlib.import_module("cupy.cuda.runtime")
        self._runtime.setDevice(0)
        self._stream = self._runtime.streamCreateWithFlags(self._runtime.streamNonBlocking)
        self._at: dict[str, tuple[int, int]] = {}

    def allocate(self, name: str, size: int) -> Answer:
        address = self._runtime.malloc(size)
        self._at[name] = address, size
        return {"handle": self._runtime.ipcGetMemHandle(address).hex(), "address": address, "pid": os.getpid()}

    def open(self, name: str, handle: str, size: int) -> Answer:
        address = self._runtime.ipcOpenMemHandle(bytes.fromhex(handle))
        self._at[name] = address, size
        return {"address": address}

    def close(self, name: str) -> Answer:
        self._runtime.ipcCloseMemHandle(self._at.pop(name)[0])
        return {}

    def free(self, name: str) -> Answer:
        self._runtime.free(self._at.pop(name)[0])
        return {}

    def fill(self, name: str, value: int) -> Answer:
        address, size = self._at[name]
        self._copy(address, np.full(size, value, np.uint8), self._runtime.memcpyHostToDevice)
        return {}

    def values(self, name: str) -> Answer:
        """The different bytes of the memory."""
        address, size = self._at[name]
        array = np.zeros(size, np.uint8)
        self._copy(address, array, self._runtime.memcpyDeviceToHost)
        return {"values": np.unique(array).tolist()}

    def size(self, name: str) -> Answer:
        """The size that the driver reports."""
        driver = ctypes.CDLL("libcuda.so.1")
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        address = ctypes.c_uint64(self._at[name][0])
        status = driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), address)
        return {"size": size.value, "offset": address.value - base.value, "status": status}

    def _copy(self, address: int, array: np.ndarray[Any, Any], kind: int) -> None:
        here = array.ctypes.data
        target, source = (address, here) if kind == self._runtime.memcpyHostToDevice else (here, address)
        self._runtime.memcpyAsync(target, source, array.nbytes, kind, self._stream)
        self._runtime.streamSynchronize(self._stream)


def memory() -> Handler:
    peer = DeviceMemoryPeer()
    failure: type[Exception] = importlib.import_module("cupy.cuda.runtime").CUDARuntimeError

    def handle(do: str, **arguments: Any) -> Answer:
        try:
            answer: Answer = getattr(peer, do)(**arguments)
        except failure as error:
            return {"error": str(error), "status": getattr(error, "status", 0)}
        return answer

    return handle


def client(url: str, model: str, width: int) -> Handler:
    """A client with a tensor on the GPU. Order: its value. `submit`: the request is sent, and its answer not read."""
    from shmserve import Client

    made: Any = Client(url)
    cupy: Any = importlib.import_module("cupy")
    x, y = (made.empty((1, width), "float32", device="cuda:0") for _ in range(2))
    kept: list[Any] = []

    def handle(value: float, submit: bool = False) -> Answer:
        cupy.asarray(x)[...] = value
        cupy.cuda.Device(0).synchronize()
        if submit:
            kept.append(made.submit(model, {"x": x}))
            return {}
        made.infer(model, {"x": x}, outputs={"y": y})
        return {"values": np.unique(y.numpy()).tolist()}

    return handle
