"""Shared memory that callers of the gateway have registered. The oracle is the descriptor with which it was created."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import posix_ipc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.errors import AlreadyExists, Internal, InvalidRequest, NotFound, ServeError, Unsupported
from shmserve.gateway.kserve.plans import RegionSlice, RequestOptions, RequestPlan
from shmserve.gateway.limits.caller_shares import CallerShares
from shmserve.gateway.upstream.device_regions import DeviceOrder
from shmserve.gateway.upstream.regions import Region, Regions, Registration
from shmserve.gateway.upstream.requests import ModelRequest, PendingCall, RequestSender
from shmserve.protocol.messages import INLINE_BYTES, Handle
from shmserve.session.memory import SessionMemory
from shmserve.shm.extents.cuda import parts_of
from tests.support.cases import cases
from tests.support.workers.gpu.harness import standins

ME = "alice", ""


class Call(PendingCall):
    def take(self, answer: object) -> None: ...

    def failed(self, error: ServeError) -> None: ...


@pytest.fixture
def memory() -> Iterator[tuple[str, int]]:
    """The key and the descriptor of a region of 4096 bytes."""
    key = f"/h-{os.getpid()}-{secrets.token_hex(8)}"
    made = posix_ipc.SharedMemory(key, posix_ipc.O_CREX, size=4096)
    try:
        yield key, made.fd
    finally:
        made.close_fd()
        posix_ipc.unlink_shared_memory(key)


def test_a_region_is_read_and_written(memory: tuple[str, int]) -> None:
    key, descriptor = memory
    os.pwrite(descriptor, b"0123456789", 100)
    regions = Regions(True)
    regions.register("r", Registration(key, 1000, 100), ME)
    assert regions.status("system", "r") == [{"name": "r", "key": key, "offset": 100, "byte_size": 1000}]
    assert regions.status("cuda", "") == []
    region: Any = regions.find(RegionSlice("r", 2, 5))
    target = bytearray(5)
    region.read_into(RegionSlice("r", 2, 5), target)
    assert target == b"23456"
    region.write(RegionSlice("r", 995, 5), [b"abc", memoryview(b"de")])
    assert os.pread(descriptor, 6, 1095) == b"abcde\0"
    with pytest.raises(AlreadyExists, match="already in manager"):
        regions.register("r", Registration(key, 10), ME)
    regions.unregister("system", "r", ME)
    regions.unregister("system", "r", ME)
    with pytest.raises(NotFound, match="Unable to find shared memory region: 'r'"):
        regions.find(RegionSlice("r", 0, 1))
    region.read_into(RegionSlice("r", 0, 5), target)
    assert target == b"01234", "requests in flight still have it"


def test_a_region_in_use_is_unregistered_after_its_last_request(memory: tuple[str, int]) -> None:
    changes, paid = list[int](), list[int]()
    regions = Regions(True, changed=lambda: changes.append(1))
    payer: Any = SimpleNamespace(give=paid.append)

    def names() -> list[str]:
        return [region["name"] for region in regions.status("system", "")]

    regions.register("r", Registration(memory[0], 1000), ME)
    regions.register("idle", Registration(memory[0], 1000), ME)
    first = regions.use(payer, ["r", "r"])
    regions.unregister("system", "", ME)
    assert names() == ["r"]
    regions.find(RegionSlice("r", 0, 1))
    with pytest.raises(AlreadyExists):
        regions.register("r", Registration(memory[0], 10), ME)
    second = regions.use(payer, ["r"])
    first.give(5)
    assert (names(), len(changes)) == (["r"], 1)
    second.give(7)
    assert (names(), len(changes), paid) == ([], 2, [5, 7])
    regions.register("r", Registration(memory[0], 10), ME)
    regions.use(payer, ["r"]).give(0)
    assert names() == ["r"], "it was not unregistered"


def test_a_caller_unregisters_all_of_its_own_regions_only(memory: tuple[str, int]) -> None:
    regions = Regions(True)
    for name, caller in ("one", ME), ("two", ("bob", "")), ("three", ("alice", "192.0.2.1")), ("four", ME):
        regions.register(name, Registration(memory[0], 10), caller)
    regions.unregister("system", "", ME)
    assert [region["name"] for region in regions.status("system", "")] == ["two", "three"]
    regions.unregister("system", "two", ME)
    assert [region["name"] for region in regions.status("system", "")] == ["three"], "by name, anyone may"
    regions.register("two", Registration(memory[0], 10), ME)
    regions.unregister("system", "", ("bob", ""))
    assert [region["name"] for region in regions.status("system", "")] == ["three", "two"]


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1))
def test_slices_outside_their_region_are_refused(offset: int, size: int) -> None:
    region = Region("r", Registration("/x", 1000, 5), os.open(os.devnull, os.O_RDWR))
    inside = offset < 1000 and offset + size <= 1000
    with nullcontext() if inside else pytest.raises(InvalidRequest, match="Invalid offset"):
        region.check(RegionSlice("r", offset, size))


@cases(
    (2**64 - 32, 64, "Invalid offset for shared memory region: 'r'"),
    (32, 2**64 - 32, "Integer overflow detected: byte_size (18446744073709551584) + offset (32) > "),
    (32, 2**64 - 33, "Invalid offset + byte size for shared memory region: 'r'"),
)
def test_the_offset_is_checked_before_the_size(offset: int, size: int, said: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(said)):
        RegionSlice("r", offset, size).check("r", 1000)


def test_a_truncated_region_is_refused(memory: tuple[str, int]) -> None:
    key, descriptor = memory
    regions = Regions(True)
    regions.register("r", Registration(key, 4096), ME)
    region: Any = regions.find(RegionSlice("r", 0, 4096))
    os.ftruncate(descriptor, 100)
    with pytest.raises(InvalidRequest, match="is smaller than when it was registered"):
        region.read_into(RegionSlice("r", 0, 4096), bytearray(4096))
    with pytest.raises(InvalidRequest, match="is smaller than when it was registered"):
        region.write(RegionSlice("r", 96, 5), [b"abcde"])
    assert os.fstat(descriptor).st_size == 100


@cases(
    ({"byte_size": 4097}, "failed to register shared memory region 'r': invalid args"),
    *(
        (args, "invalid args")
        for args in (
            {"byte_size": 4096, "offset": 1},
            {"byte_size": 0},
            {"byte_size": -1},
            {"offset": -1},
            {"offset": 2**63 - 1, "byte_size": 2**63 - 1},
        )
    ),
    *(({"key": key}, "invalid shm key") for key in ("", "..", "/../etc/passwd", "/a/b", "x" * 300)),
    ({"key": "/"}, "cannot register shared memory region 'r' - invalid shm key '/'"),
    ({"key": "/shmserve-1-2-3-" + "0" * 32}, "contains the reserved prefix 'shmserve-'"),
    ({"key": "shmserve-1"}, "contains the reserved prefix 'shmserve-'"),
    ({"key": "//triton_python_backend_shm_region_1"}, "reserved prefix 'triton_python_backend_shm_region_'"),
)
def test_regions_that_are_refused(change: dict[str, Any], said: str, memory: tuple[str, int]) -> None:
    order: dict[str, Any] = {"key": memory[0], "byte_size": 10} | change
    with pytest.raises(InvalidRequest, match=said):
        Regions(True).register("r", Registration(**order), ME)


def test_regions_are_off_unless_they_are_allowed(memory: tuple[str, int]) -> None:
    with pytest.raises(Unsupported, match="Client shared memory is disabled"):
        Regions(False).register("r", Registration(memory[0], 10), ME)
    with pytest.raises(Unsupported, match="Client shared memory is disabled"):
        Regions(False).unregister("system", "r", ME)
    with pytest.raises(Unsupported, match="CUDA"):
        Regions(True).register("r", DeviceOrder(bytes(64), 0, 100), ME)
    with pytest.raises(Internal, match="Unable to open shared memory region: '/nothing-of-that-name'"):
        Regions(True).register("r", Registration("/nothing-of-that-name", 0), ME)


@pytest.mark.parametrize(("size", "window", "asked"), [(8192, 0, ["config"]), (8192, 2, []), (INLINE_BYTES, 0, [])])
def test_the_configuration_is_queried_only_if_a_worker_could_write_there(
    memory: tuple[str, int], size: int, window: int, asked: list[str]
) -> None:
    key, descriptor = memory
    os.ftruncate(descriptor, 8192)
    mapped = SessionMemory("memfd", 1 << 20)
    mapped.announcements.named_memory = True
    questions: list[str] = []
    session = SimpleNamespace(memory=mapped, infer=lambda *_: None, ask=lambda _, what, *__: questions.append(what))
    link: Any = SimpleNamespace(session=session, send_soon=lambda: None)
    regions = Regions(True, lambda: mapped.foreign)
    regions.register("r", Registration(key, 8192), ME)
    plan = RequestPlan((), 0, RequestOptions(), ["y"], places={"y": RegionSlice("r", 0, size)})
    sender = RequestSender(link, regions)
    payer = CallerShares().connect("127.0.0.1").payer("")
    sender.infer(Call(), ModelRequest(payer, "m", "", plan, [], ""), window)
    sender.infer(Call(), ModelRequest(payer, "m", "", plan, [], ""), window)
    assert questions == asked
    mapped.close()


UUIDS = ["GPU-" + "00112233-4455-6677-8899-aabbccddeeff", "GPU-" + "01" * 16]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[SessionMemory]:
    """The memory of a link to a broker that has GPUs."""
    monkeypatch.setenv("STANDIN_GPUS", json.dumps([{"uuid": uuid, "pci": str(n)} for n, uuid in enumerate(UUIDS)]))
    memory = SessionMemory("memfd", 1 << 20)
    with standins():
        yield memory
    memory.close()


def test_gpu_memory_is_only_forwarded(gpus: SessionMemory) -> None:
    handle = bytes(range(64))
    regions = Regions(True, lambda: gpus.foreign)
    regions.register("g", DeviceOrder(handle, 1, 1000), ME)
    assert regions.status("cuda", "") == [{"name": "g", "device_id": 1, "byte_size": 1000}]
    assert regions.status("system", "") == []
    (told,) = [segment.map() for segment in gpus.announcements.maps]
    assert told.size == 1000
    assert told.name is not None
    assert parts_of(told.name) == (handle, b"\x01" * 16)
    region: Any = regions.find(RegionSlice("g", 100, 900))
    part = region.part(RegionSlice("g", 100, 900))
    assert part.handle == Handle(told.segment, 100, 900)
    with pytest.raises(InvalidRequest, match="Invalid offset"):
        regions.find(RegionSlice("g", 100, 901))
    with pytest.raises(AlreadyExists):
        regions.register("g", Registration("/k", 1), ME)
    gpus.announcements.maps.clear()  # it has been notified
    gpus.announcements.connected(9, True, True)
    gpus.foreign.connected()
    assert part.handle == Handle(gpus.announcements.maps[0].id, 100, 900)
    assert part.handle.segment >> 32 == 9
    gpus.announcements.maps.clear()
    regions.unregister("system", "", ME)
    assert regions.status("cuda", "g")
    regions.unregister("cuda", "g", ME)
    assert gpus.announcements.unmaps == [part.handle.segment]
    with pytest.raises(NotFound):
        regions.find(RegionSlice("g", 0, 1))


@cases(
    (63, 0, 10, "a CUDA handle has 64 bytes, this one 63"),
    (65, 0, 10, "this one 65"),
    (0, 0, 10, "this one 0"),
    (64, 0, 0, "and the region 0"),
    (64, 0, -1, "and the region -1"),
    (64, 0, 2**63, "and the region"),
    (64, 2, 10, "there is no GPU 2"),
    (64, -1, 10, "there is no GPU -1"),
)
def test_invalid_gpu_memory_is_refused(
    handle_bytes: int, device: int, size: int, said: str, gpus: SessionMemory
) -> None:
    regions = Regions(True, lambda: gpus.foreign)
    with pytest.raises(InvalidRequest, match=said):
        regions.register("g", DeviceOrder(bytes(handle_bytes), device, size), ME)
    gpus.announcements.device_memory = False
    with pytest.raises(Unsupported, match="only from connections with the role operate"):
        regions.register("g", DeviceOrder(bytes(64), 0, 10), ME)
    assert regions.status("cuda", "") == []
    assert gpus.announcements.maps == []
