"""Views of segments of other processes: read-only, within bounds, with one notification when the last is dropped."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.dtypes import ITEM_BYTES, to_numpy
from shmserve.errors import HandleLost, InvalidRequest, ServeError
from shmserve.protocol.messages import Handle
from shmserve.shm.arena import Arena, Block
from shmserve.shm.extents import memfd, posix
from shmserve.shm.mapped import Mapped
from tests.support.hypothesis_profiles import examples
from tests.support.leaks import count_descriptors

MIB = 1 << 20
U8 = np.dtype("uint8")
F32 = np.dtype("float32")
Array = np.ndarray[Any, np.dtype[Any]]


class Pair:
    """An arena and a process that maps its segments (the same process here)."""

    def __init__(self, seal: bool = False) -> None:
        self.arena = Arena(5, lambda size: memfd.create(size, seal), limit_bytes=64 * MIB)
        self.mapped = Mapped()

    def block(self, size: int) -> Block:
        block = self.arena.allocate(size)
        if block.segment not in self.mapped:
            self.mapped.add(block.segment, block.home.size, fd=os.dup(block.home.fd))
        return block

    def close(self) -> None:
        self.arena.close()
        self.mapped.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def accesses(mapped: Mapped, handle: Handle) -> list[Callable[[], Any]]:
    return [
        lambda: mapped.view(handle, U8, (handle.size,)),
        lambda: mapped.writable(handle, U8, (handle.size,)),
        lambda: mapped.memory(handle),
        lambda: mapped.address(handle),
    ]


@pytest.mark.parametrize("name", [name for name, size in ITEM_BYTES.items() if size])
@pytest.mark.parametrize("shape", [(), (6,), (2, 3), (0,), (4, 0, 2), (1, 1, 1, 1, 1, 7)])
def test_a_view_has_the_values_of_the_owner(pair: Pair, name: str, shape: tuple[int, ...]) -> None:
    dtype = to_numpy(name)
    values = np.random.default_rng(3).integers(0, 2, shape).astype(dtype)
    block = pair.block(values.nbytes)
    block.array(dtype, shape)[...] = values
    view = pair.mapped.view(block.handle(), dtype, shape)
    assert (view.dtype, view.shape, view.flags.c_contiguous, view.flags.aligned) == (dtype, shape, True, True)
    assert (view == values).all()
    assert not view.flags.writeable
    assert pair.mapped.address(block.handle()) == view.ctypes.data or not view.size


def test_nothing_makes_a_view_writeable(pair: Pair) -> None:
    block = pair.block(4000)
    handle = block.handle()
    view = pair.mapped.view(handle, F32, (10, 100))
    bfloat = pair.mapped.view(handle, np.dtype(ml_dtypes.bfloat16), (2000,))
    memory = np.frombuffer(pair.mapped.memory(handle), np.uint8)
    for array in (view, view[2:4], view.reshape(-1), view.view(np.int32), view.T, np.asarray(view), bfloat, memory):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 1
        with pytest.raises(ValueError, match="cannot set WRITEABLE flag"):
            array.flags.writeable = True
        with pytest.raises(ValueError, match="cannot set WRITEABLE flag"):
            array.setflags(write=True)
    assert pair.mapped.memory(handle).readonly
    assert len(pair.mapped.memory(handle)) == 4000
    pair.mapped.writable(handle, U8, (4000,))[0] = 6
    assert pair.mapped.memory(handle)[0] == 6
    ranges = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    ends = {tuple(int(end, 16) for end in fields[0].split("-")): fields[1] for fields in ranges}
    address = pair.mapped.address(handle)
    assert [rights for (start, end), rights in ends.items() if start <= address < end] == ["r--s"], (
        "for the kernel, too"
    )


EDGES = st.sampled_from([0, 1, 63, 64, MIB - 1, MIB, MIB + 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, -1, -64, -(2**63)])


@settings(max_examples=examples(300))
@given(offset=EDGES | st.integers(0, MIB), size=EDGES | st.integers(0, MIB))
def test_no_handle_reaches_outside_its_segment(offset: int, size: int) -> None:
    pair = Pair()
    segment = pair.block(1).segment
    handle = Handle(segment, offset, size)
    inside = offset >= 0 and size >= 0 and offset + size <= MIB
    for attempt in accesses(pair.mapped, handle):
        if inside:
            attempt()
        else:
            with pytest.raises(InvalidRequest, match=f"offset {offset} and size {size} is outside"):
                attempt()
    pair.close()


@pytest.mark.parametrize(
    "shape", [(9,), (11,), (2, 6), (2**62, 4), (2**33, 2**33), (2**64, 0, 1, 5), (-10,), (-2, -5), (), (10, 1, 2)]
)
def test_the_size_of_the_shape_must_be_that_of_the_handle(pair: Pair, shape: tuple[int, ...]) -> None:
    handle = pair.block(40).handle()
    for attempt in (pair.mapped.view, pair.mapped.writable):
        with pytest.raises(InvalidRequest, match=r"40|negative dim"):
            attempt(handle, F32, shape)


def test_objects_are_never_read_from_shared_memory(pair: Pair) -> None:
    handle = pair.block(8).handle()
    for dtype in (np.dtype(object), np.dtype([("a", object)]), np.dtype("V0"), np.dtype("S0")):
        with pytest.raises(InvalidRequest):
            pair.mapped.view(handle, dtype, (1,))


def test_a_segment_that_was_not_announced_is_lost(pair: Pair) -> None:
    for attempt in accesses(pair.mapped, Handle(77, 0, 4)):
        with pytest.raises(HandleLost, match="77"):
            attempt()
    with pytest.raises(InvalidRequest, match="77 is not mapped"):
        pair.mapped.remove(77)


def test_adding_keeps_no_descriptor_also_when_it_fails() -> None:
    extent, named = memfd.create(MIB), posix.create(MIB)
    mapped = Mapped()
    before = count_descriptors()
    mapped.add(1, MIB, fd=os.dup(extent.fd))
    assert count_descriptors() == before
    assert (len(mapped), mapped.committed) == (1, MIB)
    bad: list[dict[str, Any]] = [
        {"segment": 1, "size": MIB, "fd": os.dup(extent.fd)},
        {"segment": 2, "size": MIB + 1, "fd": os.dup(extent.fd)},
        {"segment": 2, "size": 0, "fd": os.dup(extent.fd)},
        {"segment": 2, "size": MIB, "fd": os.memfd_create("unsealed")},
        {"segment": 2, "size": MIB, "fd": os.open("/dev/null", os.O_RDWR)},
        {"segment": 2, "size": MIB, "name": "a/b"},
        {"segment": 2, "size": MIB, "name": "/nobody"},
        {"segment": 2, "size": MIB, "name": named.name, "uid": os.getuid() + 1},
        {"segment": 2, "size": MIB},
    ]
    for arguments in bad:
        with pytest.raises(ServeError):
            mapped.add(arguments.pop("segment"), arguments.pop("size"), **arguments)
    assert (len(mapped), 1 in mapped, 2 in mapped) == (1, True, False)
    mapped.add(3, MIB, name=named.name, uid=os.getuid())
    assert count_descriptors() == before
    mapped.writable(Handle(3, 0, 1), U8, (1,))[0] = 122
    assert named.memory[0] == 122
    for one in (mapped, extent, named):
        one.close()


def test_views_outlive_removal_close_and_the_owner(pair: Pair) -> None:
    block = pair.block(400)
    block.array(F32, (100,))[:] = 2
    dropped: list[Handle] = []
    view = pair.mapped.view(block.handle(), F32, (100,), on_drop=dropped.append)
    pair.mapped.remove(block.segment)
    pair.close()
    assert (view.sum(), dropped) == (200, [])
    del view
    assert dropped == [block.handle()]


def test_the_owner_sees_what_is_written(pair: Pair) -> None:
    block = pair.block(40)
    target = pair.mapped.writable(block.handle(), F32, (10,))
    target[:] = np.arange(10)
    assert block.array(F32, (10,)).tolist() == list(range(10))
    assert pair.mapped.view(block.handle(), F32, (10,)).tolist() == list(range(10))
    unaligned = Handle(block.segment, block.offset + 3, 8)
    assert pair.mapped.view(unaligned, np.dtype("<u4"), (2,)).tobytes() == target.tobytes()[3:11]
    pair.mapped.remove(block.segment)
    assert pair.mapped.committed == 0
    target[0] = 50
    assert block.array(F32, (10,))[0] == 50
    pair.mapped.add(block.segment, block.home.size, fd=os.dup(block.home.fd), writable=True)
    pair.mapped.writable(block.handle(), F32, (10,))[0] = 51
    view = pair.mapped.view(block.handle(), F32, (10,))
    assert (view[0], view.flags.writeable) == (51, False)


def test_a_segment_that_the_owner_sealed_cannot_be_written() -> None:
    pair = Pair(seal=True)
    block = pair.block(40)
    with pytest.raises(InvalidRequest, match="sealed against writing"):
        pair.mapped.writable(block.handle(), F32, (10,))
    pair.close()


CUTS: dict[str, Callable[[Array], Any]] = {
    "itself": lambda view: view,
    "slice": lambda view: view[1:][::2, 3:],
    "memoryview": lambda view: view.view(np.uint8).data,
    "broadcast": lambda view: np.broadcast_to(view[:1], (5, 4, 10)),
    "buffer": lambda view: np.frombuffer(view.view(np.uint8), np.int16),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("dtype", [F32, np.dtype(ml_dtypes.bfloat16)], ids=str)
def test_the_drop_is_reported_once_after_the_last_derived_object(pair: Pair, dtype: np.dtype[Any], cut: str) -> None:
    handle = pair.block(40 * dtype.itemsize).handle()
    dropped: deque[Handle] = deque()
    view = pair.mapped.view(handle, dtype, (4, 10), on_drop=dropped.append)
    copy = view.copy()
    part = CUTS[cut](view)
    del view
    gc.collect()
    assert not dropped
    del part
    gc.collect()
    assert list(dropped) == [handle]
    assert copy.shape == (4, 10)


def test_a_view_that_fails_reports_no_drop(pair: Pair) -> None:
    dropped: list[Handle] = []
    with pytest.raises(InvalidRequest):
        pair.mapped.view(pair.block(8).handle(), np.dtype(object), (1,), on_drop=dropped.append)
    for size, shape in ((1, (1,) * 100), (0, (0, 2**63)), (0, (2**64, 0)), (0, (2**62, 2**62, 0))):
        for dtype in (U8, np.dtype(ml_dtypes.float8_e5m2)):
            with pytest.raises(InvalidRequest, match="invalid shape"):
                pair.mapped.view(pair.block(size).handle(), dtype, shape, on_drop=dropped.append)
    gc.collect()
    assert dropped == []


FORK = """if True:
    import os, sys
    import numpy as np
    from shmserve.protocol.messages import Handle
    from shmserve.shm.extents import memfd
    from shmserve.shm.mapped import Mapped
    extent = memfd.create(4096)
    mapped = Mapped()
    mapped.add(1, 4096, fd=os.dup(extent.fd))
    view = mapped.view(Handle(1, 0, 4), np.dtype("int32"), (1,), on_drop=lambda handle: os.write(1, b"dropped\\n"))
    child = os.fork()
    if not child:
        assert view[0] == 0
        del view
        own = mapped.view(Handle(1, 0, 4), np.dtype("int32"), (1,), on_drop=lambda handle: os.write(1, b"own\\n"))
        del own
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    os.write(1, b"parent\\n")
    KEEP
"""


@pytest.mark.parametrize("keep", ["del view", "mapped.cycle = [view, mapped]"])
def test_a_forked_child_reports_no_drops_of_its_parent(keep: str) -> None:
    code = FORK.replace("KEEP", keep).replace("mapped = Mapped()", "mapped = type('M', (Mapped,), {})()")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    lines = done.stdout.split()
    assert lines[:2] == ["own", "parent"]
    assert lines[2:] in (["dropped"], []), "at exit it may be reported or not, but never twice"
    assert keep != "del view" or lines[2:] == ["dropped"]


def test_locating_arrays_in_mapped_segments(pair: Pair) -> None:
    block = pair.block(400)
    handle = block.handle()
    view = pair.mapped.view(handle, F32, (10, 10))
    bfloat = pair.mapped.view(handle, np.dtype(ml_dtypes.bfloat16), (200,))
    for array in (view, view[3:5], view.reshape(4, 25)[1], view.view(np.int32), bfloat, bfloat[5:]):
        assert pair.mapped.locate_base(array) == handle
    strangers: list[Array] = [np.zeros(3), view.copy(), np.frombuffer(b"1234", np.uint8), block.array(F32, (100,))]
    for array in strangers:
        assert pair.mapped.locate_base(array) is None
    pair.mapped.remove(block.segment)
    assert pair.mapped.locate_base(view) is None
    other = memfd.create(MIB)
    pair.mapped.add(block.segment, MIB, fd=os.dup(other.fd))
    assert pair.mapped.locate_base(view) is None, "other memory has the number of the segment"
    other.close()
