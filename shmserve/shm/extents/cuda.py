"""Extents on a GPU: memory that a process exports and other processes on the same GPU open. Invariant: the host never
reads or writes it; addresses are device addresses.

Callers pass the functions that allocate and export the memory, so this module needs no CUDA library.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable

from shmserve.errors import Internal, InvalidRequest
from shmserve.protocol.messages import DEVICE
from shmserve.shm.pages import Pages

ALIGN = 256
EXPORTED_BYTES = 64
UUID_BYTES = 16
UUID_TEXT = 36
"""Length of a UUID in text."""


def is_device(name: str) -> bool:
    return name.startswith(DEVICE)


def device_id(uuid: bytes) -> bytes:
    """Returns a device's ID as used in names, cut at the first zero byte, as some libraries treat it as a C string."""
    return uuid.partition(b"\0")[0][:UUID_BYTES].ljust(UUID_BYTES, b"\0")


def uuid_bytes(text: str) -> bytes:
    """Parses a UUID as printed by the driver's tools, "GPU-8f2c..." or "MIG-8f2c..."."""
    try:
        return bytes.fromhex(text.removeprefix("GPU-").removeprefix("MIG-").replace("-", ""))
    except ValueError:
        raise InvalidRequest(f"'{text[:60]}' is not the UUID of a GPU") from None


def slice_uuid(device: bytes, visible: str) -> bytes:
    """Returns the UUID of a process's device. `device`: the UUID from CUDA's runtime, which may be that of the whole
    GPU if the device is a MIG slice; then `visible`, the process's CUDA_VISIBLE_DEVICES, names the slice. Slices of one
    GPU do not share memory."""
    first = visible.partition(",")[0].strip()
    if not first.startswith("MIG-") or len(first) != len("MIG-") + UUID_TEXT:
        return device
    return uuid_bytes(first)


def name_of(exported: bytes, uuid: bytes) -> str:
    """Returns the segment name for an exported handle on that device."""
    return DEVICE + base64.b64encode(exported + device_id(uuid)).decode()


def parts_of(name: str) -> tuple[bytes, bytes]:
    """Returns the exported handle and the device ID. Raises InvalidRequest if the name does not contain both."""
    try:
        data = base64.b64decode(name.removeprefix(DEVICE), validate=True)
    except (binascii.Error, ValueError):
        data = b""
    if not is_device(name) or len(data) != EXPORTED_BYTES + UUID_BYTES:
        raise InvalidRequest("the name of a segment on a GPU does not contain an exported handle and a device UUID")
    return data[:EXPORTED_BYTES], data[EXPORTED_BYTES:]


class CudaExtent:
    """The size of its `pages` is 0, because nothing is mapped on the host."""

    kind = "cuda"
    align = ALIGN
    fd = -1
    cold = False

    def __init__(self, pages: Pages, size: int, name: str) -> None:
        self._pages: Pages | None = pages
        self.address = pages.address
        self.size = size
        self.name: str | None = name

    @property
    def pages(self) -> Pages:
        if self._pages is None:
            raise Internal("a closed cuda extent was used")
        return self._pages

    @property
    def memory(self) -> memoryview:
        """Empty: the host cannot read the memory."""
        return memoryview(b"")

    def close(self) -> None:
        self._pages = None


def create(
    size: int,
    allocate: Callable[[int], int],
    export: Callable[[int], bytes],
    free: Callable[[int], object],
    uuid: bytes,
) -> CudaExtent:
    """Allocates memory and exports it once. `uuid` is that of the device."""
    if size <= 0:
        raise Internal(f"invalid extent size: {size} bytes")
    address = allocate(size)
    try:
        name = name_of(export(address), uuid)
    except BaseException:
        free(address)
        raise
    return CudaExtent(Pages(address, 0, False, lambda address, _: free(address)), size, name)
