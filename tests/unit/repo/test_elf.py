"""What a shared library says of itself, compared with what its extension module must have."""

from __future__ import annotations

import struct
from importlib import import_module
from pathlib import Path

import pytest

from shmserve.errors import InvalidRequest
from shmserve.repo.files.elf import NAMES_BYTES, read_library, shared_library

EXTENSION = Path(str(import_module("numpy.linalg._umath_linalg").__file__))


@pytest.mark.parametrize("size", [0, 3, 63, 64, 4096])
def test_what_is_cut_off_is_refused(size: int) -> None:
    with pytest.raises(InvalidRequest, match="is not a shared library"):
        shared_library(EXTENSION.read_bytes()[:size], "x.so")


def test_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.so"
    path.write_bytes(b"MZ" * 200)
    with pytest.raises(InvalidRequest, match="it has another format"):
        read_library(path)


def library(symbols: int, size: int) -> bytes:
    """One whose symbols have names that overlap: each is the end of a text of this size."""
    names = 64 + 2 * 56
    table = names + size + 1
    entries = table + 24 * symbols
    hashes = entries + 4 * 16
    end = hashes + 8
    return b"".join(
        [
            struct.pack("<4sBB10xHH12xQ14xHH6x", b"\x7fELF", 2, 1, 3, 62, 64, 56, 2),
            struct.pack("<II6Q", 1, 4, 0, 0, 0, end, end, 0),
            struct.pack("<II6Q", 2, 4, entries, entries, entries, 4 * 16, 4 * 16, 0),
            b"x" * size + b"\0",
            *(struct.pack("<IBBHQQ", number, 0, 0, 1, 0, 0) for number in range(symbols)),
            struct.pack("<8Q", 5, names, 6, table, 4, hashes, 0, 0),
            struct.pack("<II", 0, symbols),
        ]
    )


def test_names_that_overlap_are_counted() -> None:
    """A file of 300 KB with 2 GB of names."""
    assert shared_library(library(10, 20), "x.so").defined == {"x" * size for size in range(11, 20)}
    with pytest.raises(InvalidRequest, match=f"its names have more than {NAMES_BYTES} bytes"):
        shared_library(library(2000, 1 << 18), "x.so")


@pytest.mark.parametrize("place", [1 << 63, (1 << 64) - 1])
def test_places_beyond_any_file_are_refused(place: int) -> None:
    broken = struct.pack("<4sBB10xHH12xQ14xHH", b"\x7fELF", 2, 1, 3, 62, place, 56, 1)
    with pytest.raises(InvalidRequest, match="is not a shared library"):
        shared_library(broken + bytes(100), "x.so")
