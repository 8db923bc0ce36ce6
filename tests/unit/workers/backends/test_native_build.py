"""The shim of native backends: compiled once, cached by content, and refused with both remedies without a compiler."""

from __future__ import annotations

import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shmserve.errors import Unsupported
from shmserve.repo.files.elf import shared_library
from shmserve.repo.files.native_interface import FUNCTIONS
from shmserve.workers.backends.native import build, compiler


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CACHE_DIRECTORY", str(tmp_path))
    monkeypatch.setattr(build, "SHIPPED", tmp_path / "none.so")
    return tmp_path / "native"


def test_two_that_start_at_once_leave_one_complete_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not any(map(shutil.which, compiler.COMPILERS)):
        pytest.skip("no C compiler is installed")
    with ThreadPoolExecutor(2) as threads:
        first, second = (future.result() for future in [threads.submit(build.shim) for _ in range(2)])
    (cached,) = cache.iterdir()
    assert first == second == cached.read_bytes()
    found = shared_library(first, "shim")
    assert {name for name in found.defined if name.startswith("TRITON")} == FUNCTIONS
    assert found.soname == compiler.SONAME
    assert {name for name in found.needed if not name.startswith(("libc.", "ld-"))} == set()
    monkeypatch.setenv("PATH", "")
    assert build.shim() == first


def test_changed_sources_are_compiled_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    sources = tmp_path_factory.mktemp("sources")
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setattr(build, "compile_shim", lambda target: target.write_bytes((sources / "a.c").read_bytes()))
    for text in (b"one", b"two", b"one"):
        (sources / "a.c").write_bytes(text)
        assert build.shim() == text
    assert len(list(cache.iterdir())) == 2


def test_without_a_compiler_the_error_names_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(
        Unsupported, match=re.escape("install shmserve from a wheel for this platform, or install a C compiler")
    ):
        build.shim()


def test_a_cache_that_others_can_write_to_is_not_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir()
    cache.chmod(0o777)
    monkeypatch.setattr(build, "compile_shim", lambda target: target.write_bytes(b"image"))
    assert build.shim() == b"image"
    assert not list(cache.iterdir())
