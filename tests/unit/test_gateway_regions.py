"""Shared memory that callers of the gateway have registered. The oracle is the descriptor that made it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from typing import Any

import posix_ipc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.clients.gateway.kserve import Place
from shmserve.clients.gateway.regions import Order, Region, Regions
from shmserve.errors import AlreadyExists, InvalidRequest, NotFound, Unsupported


@pytest.fixture
def memory() -> Iterator[tuple[str, int]]:
    """The key and the descriptor of 4096 bytes."""
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
    regions.register("system", "r", Order(key, 1000, 100))
    assert regions.status("system", "r") == [{"name": "r", "key": key, "offset": 100, "byte_size": 1000}]
    assert regions.status("cuda", "") == []
    region = regions.find(Place("r", 2, 5))
    target = bytearray(5)
    region.read_into(Place("r", 2, 5), target)
    assert target == b"23456"
    region.write(Place("r", 995, 5), [b"abc", memoryview(b"de")])
    assert os.pread(descriptor, 6, 1095) == b"abcde\0"
    with pytest.raises(AlreadyExists, match="already in manager"):
        regions.register("system", "r", Order(key, 10))
    regions.unregister("system", "r")
    regions.unregister("system", "r")
    with pytest.raises(NotFound, match="Unable to find shared memory region: 'r'"):
        regions.find(Place("r", 0, 1))
    region.read_into(Place("r", 0, 5), target)
    assert target == b"01234", "requests in flight still have it"


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1))
def test_no_place_is_outside_its_region(offset: int, size: int) -> None:
    region = Region("r", Order("/x", 1000, 5), os.open(os.devnull, os.O_RDWR))
    if offset < 1000 and offset + size <= 1000:
        region.check(Place("r", offset, size))
        return
    with pytest.raises(InvalidRequest, match="Invalid offset"):
        region.check(Place("r", offset, size))


def test_a_region_that_is_cut_short(memory: tuple[str, int]) -> None:
    key, descriptor = memory
    regions = Regions(True)
    regions.register("system", "r", Order(key, 4096))
    region = regions.find(Place("r", 0, 4096))
    os.ftruncate(descriptor, 100)
    with pytest.raises(InvalidRequest, match="is shorter than when it was registered"):
        region.read_into(Place("r", 0, 4096), bytearray(4096))
    with pytest.raises(InvalidRequest, match="is shorter than when it was registered"):
        region.write(Place("r", 96, 5), [b"abcde"])
    assert os.fstat(descriptor).st_size == 100


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"byte_size": 4097}, "failed to register shared memory region 'r': invalid args"),
        ({"byte_size": 4096, "offset": 1}, "invalid args"),
        ({"byte_size": 0}, "invalid args"),
        ({"byte_size": -1}, "invalid args"),
        ({"offset": -1}, "invalid args"),
        ({"offset": 2**63 - 1, "byte_size": 2**63 - 1}, "invalid args"),
        ({"key": "/nothing-of-that-name"}, "Unable to open shared memory region: '/nothing-of-that-name'"),
        ({"key": ""}, "no key"),
        ({"key": ".."}, "no key"),
        ({"key": "/../etc/passwd"}, "no key"),
        ({"key": "/a/b"}, "no key"),
        ({"key": "x" * 300}, "no key"),
        ({"key": "/shmserve-1-2-3-" + "0" * 32}, "no key"),
        ({"key": "shmserve-1"}, "no key"),
    ],
)
def test_regions_that_are_refused(memory: tuple[str, int], change: dict[str, Any], said: str) -> None:
    order = Order(memory[0], 10)
    for name, value in change.items():
        setattr(order, name, value)
    with pytest.raises(InvalidRequest, match=said):
        Regions(True).register("system", "r", order)


def test_regions_are_off_unless_they_are_allowed(memory: tuple[str, int]) -> None:
    with pytest.raises(Unsupported, match="Client shared memory is disabled"):
        Regions(False).register("system", "r", Order(memory[0], 10))
    with pytest.raises(Unsupported, match="CUDA"):
        Regions(True).register("cuda", "r", Order("", 0))
