"""CUDA shared memory regions that clients have registered. Invariant: the gateway never opens the memory. Its handle
goes to the worker whose model reads or writes it; the gateway only queries the UUID of the GPU, through NVML."""

from __future__ import annotations

import base64
import binascii
import importlib
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from shmserve.errors import InvalidRequest, Unsupported
from shmserve.gateway.kserve.answers import Buffer
from shmserve.gateway.kserve.plans import INT64_MAX, RegionSlice
from shmserve.session.foreign_memory import ForeignMemory, RegionPart


class DeviceOrder(Struct):
    """A client's registration of a region. `device_id`: index of the GPU in the driver's list."""

    raw_handle: bytes
    device_id: int
    byte_size: int


class DeviceRegion:
    """A registered region. Requests refer to parts of it. The region stays registered with the broker until those
    requests are over."""

    def __init__(self, name: str, order: DeviceOrder, foreign: Callable[[], ForeignMemory]) -> None:
        """Raises the error that the client receives if the registration is invalid."""
        from shmserve.shm.extents.cuda import EXPORTED_BYTES, name_of, uuid_bytes  # few clients have GPU memory

        self.name = name
        self.users = 0
        self.unwanted = False
        self._foreign = foreign
        self._size, self._device = order.byte_size, order.device_id
        if not 0 < order.byte_size <= INT64_MAX or len(order.raw_handle) != EXPORTED_BYTES:
            raise InvalidRequest(
                f"failed to register shared memory region '{name}': invalid args: a CUDA handle has {EXPORTED_BYTES} "
                f"bytes, this one {len(order.raw_handle)}, and the region {order.byte_size}"
            )
        uuid = _uuid_of(order.device_id)
        if not uuid:
            raise InvalidRequest(
                f"failed to register shared memory region '{name}': invalid args: there is no GPU {order.device_id}"
            )
        self._region = foreign().announce(order.byte_size, name_of(order.raw_handle, uuid_bytes(uuid)))

    def status(self) -> dict[str, Any]:
        return {"name": self.name, "device_id": self._device, "byte_size": self._size}

    def check(self, place: RegionSlice) -> None:
        place.check(self.name, self._size)

    def part(self, place: RegionSlice) -> RegionPart:
        return RegionPart(self._region, place.offset, place.size)

    def write(self, place: RegionSlice, parts: Sequence[Buffer]) -> None:
        """The worker has already written the output; an output in host memory is an error."""
        if parts:
            raise Unsupported(f"an output for CUDA shared memory region '{self.name}' was returned in host memory")

    def close(self) -> None:
        self._foreign().withdraw(self._region)


def _uuid_of(device: int) -> str:
    """The UUID of a GPU; "" without a driver or such a GPU."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return ""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return ""
    try:
        if not 0 <= device < nvml.nvmlDeviceGetCount():
            return ""
        uuid = nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(device))
    except nvml.NVMLError:
        return ""
    finally:
        nvml.nvmlShutdown()
    return uuid.decode() if isinstance(uuid, bytes) else str(uuid)


def handle_of(text: str) -> bytes:
    """Decodes the handle of a JSON request."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest("raw_handle.b64 is not base64") from None
