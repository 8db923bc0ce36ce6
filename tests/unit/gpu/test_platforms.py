"""CUDA and ROCm under CuPy. ROCm is tested only with the stand-in: what is checked is that functions that CuPy lacks
there are not called.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from shmserve.errors import HandleLost, Unavailable
from shmserve.gpu import runtime as libraries
from shmserve.gpu.runtime import CUDA, ROCM, AddressRanges
from shmserve.workers.gpu import api
from tests.support.workers.gpu.harness import standins


class HipLibrary:
    """libamdhip64 with the two functions that are called directly."""

    def __init__(self, uuid: bytes = b"0123456789abcdef", size: int = 4096, status: int = 0) -> None:
        self._uuid, self._size, self._status = uuid, size, status

    def hipDeviceGetUuid(self, found: Any, device: Any) -> int:
        assert device.value == 0
        found.raw = self._uuid
        return self._status

    def hipMemGetAddressRange(self, base: Any, size: Any, address: Any) -> int:
        ctypes.cast(base, ctypes.POINTER(ctypes.c_size_t))[0] = address.value - 100
        ctypes.cast(size, ctypes.POINTER(ctypes.c_size_t))[0] = self._size
        return self._status


@pytest.fixture
def hip(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stand-in as CuPy for ROCm: functions and values that it does not have are missing."""
    with standins() as (runtime, _):
        runtime.is_hip = True
        runtime.getDeviceProperties = lambda device: {"name": b"AMD", "major": 9, "minor": 4}
        for name in ("hostRegister", "cudaDevAttrHostRegisterReadOnlySupported"):
            delattr(runtime, name)
        runtime.hostUnregister = None
        monkeypatch.setattr(libraries, "library", {ROCM.driver: HipLibrary()}.get)
        yield runtime


def test_a_device_of_rocm(hip: Any) -> None:
    device = api.open_device()
    assert (device.capability, device.uuid) == ("9.4", b"0123456789abcdef")
    made = device.allocate(4096)
    assert device.room(made) == 3996
    device.free(made)


@pytest.mark.parametrize("writable", [False, True])
def test_mapped_memory_is_not_pinned_on_rocm(hip: Any, writable: bool) -> None:
    """CuPy's function always fails there, with an error that means a lost device."""
    assert not api.open_device().register(4096, 4096, writable)


def test_errors_of_rocm(hip: Any) -> None:
    device = api.open_device()
    assert device.lost(hip.CUDARuntimeError(700))
    assert not device.lost(hip.CUDARuntimeError(718)), "not a number of HIP"
    assert not device.lost(hip.CUDARuntimeError(1))


def test_a_device_without_an_id_cannot_be_used(hip: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in (None, HipLibrary(status=1)):
        monkeypatch.setattr(libraries, "library", {ROCM.driver: library}.get)
        with pytest.raises(Unavailable, match=r"libamdhip64\.so does not report the UUID of GPU 0"):
            api.open_device()


def test_an_address_that_the_driver_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    for platform in (CUDA, ROCM):
        driver = SimpleNamespace(**{platform.address_range: lambda base, size, address: 1})
        monkeypatch.setattr(libraries, "library", {platform.driver: driver}.get)
        with pytest.raises(HandleLost, match="has no known size: error 1 of the driver"):
            AddressRanges(platform).room(4096)
