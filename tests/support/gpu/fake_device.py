"""A GPU in this process, as a second implementation of `shmserve.gpu.interface`: device memory is host memory.

Invariants: asynchronous work runs only when something waits for it, so a result that is read too early, or a source
that is reused too early, is wrong every time. Bounds, owner and lifetime of memory are checked, also when deferred work
runs. Two streams that use the same bytes must be ordered by an event or by waiting.

A violation raises Violation and is kept, because the code under test may catch it: `FakeGpu.close` raises it again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import TypeVar

import pytest

from shmserve.errors import HandleLost, ModelFailed, Unavailable
from shmserve.gpu.interface import ALIGN, DeviceLost, Direction, GpuDevice, whole_units
from shmserve.shm.extents import cuda
from shmserve.shm.extents.cuda import EXPORTED_BYTES, UUID_BYTES, CudaExtent
from tests.support.gpu.fake_memory import ByteRange, FakeMemory, FakeStream, FakeWork

TO_DEVICE, TO_HOST, WITHIN = 1, 2, 3
NO_MEMORY, INVALID, ILLEGAL_ADDRESS = 2, 1, 700
_FRESH, _FREED = 0xCB, 0xDD
Known = TypeVar("Known")


class FakeError(RuntimeError):
    def __init__(self, status: int, text: str = "injected") -> None:
        super().__init__(f"error {status}: {text}")
        self.status = status


class Violation(AssertionError):
    """The code under test misused the device."""


class FakeGpu:
    """One GPU of the machine. A FakeDevice is the view of a process: code that opens the device several times gets the
    same one, until `process` switches to another."""

    def __init__(self, size: int = 1 << 30, uuid: bytes = b"fake", capability: str = "9.0") -> None:
        self.size = size
        self.uuid = uuid.ljust(UUID_BYTES, b"\0")
        self.capability = capability
        self.violations: list[Violation] = []
        self.copies: list[tuple[int, int]] = []
        """(bytes, direction) of each copy that was queued."""
        self.allocations = 0
        """Allocations of device memory so far."""
        self.exported: dict[bytes, tuple[FakeDevice, FakeMemory]] = {}
        self._devices: dict[str, FakeDevice] = {}
        self._process = ""
        self._failures: dict[str, int] = {}

    def device(self) -> FakeDevice:
        found = self._devices.get(self._process)
        if found is None:
            found = self._devices[self._process] = FakeDevice(self)
        return found

    @contextmanager
    def process(self, name: str) -> Iterator[FakeDevice]:
        """What runs here is in another process."""
        before, self._process = self._process, name
        try:
            yield self.device()
        finally:
            self._process = before

    def client_devices(self) -> FakeClientDevices:
        return FakeClientDevices(self.device())

    @property
    def used(self) -> int:
        """Bytes of device memory in use, by all processes."""
        return sum(memory.size for device in self._devices.values() for memory in device.memory.values())

    def fail(self, name: str, status: int = INVALID) -> None:
        """The next call of this function fails."""
        self._failures[name] = status

    def check_failure(self, name: str) -> None:
        status = self._failures.pop(name, 0)
        if status:
            raise FakeError(status)

    def violate(self, text: str) -> Violation:
        self.violations.append(Violation(text))
        return self.violations[-1]

    def left(self) -> dict[str, int]:
        """Objects that were created and not freed, in all processes."""
        found: dict[str, int] = {}
        for device in self._devices.values():
            for name, number in device.left().items():
                found[name] = found.get(name, 0) + number
        return found

    def close(self) -> None:
        """Releases everything, and raises the first violation."""
        for device in self._devices.values():
            device.drop()
        self._devices.clear()
        self.exported.clear()
        if self.violations:
            raise self.violations[0]


class FakeDevice:
    """The device as a worker sees it."""

    errors: type[Exception] = FakeError
    to_device, to_host, within = TO_DEVICE, TO_HOST, WITHIN
    devices = 1

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.uuid = gpu.uuid
        self.capability = gpu.capability
        self.memory: dict[int, FakeMemory] = {}
        self.opened: dict[int, tuple[FakeMemory, FakeMemory]] = {}
        """The mapping of each opened allocation, and the allocation."""
        self.pinned: dict[int, FakeMemory] = {}
        self.registered: dict[int, ByteRange] = {}
        self._freed: list[FakeMemory] = []
        """Their addresses are not used again."""
        self._numbers = count(1)
        self._streams: dict[int, FakeStream] = {}
        self._events: dict[int, dict[int, int] | None] = {}
        """What must run before the event; None: it was not recorded."""
        self._graphs: dict[int, list[FakeWork]] = {}

    def left(self) -> dict[str, int]:
        found = {
            "device": len(self.memory), "opened": len(self.opened), "pinned": len(self.pinned),
            "registered": len(self.registered), "streams": len(self._streams), "events": len(self._events),
            "graphs": len(self._graphs),
        }  # fmt: skip
        return {name: number for name, number in found.items() if number}

    def drop(self) -> None:
        for memory in (*self.memory.values(), *self.pinned.values(), *self._freed):
            memory.close()
        for mapping, _ in self.opened.values():
            mapping.close()

    # ------------------------------------------------------------------------------------ memory

    def allocate(self, size: int) -> int:
        gpu = self.gpu
        gpu.check_failure("allocate")
        size = -(-max(size, 1) // ALIGN) * ALIGN
        if size > gpu.size - gpu.used:
            raise Unavailable(
                f"no room for {size} bytes on the GPU: {gpu.size - gpu.used} of {gpu.size} bytes are free"
            )
        made = FakeMemory(size)
        made.fill(_FRESH)
        self.memory[made.address] = made
        gpu.allocations += 1
        return made.address

    def free(self, address: int) -> None:
        memory = self._known(self.memory, address, "device memory")
        if memory.users:
            raise self.gpu.violate(f"memory of {memory.size} bytes was freed while another process has it open")
        self._end(memory, "device memory")
        del self.memory[address]

    def allocate_host(self, size: int) -> int:
        self.gpu.check_failure("allocate_host")
        made = FakeMemory(max(size, 1))
        self.pinned[made.address] = made
        return made.address

    def free_host(self, address: int) -> None:
        self._end(self._known(self.pinned, address, "pinned memory"), "pinned memory")
        del self.pinned[address]

    def register(self, address: int, size: int, writable: bool) -> bool:
        self.gpu.check_failure("register")
        wanted = ByteRange(address, address + size)
        if any(wanted.meets(known) for known in self.registered.values()):
            raise self.gpu.violate(f"host memory of {size} bytes was registered twice")
        self.registered[address] = wanted
        return True

    def unregister(self, address: int) -> None:
        self._check_idle(self._known(self.registered, address, "registered memory"), "registered memory")
        del self.registered[address]

    def export(self, address: int) -> bytes:
        self.gpu.check_failure("export")
        token = f"fake {address:x}".encode().ljust(EXPORTED_BYTES, b"\0")
        self.gpu.exported[token] = self, self._known(self.memory, address, "device memory")
        return token

    def open(self, exported: bytes) -> int:
        owner, memory = self.gpu.exported.get(exported, (None, None))
        if memory is None or owner is None or memory.address not in owner.memory:
            raise HandleLost("memory of another process on the GPU can no longer be opened")
        if owner is self:
            raise self.gpu.violate("a process opened its own memory")
        mapping = memory.again()
        memory.users += 1
        self.opened[mapping.address] = mapping, memory
        return mapping.address

    def close_opened(self, address: int) -> None:
        mapping, memory = self._known(self.opened, address, "opened memory")
        self._check_idle(mapping.range, "opened memory")
        del self.opened[address]
        memory.users -= 1
        self._freed.append(mapping)

    def room(self, address: int) -> int:
        for memory in self._device_memory():
            if memory.range.start <= address < memory.range.end:
                return memory.range.end - address
        raise HandleLost("memory of another process on the GPU has no known size")

    # ------------------------------------------------------------------------------------ copies, streams, events

    def copy(self, target: int, source: int, size: int, direction: int, stream: int) -> None:
        self.gpu.check_failure("copy")
        reads, writes = ByteRange(source, source + size), ByteRange(target, target + size)
        self.gpu.copies.append((size, direction))

        def check() -> None:
            self._check_place(reads, direction in (TO_HOST, WITHIN), "source")
            self._check_place(writes, direction in (TO_DEVICE, WITHIN), "target")

        def run() -> None:
            check()
            ctypes.memmove(target, source, size)

        check()
        self._queue(stream, FakeWork(run, (reads,), (writes,)))

    def compute(
        self, run: Callable[[], object], stream: int, reads: Sequence[ByteRange] = (), writes: Sequence[ByteRange] = ()
    ) -> None:
        """Queues work that a kernel would do, for engines of tests."""
        self._queue(stream, FakeWork(run, reads, writes))

    def stream(self, priority: int = 0) -> int:
        self.gpu.check_failure("stream")
        number = next(self._numbers)
        self._streams[number] = FakeStream(number)
        return number

    def destroy_stream(self, stream: int) -> None:
        found = self._stream(stream)
        self._run(found, found.queued)
        del self._streams[stream]

    def synchronize_stream(self, stream: int) -> None:
        self.gpu.check_failure("synchronize_stream")
        found = self._stream(stream)
        if found.captured is not None:
            raise self.gpu.violate("a stream was synchronized during a capture")
        self._run(found, found.queued)

    def settle(self) -> None:
        self.gpu.check_failure("settle")
        for stream in self._streams.values():
            self._run(stream, stream.queued)

    def event(self, spin: bool = False) -> int:
        number = next(self._numbers)
        self._events[number] = None
        return number

    def destroy_event(self, event: int) -> None:
        self._event(event)
        del self._events[event]

    def record(self, event: int, stream: int) -> None:
        self.gpu.check_failure("record")
        self._event(event)
        found = self._stream(stream)
        self._events[event] = {**found.after, stream: found.queued}

    def wait_for(self, stream: int, event: int) -> None:
        found = self._stream(stream)
        for other, position in self._recorded(event).items():
            found.after[other] = max(found.after.get(other, 0), position)

    def synchronize(self, event: int) -> None:
        self.gpu.check_failure("synchronize")
        self._run_after(self._recorded(event))

    def reached(self, event: int) -> bool:
        """The device works between two calls: the first one finds unfinished work, and the next one does not."""
        recorded = self._recorded(event)
        streams = [(self._streams.get(number), position) for number, position in recorded.items()]
        unfinished = any(found and found.waiting and found.waiting[0].number <= last for found, last in streams)
        self._run_after(recorded)
        return not unfinished

    # ------------------------------------------------------------------------------------ graphs

    def begin_capture(self, stream: int) -> None:
        found = self._stream(stream)
        if found.captured is not None:
            raise self.gpu.violate("a capture began during a capture")
        found.captured = []

    def end_capture(self, stream: int) -> int:
        found = self._stream(stream)
        if found.captured is None:
            raise self.gpu.violate("a capture ended that had not begun")
        number = next(self._numbers)
        self._graphs[number], found.captured = found.captured, None
        return number

    def give_up_capture(self, stream: int) -> None:
        self._stream(stream).captured = None

    def launch(self, graph: int, stream: int) -> None:
        self.gpu.check_failure("launch")
        for work in self._known(self._graphs, graph, "graph"):
            self._queue(stream, FakeWork(work.run, work.reads, work.writes))

    def destroy_graph(self, graph: int) -> None:
        self._known(self._graphs, graph, "graph")
        del self._graphs[graph]

    # ------------------------------------------------------------------------------------ errors

    def lost(self, error: BaseException) -> bool:
        return isinstance(error, DeviceLost) or (isinstance(error, FakeError) and error.status == ILLEGAL_ADDRESS)

    def failure(self, error: BaseException) -> ModelFailed:
        return (DeviceLost if self.lost(error) else ModelFailed)(f"the GPU failed: {error}")

    # ------------------------------------------------------------------------------------ checks

    def _device_memory(self) -> list[FakeMemory]:
        return [*self.memory.values(), *(mapping for mapping, _ in self.opened.values())]

    def _check_place(self, used: ByteRange, on_device: bool, what: str) -> None:
        """Checks one side of a copy. Any memory of the process is allowed on the host, except freed pinned memory."""
        known = self._device_memory() if on_device else list(self.pinned.values())
        if any(memory.range.start <= used.start and used.end <= memory.range.end for memory in known):
            return
        for memory in known:
            if memory.range.meets(used):
                beyond = max(used.end - memory.range.end, memory.range.start - used.start)
                raise self.gpu.violate(f"the {what} of a copy is out of bounds by {beyond} bytes")
        if any(memory.range.meets(used) for memory in self._freed):
            raise self.gpu.violate(f"the {what} of a copy was freed")
        if on_device:
            raise self.gpu.violate(f"the {what} of a copy is not on the device")

    def _check_idle(self, used: ByteRange, what: str) -> None:
        for stream in self._streams.values():
            if any(work.touches(used) for work in stream.waiting):
                raise self.gpu.violate(f"{what} was released while work that uses it is pending")

    def _end(self, memory: FakeMemory, what: str) -> None:
        self._check_idle(memory.range, what)
        memory.fill(_FREED)
        self._freed.append(memory)

    def _queue(self, stream: int, work: FakeWork) -> None:
        found = self._stream(stream)
        if found.captured is not None:
            found.captured.append(work)
            return
        work.after = dict(found.after)
        for other in self._streams.values():
            if other is found:
                continue
            for pending in other.waiting:
                if pending.number > work.after.get(other.number, 0) and work.conflicts(pending):
                    raise self.gpu.violate("two streams use the same bytes, and no event orders them")
        found.queued += 1
        work.number = found.queued
        found.waiting.append(work)

    def _run(self, stream: FakeStream, position: int) -> None:
        while stream.waiting and stream.waiting[0].number <= position:
            work = stream.waiting.popleft()
            self._run_after(work.after)
            work.run()

    def _run_after(self, positions: dict[int, int]) -> None:
        for number, position in positions.items():
            stream = self._streams.get(number)
            if stream is not None:
                self._run(stream, position)

    def _stream(self, number: int) -> FakeStream:
        return self._known(self._streams, number, "stream")

    def _event(self, number: int) -> dict[int, int] | None:
        return self._known(self._events, number, "event")

    def _recorded(self, event: int) -> dict[int, int]:
        found = self._event(event)
        if found is None:
            raise self.gpu.violate("an event was waited for that had not been recorded")
        return found

    def _known(self, table: dict[int, Known], number: int, what: str) -> Known:
        if number not in table:
            freed = any(memory.address == number for memory in self._freed)
            raise self.gpu.violate(f"{what} was {'used after it was freed' if freed else 'never created'}")
        return table[number]


class FakeClientDevices:
    """The devices as a client sees them: one."""

    _DIRECTIONS: dict[Direction, int] = {"to_device": TO_DEVICE, "to_host": TO_HOST, "within": WITHIN}

    def __init__(self, device: FakeDevice) -> None:
        self.device = device

    def device_of(self, address: int) -> int:
        self.device.room(address)
        return 0

    def extent(self, device: int, size: int) -> CudaExtent:
        own = self.device
        return cuda.create(whole_units(size), own.allocate, own.export, lambda address: None, own.uuid)

    def copy(self, device: int, target: int, source: int, size: int, direction: Direction, stream: int) -> None:
        try:
            self.device.copy(target, source, size, self._DIRECTIONS[direction], stream)
            self.device.synchronize_stream(stream)
        except FakeError as error:
            raise ModelFailed(f"the GPU failed: {error}") from error

    def stream(self, device: int) -> int:
        return self.device.stream()

    def end_stream(self, device: int, stream: int) -> None:
        self.device.destroy_stream(stream)

    def synchronize(self, device: int, stream: int | None) -> None:
        if stream is None:
            self.device.settle()
        else:
            self.device.synchronize_stream(stream)


@contextmanager
def fake_gpu(size: int = 1 << 30) -> Iterator[FakeGpu]:
    """A GPU that the code under test uses."""
    gpu = FakeGpu(size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shmserve.workers.gpu.api.open_device", gpu.device)
        patch.setattr("shmserve.session.gpu.cuda.open_devices", gpu.client_devices)
        yield gpu
    gpu.close()


_: Callable[[FakeGpu], GpuDevice] = FakeGpu.device
