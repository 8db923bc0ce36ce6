"""What a shared library says of itself, compared with what its extension module must have."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from shmserve.errors import InvalidRequest
from shmserve.repo.files.elf import read_library, shared_library

EXTENSION = Path(str(import_module("numpy.linalg._umath_linalg").__file__))


def test_an_extension_module() -> None:
    found = read_library(EXTENSION)
    assert "PyInit__umath_linalg" in found.defined
    assert "libc.so.6" in found.needed
    assert {"PyErr_SetString", "PyErr_Format"} <= found.undefined
    assert not found.defined & found.undefined


@pytest.mark.parametrize("size", [0, 3, 63, 64, 4096])
def test_what_is_cut_off_is_refused(size: int) -> None:
    with pytest.raises(InvalidRequest, match="is not a shared library"):
        shared_library(EXTENSION.read_bytes()[:size], "x.so")


def test_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.so"
    path.write_bytes(b"MZ" * 200)
    with pytest.raises(InvalidRequest, match="it has another format"):
        read_library(path)
