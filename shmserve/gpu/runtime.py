"""CuPy, and the differences between CUDA and ROCm. Invariant: no other module imports cupy.

CuPy for ROCm has the module cupy.cuda.runtime too, with HIP's functions under the names of their CUDA counterparts.
This module handles those that are missing or differ.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any, NamedTuple

from shmserve.errors import HandleLost, Unavailable, Unsupported
from shmserve.extras import install_command, outdated
from shmserve.shm.extents.cuda import UUID_BYTES, device_id, slice_uuid

EXTRA = "gpu"
NO_MEMORY = 2
_READ_ONLY_REGISTRATION = 113


class Platform(NamedTuple):
    """`driver`: the library with `address_range`. `lost`: errors after which a process can no longer use the device.
    `pins`: mapped host memory can be pinned. `dlpack`: the device type of DLPack."""

    name: str
    driver: str
    address_range: str
    lost: frozenset[int]
    pins: bool
    dlpack: int


CUDA = Platform(
    "CUDA",
    "libcuda.so.1",
    "cuMemGetAddressRange_v2",
    frozenset({214, 700, 702, 710, 714, 715, 716, 717, 718, 719, 999}),
    True,
    2,
)
ROCM = Platform(
    "ROCm",
    "libamdhip64.so",
    "hipMemGetAddressRange",
    frozenset({214, 700, 702, 710, 719, 999}),
    False,  # CuPy's hostRegister always fails there, with error 999
    10,
)


def load() -> Any:
    """Imports the binding of the runtime."""
    try:
        import cupy.cuda.runtime
    except ImportError as error:
        raise missing("cupy", error) from error
    if old := outdated(EXTRA, ["cupy-cuda13x"]):
        raise Unsupported(f"tensors and models on a GPU cannot be used: {old}")
    return cupy.cuda.runtime


def arrays() -> Any:
    """Imports CuPy's arrays, which exchange memory with other libraries. Raises ImportError."""
    import cupy

    return cupy


def missing(name: str, error: ImportError) -> Unsupported:
    return Unsupported(
        f"tensors and models on a GPU need a package that is not installed, {name} ({error}): {install_command(EXTRA)}"
    )


def platform_of(runtime: Any) -> Platform:
    return ROCM if getattr(runtime, "is_hip", False) else CUDA


def pins_read_only(runtime: Any, device: int) -> bool:
    """Whether host memory that is mapped read-only can be pinned."""
    return platform_of(runtime).pins and bool(runtime.deviceGetAttribute(_READ_ONLY_REGISTRATION, device))


def capability_of(runtime: Any, device: int) -> str:
    """The compute capability, such as 9.0."""
    # CuPy does not export the numbers of these attributes, which differ between CUDA and HIP.
    properties = runtime.getDeviceProperties(device)
    return f"{properties['major']}.{properties['minor']}"


def uuid_of(runtime: Any, device: int) -> bytes:
    """The device's ID. CuPy for ROCm does not report it."""
    if platform_of(runtime) is CUDA:
        reported = runtime.getDeviceProperties(device)["uuid"]
        return device_id(slice_uuid(reported, os.environ.get("CUDA_VISIBLE_DEVICES", "")))
    driver = library(ROCM.driver)
    buffer = ctypes.create_string_buffer(UUID_BYTES)
    if driver is None or driver.hipDeviceGetUuid(buffer, ctypes.c_int(device)):
        raise Unavailable(f"no GPU can be used here: {ROCM.driver} does not report the UUID of GPU {device}")
    return device_id(buffer.raw)


@cache
def library(name: str) -> Any:
    """Loads a library of the driver, which exists on each machine with a device. None: it does not exist."""
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


class AddressRanges:
    """The allocations that contain an address, according to the driver."""

    def __init__(self, platform: Platform) -> None:
        driver = library(platform.driver)
        self._range = getattr(driver, platform.address_range) if driver is not None else None

    def room(self, address: int) -> int | None:
        """Returns the number of bytes from the address to the end of its allocation; None without the driver."""
        if self._range is None:
            return None
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        status = self._range(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        if status:
            raise HandleLost(f"memory of another process on the GPU has no known size: error {status} of the driver")
        return base.value + size.value - address
