"""What a worker and a client need of a GPU. An implementation has every member; tests/conformance/test_devices.py runs
against each.

Addresses, streams, events and graphs are plain numbers.
"""

from __future__ import annotations

from typing import Literal, Protocol

from shmserve.errors import ModelFailed
from shmserve.shm.extents.cuda import CudaExtent

ALIGN = 256
"""The alignment of allocations."""
UNIT_BYTES = 2 * 1024 * 1024
"""The unit in which memory is exported: what shares a unit with exported memory is exported with it."""


def whole_units(size: int) -> int:
    """Rounds up to memory that can be exported alone."""
    return -(-size // UNIT_BYTES) * UNIT_BYTES


Direction = Literal["to_device", "to_host", "within"]


class DeviceLost(ModelFailed):
    """This process can no longer use the device and must end."""


class GpuDevice(Protocol):
    """The device of a worker, which sees only one. Only one thread at a time may use it.

    Work in a stream is asynchronous and in order. Only functions named synchronize or settle wait. Functions that have
    no other error raise one of `errors`, also for work that failed earlier.
    """

    errors: type[Exception]
    """The exception type of the library."""
    capability: str
    """The compute capability, e.g. "9.0"."""
    uuid: bytes
    """The device's ID, as in the names of exported memory."""
    to_device: int
    to_host: int
    within: int
    """The directions of copies."""

    # memory

    def allocate(self, size: int, /) -> int:
        """Allocates device memory. Raises Unavailable, with the numbers, if there is not enough."""

    def free(self, address: int, /) -> object: ...

    def allocate_host(self, size: int, /) -> int:
        """Allocates pinned host memory."""

    def free_host(self, address: int, /) -> object: ...

    def register(self, address: int, size: int, writable: bool, /) -> bool:
        """Pins host memory that is already mapped, so that the device can copy from it by DMA. False: not possible."""

    def unregister(self, address: int, /) -> object: ...

    # memory of other processes

    def export(self, address: int, /) -> bytes:
        """Returns 64 bytes with which another process can open an allocation."""

    def open(self, exported: bytes, /) -> int:
        """Opens memory of another process on the same device. Raises HandleLost if it no longer exists."""

    def close_opened(self, address: int, /) -> object: ...

    def room(self, address: int, /) -> int:
        """Returns the number of bytes from the address to the end of its allocation, also of other
        processes' memory."""

    # copies, streams, events

    def copy(self, target: int, source: int, size: int, direction: int, stream: int, /) -> object:
        """Copies asynchronously. Source and target must stay valid until the stream is synchronized."""

    def stream(self, priority: int = 0, /) -> int:
        """Lower priorities run first. The device clamps them to its range."""

    def destroy_stream(self, stream: int, /) -> object: ...

    def synchronize_stream(self, stream: int, /) -> object: ...

    def settle(self) -> object:
        """Waits for all work on the device."""

    def event(self, spin: bool = False) -> int:
        """`spin`: waiting for the event keeps a CPU busy, and notices it some microseconds earlier."""

    def destroy_event(self, event: int, /) -> object: ...

    def record(self, event: int, stream: int, /) -> object: ...

    def wait_for(self, stream: int, event: int, /) -> object:
        """Work queued in the stream after this call starts after the event."""

    def synchronize(self, event: int, /) -> object: ...

    def reached(self, event: int, /) -> bool:
        """Whether the work before the event has ended, also with an error, which `synchronize` then raises. Does not
        wait."""

    # graphs

    def begin_capture(self, stream: int, /) -> None: ...

    def end_capture(self, stream: int, /) -> int:
        """Returns the work queued in the stream since `begin_capture`, as a graph that can be launched repeatedly."""

    def give_up_capture(self, stream: int, /) -> None:
        """Ends a capture after an error and discards it."""

    def launch(self, graph: int, stream: int, /) -> object: ...

    def destroy_graph(self, graph: int, /) -> object: ...

    # errors

    def lost(self, error: BaseException, /) -> bool:
        """Whether this process can no longer use the device."""

    def failure(self, error: BaseException, /) -> ModelFailed:
        """Converts an error of the library."""


class ClientDevices(Protocol):
    """The devices that a client sees. It does not own them: every call leaves the thread's current device unchanged,
    and copies are synchronous. Errors of the library become ServeErrors.
    """

    def device_of(self, address: int) -> int:
        """The device on which an address lies."""

    def extent(self, device: int, size: int) -> CudaExtent:
        """Allocates and exports at least `size` bytes, in whole units."""

    def copy(self, device: int, target: int, source: int, size: int, direction: Direction, stream: int) -> None: ...

    def stream(self, device: int) -> int:
        """A new stream that does not synchronise with the caller's streams."""

    def end_stream(self, device: int, stream: int) -> None: ...

    def synchronize(self, device: int, stream: int | None) -> None:
        """Waits for pending writes to a tensor: on that stream, or, if None, on the whole device."""
