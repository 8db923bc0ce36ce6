"""A fake of the CUDA runtime without a device: device memory is host memory, and a stream is a list of pending work.

Invariant: asynchronous work runs only when something waits for it. So a result that is read too early, or a source that
is reused too early, is wrong every time instead of sometimes. The work of streams in `State.eager` runs at once
instead: with such a stream, memory that is overwritten too early is wrong every time.

Memory that is used outside of its bounds, or that is released while a copy of it is pending or while it is open
elsewhere, is a violation. Violations are kept, because the code under test may catch them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

memcpyHostToHost, memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice = 0, 1, 2, 3
streamNonBlocking = 1
streamCaptureModeThreadLocal = 1
eventBlockingSync, eventDisableTiming = 1, 2
cudaDevAttrHostRegisterReadOnlySupported = 113
_NAMES = {2: "cudaErrorMemoryAllocation: out of memory", 700: "cudaErrorIllegalAddress"}
_UNKNOWN = "cudaErrorInvalidValue"
JOURNAL = os.environ.get("CUDA_STANDIN_JOURNAL", "")
"""Folder in which each process logs its calls, with the kind of each copy."""


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(_NAMES.get(status, _UNKNOWN))


class Violation(AssertionError):
    """The code under test misused the device."""


class _Work(NamedTuple):
    """`uses`: the memory that is read and written, as (address, size)."""

    run: Callable[[], object]
    uses: tuple[tuple[int, int], ...]


class _Memory:
    """An allocation, backed by a file so that another process can also map it."""

    def __init__(self, size: int, descriptor: int = -1) -> None:
        if descriptor < 0:
            descriptor = os.memfd_create("standin")
            os.ftruncate(descriptor, max(size, 1))
        self.descriptor = descriptor
        self.size = size
        self._pages = mmap.mmap(descriptor, max(size, 1))
        self._view = (ctypes.c_char * max(size, 1)).from_buffer(self._pages)
        self.address = ctypes.addressof(self._view)

    def fill(self) -> None:
        ctypes.memset(self.address, 0xCB, self.size)

    def close(self) -> None:
        del self._view
        self._pages.close()
        os.close(self.descriptor)


class _Stream:
    def __init__(self, flags: int, priority: int) -> None:
        self.flags = flags
        self.priority = priority
        self.waiting: deque[_Work] = deque()
        self.done = 0
        self.captured: list[_Work] | None = None

    def add(self, what: Callable[[], object], *uses: tuple[int, int]) -> None:
        work = _Work(what, uses)
        if self.captured is not None:
            self.captured.append(work)
        else:
            self.waiting.append(work)
            if self in state.eager:
                self.run(self.asked)

    @property
    def asked(self) -> int:
        return self.done + len(self.waiting)

    def run(self, until: int) -> None:
        while self.done < until:
            work = self.waiting.popleft()
            self.done += 1
            work.run()


class State:
    """State that tests inspect and set."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.total = int(os.environ.get("STANDIN_DEVICE_BYTES", str(1 << 30)))
        self.uuid = bytes.fromhex(os.environ.get("CUDA_VISIBLE_DEVICES", "GPU-00").removeprefix("GPU-"))
        self.capability = (9, 0)
        self.read_only_registration = 1
        self.device: dict[int, _Memory] = {}
        self.opened: dict[int, _Memory] = {}
        self.pinned: dict[int, _Memory] = {}
        self.registered: dict[int, int] = {}
        self.streams: dict[int, _Stream] = {0: _Stream(0, 0)}
        self.events: dict[int, tuple[int, tuple[_Stream, int] | None]] = {}
        self.graphs: dict[int, list[_Work]] = {}
        self.instances: dict[int, list[_Work]] = {}
        self.foreign: dict[int, int] = {}
        """Device memory of other libraries: address -> bytes."""
        self.eager: set[_Stream] = set()
        """Streams whose work runs as soon as it is queued."""
        self.failures: dict[str, int] = {}
        """Name of a function -> the status with which its next call fails."""
        self.violations: list[Violation] = []
        self.number = 100

    def call(self, name: str, *arguments: Any) -> None:
        self.calls.append((name, *arguments))
        if JOURNAL:
            with open("/proc/self/comm") as process, open(f"{JOURNAL}/{process.read().strip()}", "a") as file:
                file.write(f"{name} {arguments[3] if name == 'memcpyAsync' else ''}\n")
        status = self.failures.pop(name, 0)
        if status:
            raise CUDARuntimeError(status)

    def next(self) -> int:
        self.number += 1
        return self.number

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [call for call in self.calls if call[0] == name]

    def left(self) -> dict[str, int]:
        """Objects that were created and not freed."""
        found = {
            "device": len(self.device),
            "opened": len(self.opened),
            "pinned": len(self.pinned),
            "registered": len(self.registered),
            "streams": len(self.streams) - 1,
            "events": len(self.events),
            "graphs": len(self.graphs) + len(self.instances),
        }
        return {name: count for name, count in found.items() if count}

    def has(self, address: int, size: int) -> bool:
        """True if these bytes are memory of the device."""
        known = [(memory.address, memory.size) for memory in (*self.device.values(), *self.opened.values())]
        return any(at <= address and address + size <= at + length for at, length in (*known, *self.foreign.items()))

    def within(self, address: int, size: int) -> None:
        if not self.has(address, size):
            raise CUDARuntimeError(700)

    def release(self, address: int, size: int) -> None:
        """Nothing may use the memory any more."""
        waiting = (work for stream in self.streams.values() for work in stream.waiting)
        if any(used < address + size and address < used + length for work in waiting for used, length in work.uses):
            self.violate(f"memory of {size} bytes was released while work that uses it is pending")

    def violate(self, text: str) -> None:
        self.violations.append(Violation(text))
        raise self.violations[-1]

    def stream(self, handle: int) -> _Stream:
        found = self.streams.get(0 if handle == 1 else handle)  # 1: cudaStreamLegacy, the default stream
        if found is None:
            raise CUDARuntimeError(400)
        return found


state = State()


def reset() -> State:
    global state
    state = State()
    return state


def setDevice(device: int) -> None:
    state.call("setDevice", device)
    if device != 0:
        raise CUDARuntimeError(101)


def getDevice() -> int:
    return 0


def getDeviceProperties(device: int) -> dict[str, Any]:
    """The properties of a device. The uuid equals that of NVML."""
    major, minor = state.capability
    return {"uuid": state.uuid, "major": major, "minor": minor}


def pointerGetAttributes(address: int) -> Any:
    state.call("pointerGetAttributes", address)
    state.within(address, 1)
    return SimpleNamespace(device=0)


def deviceGetAttribute(attribute: int, device: int) -> int:
    if attribute != cudaDevAttrHostRegisterReadOnlySupported:
        raise CUDARuntimeError(1)
    return state.read_only_registration


def memGetInfo() -> tuple[int, int]:
    return state.total - sum(memory.size for memory in state.device.values()), state.total


def malloc(size: int) -> int:
    state.call("malloc", size)
    if size > memGetInfo()[0]:
        raise CUDARuntimeError(2)
    made = _Memory(size)
    made.fill()
    state.device[made.address] = made
    return made.address


def free(address: int) -> None:
    state.call("free", address)
    memory = state.device[address]
    state.release(address, memory.size)
    if any(os.path.sameopenfile(memory.descriptor, opened.descriptor) for opened in state.opened.values()):
        state.violate(f"memory of {memory.size} bytes was freed while it is open elsewhere")
    state.device.pop(address).close()


def hostAlloc(size: int, flags: int) -> int:
    state.call("hostAlloc", size, flags)
    made = _Memory(size)
    state.pinned[made.address] = made
    return made.address


def freeHost(address: int) -> None:
    state.call("freeHost", address)
    state.release(address, state.pinned[address].size)
    state.pinned.pop(address).close()


def hostRegister(address: int, size: int, flags: int) -> None:
    state.call("hostRegister", address, size, flags)
    if any(address < start + length and start < address + size for start, length in state.registered.items()):
        raise CUDARuntimeError(712)
    state.registered[address] = size


def hostUnregister(address: int) -> None:
    state.call("hostUnregister", address)
    if address not in state.registered:
        raise CUDARuntimeError(713)
    state.release(address, state.registered[address])
    del state.registered[address]


def ipcGetMemHandle(address: int) -> bytes:
    state.call("ipcGetMemHandle", address)
    memory = state.device[address]
    return struct.pack("<QQQ", os.getpid(), memory.descriptor, memory.size).ljust(64, b"\0")


def ipcOpenMemHandle(handle: bytes) -> int:
    state.call("ipcOpenMemHandle", handle)
    assert len(handle) == 64
    pid, descriptor, size = struct.unpack_from("<QQQ", handle)
    try:
        made = _Memory(size, os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        raise CUDARuntimeError(201) from error
    state.opened[made.address] = made
    return made.address


def ipcCloseMemHandle(address: int) -> None:
    state.call("ipcCloseMemHandle", address)
    state.release(address, state.opened[address].size)
    state.opened.pop(address).close()


def memcpyAsync(target: int, source: int, size: int, kind: int, stream: int) -> None:
    state.call("memcpyAsync", target, source, size, kind, stream)

    def check() -> None:
        on_device = [target] if kind in (memcpyHostToDevice, memcpyDeviceToDevice) else []
        on_device += [source] if kind in (memcpyDeviceToHost, memcpyDeviceToDevice) else []
        if not all(state.has(address, size) for address in on_device):
            state.violate(f"a copy of {size} bytes is outside of the memory of the device")

    def run() -> None:
        check()
        ctypes.memmove(target, source, size)

    check()
    state.stream(stream).add(run, (target, size), (source, size))


def streamCreateWithPriority(flags: int, priority: int) -> int:
    state.call("streamCreateWithPriority", flags, priority)
    handle = state.next()
    state.streams[handle] = _Stream(flags, priority)
    return handle


def streamCreateWithFlags(flags: int) -> int:
    state.call("streamCreateWithFlags", flags)
    handle = state.next()
    state.streams[handle] = _Stream(flags, 0)
    return handle


def streamDestroy(stream: int) -> None:
    state.call("streamDestroy", stream)
    del state.streams[stream]


def streamSynchronize(stream: int) -> None:
    state.call("streamSynchronize", stream)
    found = state.stream(stream)
    found.run(found.asked)


def deviceSynchronize() -> None:
    state.call("deviceSynchronize")
    for stream in state.streams.values():
        stream.run(stream.asked)


def streamWaitEvent(stream: int, event: int, flags: int = 0) -> None:
    state.call("streamWaitEvent", stream, event)
    mark = state.events[event][1]
    if mark is not None:
        state.stream(stream).add(lambda: mark[0].run(mark[1]))


def eventCreateWithFlags(flags: int) -> int:
    state.call("eventCreateWithFlags", flags)
    handle = state.next()
    state.events[handle] = flags, None
    return handle


def eventRecord(event: int, stream: int) -> None:
    state.call("eventRecord", event, stream)
    found = state.stream(stream)
    state.events[event] = state.events[event][0], (found, found.asked)


def eventQuery(event: int) -> int:
    """The status, without an exception. Like a wait, it does not run other work than that before the event; the work
    is never found unfinished unless `failures` says so (600)."""
    try:
        state.call("eventQuery", event)
        mark = state.events[event][1]
        if mark is not None:
            mark[0].run(mark[1])
    except CUDARuntimeError as error:
        return error.status
    return 0


def eventSynchronize(event: int) -> None:
    state.call("eventSynchronize", event)
    mark = state.events[event][1]
    if mark is not None:
        mark[0].run(mark[1])


def eventDestroy(event: int) -> None:
    state.call("eventDestroy", event)
    del state.events[event]


def streamBeginCapture(stream: int, mode: int = 2) -> None:
    state.call("streamBeginCapture", stream, mode)
    state.stream(stream).captured = []


def streamEndCapture(stream: int) -> int:
    state.call("streamEndCapture", stream)
    found = state.stream(stream)
    captured, found.captured = found.captured, None
    if captured is None:
        raise CUDARuntimeError(901)
    handle = state.next()
    state.graphs[handle] = captured
    return handle


def graphInstantiate(graph: int) -> int:
    state.call("graphInstantiate", graph)
    handle = state.next()
    state.instances[handle] = state.graphs[graph]
    return handle


def graphLaunch(instance: int, stream: int) -> None:
    state.call("graphLaunch", instance, stream)
    found = state.stream(stream)
    for work in state.instances[instance]:
        found.add(work.run, *work.uses)


def graphDestroy(graph: int) -> None:
    state.call("graphDestroy", graph)
    del state.graphs[graph]


def graphExecDestroy(instance: int) -> None:
    state.call("graphExecDestroy", instance)
    del state.instances[instance]
