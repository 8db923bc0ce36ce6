"""Requirements for every kind of extent, and additional ones for the kinds with a descriptor or a name."""

from __future__ import annotations

import errno
import gc
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from shmserve.errors import Internal, InvalidRequest, Unavailable
from shmserve.shm.extents import memfd, posix
from shmserve.shm.extents.base import Extent, MappedExtent
from tests.support.leaks import own_names

MAKERS: dict[str, Callable[[int], Extent]] = {
    "memfd": memfd.create,
    "memfd-future-write": lambda size: memfd.create(size, seal_future_write=True),
    "posix": posix.create,
}
SIZE = 1 << 20


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Callable[[int], Extent]:
    return MAKERS[request.param]


@pytest.fixture(params=["memfd", "posix"])
def shared(request: pytest.FixtureRequest) -> Callable[[int], Extent]:
    return MAKERS[request.param]


def attach(extent: Extent, size: int, writable: bool) -> MappedExtent:
    if extent.name is not None:
        return posix.attach(extent.name, size, writable)
    return memfd.attach(os.dup(extent.fd), size, writable)


def array(extent: Extent) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(extent.memory, np.uint8)


def python(code: str, *arguments: str, pass_fds: Sequence[int] = ()) -> str:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, pass_fds=pass_fds).stdout


def count_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_bytes(address: int) -> int:
    """The resident size of the mapping at this address."""
    text = Path("/proc/self/smaps").read_text()
    found = re.search(rf"^0*{address:x}-.*?^Rss: +(\d+) kB", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return int(found[1]) * 1024


def test_new_memory_is_zero_warm_and_writable(make: Callable[[int], Extent]) -> None:
    extent = make(SIZE)
    assert (extent.size, extent.writable, len(extent.memory)) == (SIZE, True, SIZE)
    assert resident_bytes(extent.address) >= SIZE
    data = array(extent)
    assert not data.any()
    assert data.ctypes.data == extent.address
    assert extent.address % 4096 == 0
    data[:] = 7
    assert bytes(extent.memory[-3:]) == b"\7\7\7"
    del data
    extent.close()


def test_a_size_that_is_not_a_multiple_of_the_page_size(make: Callable[[int], Extent]) -> None:
    extent = make(5000)
    assert (extent.size, len(extent.memory)) == (5000, 5000)
    array(extent)[:] = 1
    extent.close()


def test_close_is_final_and_idempotent(make: Callable[[int], Extent]) -> None:
    before = count_fds()
    extent = make(SIZE)
    fd, name = extent.fd, extent.name
    assert count_fds() - before == (1 if fd >= 0 else 0)
    extent.close()
    extent.close()
    assert count_fds() == before
    assert extent.fd == -1
    if name is not None:
        assert not Path("/dev/shm", name[1:]).exists()
    for use in (lambda: extent.memory, lambda: extent.address, lambda: extent.pages):
        with pytest.raises(Internal, match="closed"):
            use()


def test_views_outlive_the_extent(make: Callable[[int], Extent]) -> None:
    extent = make(SIZE)
    address = extent.address
    data = array(extent)[100:200]
    data[:] = 5
    extent.close()
    del extent
    gc.collect()
    data[0] += 1
    assert (data[0], data[1:].tolist()) == (6, [5] * 99)
    assert f"{address:x}-" in Path("/proc/self/maps").read_text()
    del data
    assert f"{address:x}-" not in Path("/proc/self/maps").read_text()


def test_dropping_an_extent_closes_it(make: Callable[[int], Extent]) -> None:
    before = count_fds()
    extent = make(SIZE)
    name = extent.name
    del extent
    assert count_fds() == before
    assert name is None or not Path("/dev/shm", name[1:]).exists()


@pytest.mark.parametrize("size", [2**62, 2**70])
def test_a_size_over_the_free_memory_is_refused_before_allocation(
    make: Callable[[int], Extent], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the kernel would allocate all memory and then kill processes."""

    def never(*_: int) -> None:
        raise AssertionError("this test must not fill the machine")

    monkeypatch.setattr(os, "posix_fallocate", never)
    before = count_fds(), own_names()
    with pytest.raises(Unavailable, match=f"cannot reserve {size} bytes.*bytes left"):
        make(size)
    assert (count_fds(), own_names()) == before


@pytest.mark.parametrize("size", [0, -1])
def test_a_size_below_1_is_refused(make: Callable[[int], Extent], size: int) -> None:
    with pytest.raises(Internal, match=f"{size} bytes"):
        make(size)


def test_both_sides_see_each_others_writes(shared: Callable[[int], Extent]) -> None:
    extent = shared(SIZE)
    array(extent)[:3] = (1, 2, 3)
    other = attach(extent, SIZE, True)
    assert (other.size, other.writable, other.kind) == (SIZE, True, extent.kind)
    assert array(other)[:3].tolist() == [1, 2, 3]
    array(other)[3] = 4
    assert array(extent)[3] == 4
    other.close()
    assert extent.name is None or Path("/dev/shm", extent.name[1:]).exists(), "only the creator removes the name"
    extent.close()


def test_another_process_sees_the_memory(shared: Callable[[int], Extent]) -> None:
    extent = shared(SIZE)
    array(extent)[:] = 9
    code = """if True:
        import sys
        import numpy as np
        from shmserve.shm.extents import memfd, posix
        where, size = sys.argv[1], int(sys.argv[2])
        extent = memfd.attach(int(where), size, True) if where.isdigit() else posix.attach(where, size, True)
        data = np.frombuffer(extent.memory, np.uint8)
        print(int(data.sum()))
        data[5] = 77
        extent.close()
    """
    printed = python(code, extent.name or str(extent.fd), str(SIZE), pass_fds=(extent.fd,))
    assert int(printed) == 9 * SIZE
    assert array(extent)[5] == 77
    extent.close()


def test_a_read_only_extent_cannot_be_written_to(shared: Callable[[int], Extent]) -> None:
    extent = shared(SIZE)
    other = attach(extent, SIZE, False)
    assert not other.writable
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
    before = count_fds()
    with pytest.raises(InvalidRequest, match=str(SIZE)):
        attach(extent, size, False)
    assert count_fds() == before
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
    before = count_fds(), own_names()
    with pytest.raises(Unavailable, match=f"cannot reserve {SIZE} bytes.*{text}") as caught:
        shared(SIZE)
    assert "/dev/shm" not in str(caught.value)
    assert (count_fds(), own_names()) == before
