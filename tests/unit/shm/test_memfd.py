"""Segments as memfds: their seals, and that only sealed memfds are mapped."""

from __future__ import annotations

import fcntl
import mmap
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shmserve.errors import InvalidRequest, Unavailable
from shmserve.shm import pages
from shmserve.shm.extents import base, memfd
from tests.support.cases import cases
from tests.support.leaks import count_descriptors

SIZE = 1 << 16


def refused(fd: int, text: str, size: int = SIZE) -> None:
    with pytest.raises(InvalidRequest, match=text):
        memfd.attach(fd, size, False)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_memfd_cannot_be_resized_or_unsealed() -> None:
    extent = memfd.create(SIZE)
    for size in (0, SIZE - 1, SIZE + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(extent.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(extent.fd, fcntl.F_ADD_SEALS, memfd.SEAL_FUTURE_WRITE)
    assert os.fstat(extent.fd).st_size == SIZE
    assert os.fstat(extent.fd).st_blocks * 512 >= SIZE, "its memory is reserved"
    assert not os.get_inheritable(extent.fd)
    refused(os.dup(extent.fd), f"announced with {SIZE - 1} bytes, but its memfd has {SIZE}", SIZE - 1)
    extent.close()


def test_the_room_of_a_control_group_is_what_it_and_those_above_leave(tmp_path: Path) -> None:
    for group, limit, used, cache, room in (
        ("a/b", "max", 900, 0, sys.maxsize),
        ("a", "1000", 300, 0, 700),
        ("a/b", "600", 200, 0, 400),
        ("a/b", "600", 590, 80, 90),
        ("", "500", 600, 20, 0),
    ):
        folder = tmp_path / group
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in (("max", limit), ("current", used), ("stat", f"anon 1\nfile {cache + 7}\nshmem 7")):
            (folder / f"memory.{name}").write_text(f"{text}\n")
        assert base.group_room(str(tmp_path), "/a/b") == room


def test_cold_pages_are_reserved_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    step, tail = base.STEP_BYTES, 4096
    extent = memfd.create(8 * step + tail, promised=0)
    cold = base.Cold(extent)
    for begin, end, reserved in (
        (0, 0, 0),
        (step + 1, step + 2, step),
        (0, 3 * step, 3 * step),
        (8 * step, 8 * step + 1, 3 * step + tail),
        (0, extent.size, extent.size),
    ):
        cold.warm(begin, end)
        assert (os.fstat(extent.fd).st_blocks * 512, cold.bytes) == (reserved, extent.size - reserved)
    extent.close()
    monkeypatch.setattr(base, "_available", lambda: 3 * SIZE)
    memfd.create(SIZE, promised=2 * SIZE).close()
    with pytest.raises(Unavailable, match="cannot reserve"):
        memfd.create(SIZE, promised=2 * SIZE + 1)


def test_only_the_creator_writes_to_a_sealed_segment() -> None:
    extent = memfd.create(SIZE, seal_future_write=True)
    extent.memory[:2] = b"hi"
    with pytest.raises(PermissionError):
        os.pwrite(extent.fd, b"no", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(extent.fd, SIZE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(InvalidRequest, match="sealed against writing"):
        memfd.attach(os.dup(extent.fd), SIZE, True)
    other = memfd.attach(os.dup(extent.fd), SIZE, False)
    assert bytes(other.memory[:2]) == b"hi"
    assert other.pages.writable_alias() is None
    extent.memory[:2] = b"ho"
    assert bytes(other.memory[:2]) == b"ho"
    other.close()
    extent.close()


@cases(
    (None, "F_SEAL_SHRINK, F_SEAL_GROW"),  # it cannot be sealed
    (0, "F_SEAL_SHRINK, F_SEAL_GROW"),
    (fcntl.F_SEAL_GROW, "F_SEAL_SHRINK"),
    (fcntl.F_SEAL_SHRINK, "F_SEAL_GROW"),
)
def test_an_unsealed_memfd_is_refused(seals: int | None, missing: str) -> None:
    fd = os.memfd_create("test", 0 if seals is None else os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SIZE)
    if seals is not None:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    refused(fd, f"lacks {missing}")


def test_other_descriptors_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(SIZE))
    shm_name = Path("/dev/shm", f"test-{os.getpid()}")
    shared = os.open(shm_name, os.O_RDWR | os.O_CREAT)
    shm_name.unlink()
    opened = [os.open(where, os.O_RDONLY) for where in (tmp_path / "file", tmp_path, "/dev/zero")]
    for fd in (shared, *os.pipe(), *opened):
        refused(fd, "must be")


def test_errors_name_the_limit_and_leave_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = count_descriptors()
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE, hard))
    try:
        with pytest.raises(Unavailable, match=f"{SIZE + 1} bytes.*file size limit"):
            memfd.create(SIZE + 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert count_descriptors() == before

    extent = memfd.create(SIZE)
    before = count_descriptors()
    monkeypatch.setattr(pages, "_mmap", lambda *_: 2**64 - 1)
    with pytest.raises(Unavailable, match=f"cannot make {SIZE}"):
        memfd.create(SIZE)
    with pytest.raises(Unavailable, match=f"cannot map {SIZE}"):
        memfd.attach(os.dup(extent.fd), SIZE, False)
    assert count_descriptors() == before
    extent.close()


def test_kernels_that_do_not_know_noexec_or_populate(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[[str, int], int] = os.memfd_create
    asked: list[int] = []

    def old(name: str, flags: int) -> int:
        asked.append(flags & 8)
        return real(name, flags if not flags & 8 else 0x8000)

    monkeypatch.setattr(os, "memfd_create", old)
    extent = memfd.create(SIZE)
    assert asked == [8, 0]
    assert os.fstat(extent.fd).st_size == SIZE
    extent.close()
    monkeypatch.setattr(pages, "_MADV_POPULATE_WRITE", 9999)
    extent = memfd.create(SIZE)
    assert not any(extent.memory)
    extent.close()
