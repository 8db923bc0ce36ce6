"""Extents on a GPU: memory of one process that others on the same GPU open by what it exported. The rule of the file:
nothing here is ever read or written by the host; addresses are numbers for the device.

What makes and opens the memory is given by whoever has the library for it.
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


def is_device(name: str) -> bool:
    return name.startswith(DEVICE)


def device_id(uuid: bytes) -> bytes:
    """That of a device as names have it: libraries that take it for a string end it at its first zero."""
    return uuid.partition(b"\0")[0][:UUID_BYTES].ljust(UUID_BYTES, b"\0")


def uuid_bytes(text: str) -> bytes:
    """Of a uuid as the driver's tools write it, "GPU-8f2c..."."""
    try:
        return bytes.fromhex(text.removeprefix("GPU-").replace("-", ""))
    except ValueError:
        raise InvalidRequest(f"'{text[:60]}' is no uuid of a GPU") from None


def name_of(exported: bytes, uuid: bytes) -> str:
    """Of memory on that device."""
    return DEVICE + base64.b64encode(exported + device_id(uuid)).decode()


def parts_of(name: str) -> tuple[bytes, bytes]:
    """What was exported, and the device it is on; InvalidRequest for a name that says neither."""
    try:
        found = base64.b64decode(name.removeprefix(DEVICE), validate=True)
    except (binascii.Error, ValueError):
        found = b""
    if not is_device(name) or len(found) != EXPORTED_BYTES + UUID_BYTES:
        raise InvalidRequest("the name of a segment on a GPU does not say what was exported")
    return found[:EXPORTED_BYTES], found[EXPORTED_BYTES:]


class DevicePages(Pages):
    """Device memory until the last reference goes. `size` is 0 for the host, which has nothing there."""

    __slots__ = ("_free",)

    def __init__(self, address: int, free: Callable[[int], object]) -> None:
        super().__init__(address, 0, False)
        self._free = free

    def __del__(self) -> None:  # type: ignore[override]
        self._free(self.address)


class CudaExtent:
    kind = "cuda"
    align = ALIGN
    fd = -1
    writable = False

    def __init__(self, pages: DevicePages, size: int, name: str) -> None:
        self._pages: DevicePages | None = pages
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
        """None that the host could read."""
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
    """A plain allocation, exported once. `uuid` is that of the device."""
    if size <= 0:
        raise Internal(f"an extent of {size} bytes was asked for")
    address = allocate(size)
    try:
        name = name_of(export(address), uuid)
    except BaseException:
        free(address)
        raise
    return CudaExtent(DevicePages(address, free), size, name)
