"""Shared memory: requirements for every kind of extent, additional ones for the kinds with a descriptor or a name, and
arenas over them: growth, limits, reuse, and blocks that never overlap.
"""

from __future__ import annotations

import errno
import gc
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from shmserve.errors import Internal, InvalidRequest, ServeError, Unavailable
from shmserve.protocol.messages import OWNER_SHIFT, Handle
from shmserve.shm.arena import Arena, Block, Segment
from shmserve.shm.extents import memfd, posix
from shmserve.shm.extents.base import Extent, MappedExtent
from tests.support.leaks import count_descriptors, own_names

SHARED: dict[str, Callable[[int], Extent]] = {"memfd": memfd.create, "posix": posix.create}
MAKERS: dict[str, Callable[[int], Extent]] = SHARED | {
    "memfd-future-write": lambda size: memfd.create(size, seal_future_write=True)
}
SIZE = MIB = 1 << 20
U8, F32 = np.dtype("uint8"), np.dtype("float32")


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Callable[[int], Extent]:
    return MAKERS[request.param]


@pytest.fixture(params=SHARED)
def shared(request: pytest.FixtureRequest) -> Callable[[int], Extent]:
    return SHARED[request.param]


@pytest.fixture
def arena(shared: Callable[[int], Extent]) -> Iterator[Arena]:
    arena = Arena(1, shared, limit_bytes=64 * MIB)
    yield arena
    arena.close()


def attach(extent: Extent, size: int, writable: bool) -> MappedExtent:
    if extent.name is not None:
        return posix.attach(extent.name, size, writable)
    return memfd.attach(os.dup(extent.fd), size, writable)


def array(extent: Extent) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(extent.memory, np.uint8)


def resident_bytes(address: int) -> int:
    """The resident size of the mapping at this address; -1 if there is none."""
    text = Path("/proc/self/smaps").read_text()
    found = re.search(rf"^0*{address:x}-.*?^Rss: +(\d+) kB", text, re.MULTILINE | re.DOTALL)
    return int(found[1]) * 1024 if found else -1


@pytest.mark.parametrize("size", [SIZE, 5000], ids=["pages", "a part of a page"])
def test_new_memory_is_zero_warm_and_writable_until_it_is_closed(make: Callable[[int], Extent], size: int) -> None:
    before = count_descriptors()
    extent = make(size)
    fd, name, address = extent.fd, extent.name, extent.address
    assert count_descriptors() - before == (1 if fd >= 0 else 0)
    assert (extent.size, extent.pages.writable, len(extent.memory)) == (size, True, size)
    assert resident_bytes(address) >= size
    data = array(extent)
    assert not data.any()
    assert data.ctypes.data == address
    assert address % 4096 == 0
    data[:] = 7
    assert bytes(extent.memory[-3:]) == b"\7\7\7"
    for _ in range(2):
        extent.close()
    assert (count_descriptors(), extent.fd) == (before, -1)
    assert name is None or not Path("/dev/shm", name[1:]).exists()
    for use in (lambda: extent.memory, lambda: extent.address, lambda: extent.pages):
        with pytest.raises(Internal, match="closed"):
            use()
    assert data.all(), "views outlive the extent"
    assert resident_bytes(address) >= size
    del data
    assert resident_bytes(address) == -1


def test_dropping_an_extent_closes_it(make: Callable[[int], Extent]) -> None:
    before = count_descriptors()
    extent = make(SIZE)
    name = extent.name
    del extent
    assert count_descriptors() == before
    assert name is None or not Path("/dev/shm", name[1:]).exists()


@pytest.mark.parametrize("size", [0, -1])
def test_a_size_below_1_is_refused(make: Callable[[int], Extent], size: int) -> None:
    with pytest.raises(Internal, match=f"{size} bytes"):
        make(size)


def test_another_process_shares_the_memory(shared: Callable[[int], Extent]) -> None:
    extent = shared(SIZE)
    array(extent)[:] = 9
    code = """if True:
        import sys
        import numpy as np
        from shmserve.shm.extents import memfd, posix
        where, size = sys.argv[1], int(sys.argv[2])
        extent = memfd.attach(int(where), size, True) if where.isdigit() else posix.attach(where, size, True)
        assert (extent.size, extent.pages.writable, extent.kind) == (size, True, sys.argv[3])
        data = np.frombuffer(extent.memory, np.uint8)
        assert (data == 9).all()
        data[5] = 77
        extent.close()
    """
    command = [sys.executable, "-c", code, extent.name or str(extent.fd), str(SIZE), extent.kind]
    subprocess.run(command, check=True, pass_fds=(extent.fd,))
    assert array(extent)[5] == 77
    assert extent.name is None or Path("/dev/shm", extent.name[1:]).exists(), "only the creator removes the name"
    extent.close()


def test_a_read_only_extent_cannot_be_written_to(shared: Callable[[int], Extent]) -> None:
    extent = shared(SIZE)
    other = attach(extent, SIZE, False)
    assert not other.pages.writable
    assert other.memory.readonly
    data = array(other)
    with pytest.raises(ValueError, match="cannot set WRITEABLE flag"):
        data.flags.writeable = True
    del data
    other.close()
    extent.close()


@pytest.mark.parametrize("size", [SIZE + 1, 2 * SIZE, 0, -1, 2**63 - 1, 2**63, 2**64 + SIZE])
def test_a_wrong_size_is_refused(shared: Callable[[int], Extent], size: int) -> None:
    extent = shared(SIZE)
    before = count_descriptors()
    with pytest.raises(InvalidRequest, match=str(SIZE)):
        attach(extent, size, False)
    assert count_descriptors() == before
    extent.close()


@pytest.mark.parametrize(
    ("number", "text"),
    [(errno.ENOSPC, "is full: .* bytes free"), (errno.ENOMEM, "no memory left"), (errno.EIO, "Input/output error")],
)
def test_the_error_of_a_full_machine_has_the_numbers(
    shared: Callable[[int], Extent], monkeypatch: pytest.MonkeyPatch, number: int, text: str
) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = count_descriptors(), own_names()
    with pytest.raises(Unavailable, match=f"cannot reserve {SIZE} bytes.*{text}") as caught:
        shared(SIZE)
    assert "/dev/shm" not in str(caught.value)
    assert (count_descriptors(), own_names()) == before


def test_segments_are_created_by_allocations_and_double_up_to_their_full_size(shared: Callable[[int], Extent]) -> None:
    announced: list[int] = []
    arena = Arena(
        7, shared, limit_bytes=64 * MIB, segment_bytes=4 * MIB, announce=lambda segment: announced.append(segment.id)
    )
    assert (arena.committed, arena.used, announced) == (0, 0, [])
    block = arena.allocate(1000)
    first = (7 << OWNER_SHIFT) | 1
    assert announced == [first]
    assert (arena.committed, arena.used) == (MIB, 1024)
    assert block.handle() == Handle(first, 0, 1000)
    arena.free(first, 0)
    for _ in range(10):
        arena.allocate(MIB)
    assert [segment.size // MIB for segment in arena.segments] == [1, 1, 2, 4, 4]
    assert arena.allocate(9 * MIB + 1).home.size == 9 * MIB + 4096
    assert [segment.id for segment in arena.segments] == announced == list(range(first, first + 6))
    assert arena.committed == sum(segment.size for segment in arena.segments)
    arena.close()


def test_the_block_freed_last_is_reused_first_even_across_segments(arena: Arena) -> None:
    blocks = [arena.allocate(600 * 1024) for _ in range(4)]
    assert len({block.segment for block in blocks}) > 1
    for block in blocks:
        arena.free(block.segment, block.offset, block.size)
        again = arena.allocate(600 * 1024)
        assert (again.segment, again.offset) == (block.segment, block.offset)


def test_a_batch_is_split_into_rows_that_are_freed_one_by_one(arena: Arena) -> None:
    block = arena.allocate(4 * 3 * 10)
    block.array(F32, (10, 3))[:] = np.arange(30, dtype=F32).reshape(10, 3)
    rows = arena.split(block, [12] * 10)
    assert [row.offset for row in rows] == [block.offset + 12 * number for number in range(10)]
    for number, row in enumerate(rows):
        assert row.size == 12
        assert row.array(F32, (3,)).tolist() == [3 * number, 3 * number + 1, 3 * number + 2]
    random.Random(3).shuffle(rows)
    for row in rows:
        arena.free(row.segment, row.offset, row.size)
        with pytest.raises(InvalidRequest, match="twice"):
            arena.free(row.segment, row.offset)
    assert arena.used == 0
    assert arena.allocate(120).offset == block.offset


@pytest.mark.parametrize("sizes", [[0, 100, 0, 28, 0], [0, 0], [0], [128, 0]])
def test_empty_rows_have_distinct_places(sizes: list[int], arena: Arena) -> None:
    rows = arena.split(arena.allocate(128), sizes)
    assert [row.size for row in rows] == sizes
    assert len({(row.segment, row.offset) for row in rows}) == len(sizes)
    for row in rows:
        arena.free(row.segment, row.offset, row.size)
    assert arena.used == 0


def test_a_split_that_fails_changes_nothing() -> None:
    arena = Arena(1, memfd.create, limit_bytes=4096)
    block = arena.allocate(4096)
    for sizes, error in (([4096, 1], InvalidRequest), ([-1, 5], InvalidRequest), ([], InvalidRequest)):
        with pytest.raises(error):
            arena.split(block, sizes)
    with pytest.raises(Unavailable):
        arena.split(block, [100, 0])
    arena.free(block.segment, block.offset, 4096)
    assert arena.used == 0
    arena.close()


def test_the_error_at_the_limit_names_the_numbers_and_the_setting(shared: Callable[[int], Extent]) -> None:
    arena = Arena(1, shared, limit_bytes=3 * MIB + 100, setting="--arena-bytes")
    first = arena.allocate(MIB)
    arena.allocate(2 * MIB - 4096)
    with pytest.raises(Unavailable, match=rf"no room for 8192 bytes.*of {3 * MIB + 100}.*--arena-bytes"):
        arena.allocate(8192)
    arena.free(first.segment, first.offset)
    assert arena.allocate(8192).segment == first.segment
    with pytest.raises(Unavailable):
        arena.allocate(2**63)
    arena.close()


def test_the_last_segment_is_only_as_large_as_the_limit_allows() -> None:
    arena = Arena(1, memfd.create, limit_bytes=MIB + 300_000)
    arena.allocate(MIB)
    assert arena.allocate(200_000).home.size == 300_000 // 4096 * 4096
    assert arena.committed <= MIB + 300_000
    arena.close()


def test_idle_segments_make_room_if_they_can_be_withdrawn() -> None:
    order: list[int] = []
    arena = Arena(
        2,
        memfd.create,
        limit_bytes=4 * MIB,
        announce=lambda segment: order.append(segment.id),
        withdraw=lambda segment: order.append(-segment),
    )
    blocks = [arena.allocate(MIB) for _ in range(4)]
    before = order.copy()
    for block in blocks:
        arena.free(block.segment, block.offset)
    large = arena.allocate(4 * MIB)
    assert order == [*before, *(-segment for segment in before), large.segment]
    assert large.segment not in before
    arena.close()


def test_trim_releases_all_empty_segments(arena: Arena) -> None:
    blocks = [arena.allocate(MIB) for _ in range(8)]
    kept = blocks[0]
    for block in blocks[1:]:
        arena.free(block.segment, block.offset)
    assert arena.used == MIB
    empty = [segment.id for segment in arena.segments if segment.id != kept.segment]
    assert arena.trim() == empty
    assert arena.trim() == []
    assert arena.committed == sum(segment.size for segment in arena.segments)
    for one in empty:
        with pytest.raises(InvalidRequest, match="does not belong to"):
            arena.free(one, 0)
    assert arena.allocate(20 * MIB).segment not in [*empty, kept.segment], "ids are never reused"


def test_trim_idle_releases_segments_that_stay_empty_and_unused(arena: Arena) -> None:
    held, used, idle = (arena.allocate(size) for size in (MIB, MIB, 2 * MIB))
    assert len({held.segment, used.segment, idle.segment}) == 3
    for block in (idle, used):
        arena.free(block.segment, block.offset)
    assert arena.trim_idle() == [], "it may have been used just before"
    arena.free(*((again := arena.allocate(MIB)).segment, again.offset))
    assert arena.trim_idle() == [one for one in (idle.segment, used.segment) if one != again.segment]
    assert arena.trim_idle() == [again.segment]
    assert arena.trim_idle() == []
    assert [segment.id for segment in arena.segments] == [held.segment]
    assert arena.committed == sum(segment.size for segment in arena.segments)


def test_a_block_that_was_not_allocated_cannot_be_freed(arena: Arena) -> None:
    with pytest.raises(InvalidRequest, match="-5 bytes"):
        arena.allocate(-5)  # without a segment
    block = arena.allocate(100)
    bad = [
        (block.segment + 1, 0, None),
        (0, 0, None),
        (block.segment, 64, None),
        (block.segment, -64, None),
        (block.segment, 2**63 - 1, None),
        (block.segment, 2**64, 5),
        (block.segment, block.offset, 129),
        (block.segment, block.offset, -1),
    ]
    for segment, offset, size in bad:
        with pytest.raises(InvalidRequest):
            arena.free(segment, offset, size)
    arena.free(block.segment, block.offset, 100)
    with pytest.raises(InvalidRequest, match="twice"):
        arena.free(block.segment, block.offset)
    with pytest.raises(InvalidRequest, match="-5 bytes"):
        arena.allocate(-5)  # with one


def test_close_keeps_arrays_valid_and_leaves_no_descriptors_or_names(arena: Arena) -> None:
    before = count_descriptors(), own_names()
    data = arena.allocate(400).array(F32, (10, 10))
    data[:] = 3
    arena.close()
    arena.close()
    assert (count_descriptors(), own_names()) == before
    data += 1
    assert (data == 4).all()
    assert arena.committed == 0
    with pytest.raises(Unavailable, match="closed"):
        arena.allocate(1)


def test_an_array_must_fit_its_block(arena: Arena) -> None:
    block = arena.allocate(100)
    assert len(block.memory()) == 100
    assert block.array(U8, (100,)).ctypes.data == block.address
    with pytest.raises(InvalidRequest, match="needs 104 bytes, the block has 100"):
        block.array(F32, (26,))
    with pytest.raises(InvalidRequest, match="negative"):
        block.array(F32, (-1, -25))
    with pytest.raises(InvalidRequest, match="object"):
        block.array(np.dtype(object), (1,))
    assert block.array(F32, ()).shape == ()
    assert block.array(F32, (0, 5)).shape == (0, 5)


def test_on_drop_is_called_when_the_last_slice_is_dropped(arena: Arena) -> None:
    dropped: list[Block] = []
    block = arena.allocate(4000)
    data = block.array(F32, (10, 100), on_drop=dropped.append)
    part = data.reshape(-1)[7:20].view(np.int32)
    del data
    gc.collect()
    assert dropped == []
    del part
    assert dropped == [block]


def test_arrays_are_found_by_address(arena: Arena) -> None:
    assert arena.locate(4096, 1) is None
    block = arena.allocate(1000)
    data = block.array(U8, (1000,))
    part = data[100:200]
    assert arena.locate(part.ctypes.data, part.nbytes) == (block.segment, block.offset + 100)
    home = block.home
    assert arena.locate(home.address, home.size) == (home.id, 0)
    assert arena.locate(home.address, home.size + 1) is None
    assert arena.locate(home.address - 1, 1) is None
    assert arena.locate(home.address + home.size, 1) is None
    assert arena.locate(home.address, -1) is None
    far = arena.allocate(MIB)
    assert arena.locate(far.address + 5, 10) == (far.segment, 5)
    assert arena.locate(np.zeros(5).ctypes.data, 40) is None


def test_renumber_gives_all_segments_new_ids() -> None:
    announced: list[int] = []
    arena = Arena(3, memfd.create, limit_bytes=64 * MIB, announce=lambda segment: announced.append(segment.id))
    first, second = arena.allocate(MIB), arena.allocate(MIB)
    old = [first.segment, second.segment]
    arena.renumber(9)
    assert [one >> OWNER_SHIFT for one in (first.segment, second.segment)] == [9, 9]
    assert announced == [*old, first.segment, second.segment]
    with pytest.raises(InvalidRequest):
        arena.free(old[0], 0)
    arena.free(first.segment, first.offset)
    arena.free(second.segment, second.offset)
    assert arena.used == 0
    arena.close()


def test_a_segment_that_could_not_be_announced_is_not_kept(shared: Callable[[int], Extent]) -> None:
    def fail(_: Segment) -> None:
        raise ServeError("the link is down")

    gc.collect()
    before = count_descriptors(), own_names()
    arena = Arena(1, shared, limit_bytes=MIB, announce=fail)
    with pytest.raises(ServeError, match="link is down"):
        arena.allocate(1)
    gc.collect()
    assert (count_descriptors(), own_names()) == before
    assert (arena.committed, arena.segments) == (0, [])


def test_a_smaller_segment_is_tried_if_memory_is_short() -> None:
    requested: list[int] = []

    def scarce(size: int) -> Extent:
        requested.append(size)
        if size > 8192:
            raise Unavailable(f"cannot reserve {size} bytes")
        return memfd.create(size)

    arena = Arena(1, scarce, limit_bytes=64 * MIB)
    assert arena.allocate(5000).home.size == 8192
    assert requested == [MIB, 8192]
    with pytest.raises(Unavailable, match="12288"):
        arena.allocate(10_000)
    arena.close()
