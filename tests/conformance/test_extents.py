"""Requirements for every kind of extent, and additional ones for the kinds with a descriptor or a name."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shmserve.errors import Internal, InvalidRequest, Unavailable
from shmserve.shm.extents import memfd, posix
from shmserve.shm.extents.base import Extent, MappedExtent
from tests.support.leaks import count_descriptors, own_names

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
