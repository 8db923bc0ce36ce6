"""Both ways to find mappings of shared memory find the same ones."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator

import pytest

from tests.support import shared_mappings
from tests.support.leaks import SHM
from tests.support.shared_mappings import Mapping

QUERIED = pytest.param(
    shared_mappings.queried,
    marks=pytest.mark.skipif(
        shared_mappings.shared_mappings is not shared_mappings.queried, reason="the kernel is older than 6.11"
    ),
)


@pytest.mark.parametrize("find", [shared_mappings.listed, QUERIED])
def test_memfds_and_files_in_dev_shm_are_found(find: Callable[[], Iterator[Mapping]]) -> None:
    before = set(find())
    descriptor = os.memfd_create("found")
    os.ftruncate(descriptor, 3 * mmap.PAGESIZE)
    path = SHM / f"test-shared-mappings-{os.getpid()}"
    with path.open("w+b") as file:
        path.unlink()
        file.truncate(mmap.PAGESIZE)
        with (
            mmap.mmap(descriptor, 2 * mmap.PAGESIZE),
            mmap.mmap(descriptor, mmap.PAGESIZE, prot=mmap.PROT_READ, offset=2 * mmap.PAGESIZE),
            mmap.mmap(file.fileno(), mmap.PAGESIZE),
            mmap.mmap(-1, mmap.PAGESIZE),  # neither of them
        ):
            os.close(descriptor)
            new = set(find()) - before
    assert sorted(mapping.path for mapping in new) == [
        f"{path} (deleted)",
        "/memfd:found (deleted)",
        "/memfd:found (deleted)",
    ]
    assert len({mapping.inode for mapping in new}) == 2
    assert set(find()) == before
