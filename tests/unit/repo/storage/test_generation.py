"""Snapshots find every change of a model's files, and a generation keeps them in the state of its creation."""

from __future__ import annotations

import errno
import json
import os
import resource
import stat
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shmserve.errors import InvalidRequest, Unavailable
from shmserve.repo.storage import generation as module
from shmserve.repo.storage import snapshot
from shmserve.repo.storage.generation import FilesChanged, Generation, Generations, Sizes
from shmserve.repo.storage.snapshot import changed, take

SIZES = Sizes(100, 1000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "models" / "m"
    write(made / "config.pbtxt", "config")
    write(made / "labels.txt", "cat\n")
    write(made / "1" / "model.py", "import helper")
    write(made / "1" / "inner" / "helper.py", "1")
    write(made / "1" / "weights", "w" * 101)
    write(made / "2" / "model.py", "other")
    return made


@pytest.fixture
def generations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generations:
    """Generations on a file system without reflinks."""
    monkeypatch.setattr(module, "_clone", lambda source, target: False)
    (tmp_path / "kept").mkdir()
    return Generations(tmp_path / "kept", SIZES)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def keep(generations: Generations, folder: Path, environment: str = "") -> Generation:
    return generations.keep(folder, 1, take(folder), environment)


def pins(generation: Generation) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(generation.pins).read_text()) if generation.pins else {}
    return found


def links(generation: Generation) -> dict[str, str]:
    return {
        str(path.relative_to(generation.folder)): os.readlink(path)
        for path in generation.folder.rglob("*")
        if path.is_symlink()
    }


def test_small_files_are_copied_and_large_ones_linked(generations: Generations, folder: Path) -> None:
    name = os.fsdecode(b"1/\xff")
    write(folder / name, "w" * 101)
    before = {path: path.stat()[:7] for path in (folder, *folder.rglob("*"))}
    kept = keep(generations, folder)
    assert {path: path.stat()[:7] for path in (folder, *folder.rglob("*"))} == before, "nothing is written there"
    for path in ("1/weights", "1/model.py"):
        write(folder / ".new", "newer")
        (folder / ".new").replace(folder / path)
    write(folder / "labels.txt", "dog\n")
    write(folder / "1" / "inner" / "helper.py", "2")
    assert kept.folder.name == "m"
    assert (kept.folder / "1" / "weights").read_text() == "w" * 101
    assert (kept.folder / "1" / "model.py").read_text() == "import helper"
    assert (kept.folder / "1" / "inner" / "helper.py").read_text() == "1"
    assert (kept.folder / "labels.txt").read_text() == "cat\n"
    assert set(pins(kept)) == {"1/weights", name}
    assert changed(kept.folder, pins(kept)) == "", "the descriptor keeps the loaded file"


def test_a_written_file_is_reported(generations: Generations, folder: Path) -> None:
    kept = keep(generations, folder)
    write(folder / "1" / "weights", "w" * 105)
    assert changed(kept.folder, pins(kept)) == "1/weights changed on disk since it was loaded (size 101 -> 105)"
    write(folder / "1" / "weights", "v" * 101)
    os.utime(folder / "1" / "weights", ns=(1, 1))
    assert changed(kept.folder, pins(kept)) == "1/weights changed on disk since it was loaded (modified)"


def test_the_last_reference_removes_directory_and_descriptors(generations: Generations, folder: Path) -> None:
    first = keep(generations, folder)
    assert keep(generations, folder) is first
    target = links(first)["1/weights"]
    place = first.folder.parent.parent
    assert stat.S_IMODE(first.folder.parent.stat().st_mode) == 0o700
    assert os.path.samefile(target, folder / "1" / "weights")
    del first
    assert list(place.iterdir()) == []
    assert not os.path.exists(target)


def test_limit_of_copied_bytes(generations: Generations, folder: Path) -> None:
    for number in range(20):
        write(folder / "1" / f"part{number:02}", "p" * 90)
    kept = keep(generations, folder)
    copied = [path for path in kept.folder.rglob("*") if path.is_file() and not path.is_symlink()]
    assert 1000 - 90 < sum(path.stat().st_size for path in copied) <= 1000
    assert len(copied) + len(pins(kept)) == len(take(folder).files) - len(["1/", "2/", "2/model.py", "1/inner/"])


def test_links_without_a_descriptor(generations: Generations, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DESCRIPTORS", 0)
    kept = keep(generations, folder)
    assert links(kept)["1/weights"] == str(folder / "1" / "weights")
    write(folder / ".new", "w" * 101)
    (folder / ".new").replace(folder / "1" / "weights")
    assert changed(kept.folder, pins(kept)) == "1/weights changed on disk since it was loaded (replaced)"
    (folder / "1" / "weights").unlink()
    assert changed(kept.folder, pins(kept)) == "1/weights changed on disk since it was loaded (deleted)"


def test_limit_of_descriptors(generations: Generations, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4, 4))
    first = keep(generations, folder)
    write(folder / "labels.txt", "dog")
    second = keep(generations, folder)
    assert links(first)["1/weights"].startswith("/proc/")
    assert links(second)["1/weights"] == str(folder / "1" / "weights")
    del first
    write(folder / "labels.txt", "bird")
    third = keep(generations, folder)
    assert links(third)["1/weights"].startswith("/proc/")


def test_what_is_not_copied_is_linked(generations: Generations, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs, too: the runtime directory may be mounted noexec."""
    write(folder / ".hidden", "h")
    (folder / "1" / "nowhere").symlink_to("not there")
    os.mkfifo(folder / "1" / "fifo")
    write(folder / "1" / "__pycache__" / "model.pyc", "c")
    (folder / "1" / "library.so").write_bytes(b"\x7fELF...")
    for name in ("tool", "tool.py"):
        write(folder / "1" / name, "#!/bin/sh")
        (folder / "1" / name).chmod(0o755)
    kept = keep(generations, folder)
    expected = {".hidden", "2", "1/nowhere", "1/fifo"}
    assert {path: links(kept)[path] for path in expected} == {path: str(folder / path) for path in expected}
    assert not (kept.folder / "1" / "__pycache__").exists()
    assert set(pins(kept)) == {"1/weights", "1/library.so", "1/tool"}
    monkeypatch.setattr(module, "MEMBERS", 5)
    write(folder / "labels.txt", "dog")
    kept = keep(generations, folder)
    assert not (kept.folder / "config.pbtxt").is_symlink(), "files near the top come first"
    assert links(kept)["1/weights"] == str(folder / "1" / "weights")
    assert (kept.folder / "1" / "inner" / "helper.py").read_text() == "1"
    assert {"1/weights", "1/inner/helper.py"} <= pins(kept).keys()


@pytest.mark.parametrize("what", ["env", "env.tar.gz"])
def test_the_interpreter_of_a_model_is_not_copied(generations: Generations, folder: Path, what: str) -> None:
    write(folder / "env" / "bin" / "python", "p")
    write(folder / "env.tar.gz", "z")
    kept = keep(generations, folder, str(folder / what))
    assert os.path.samefile(kept.folder / what, folder / what)
    assert (kept.folder / what).is_symlink()
    assert set(pins(kept)) == {"1/weights", *(["env.tar.gz"] if what == "env.tar.gz" else [])}


def test_an_onnx_model_with_linked_data_is_linked(generations: Generations, folder: Path, tmp_path: Path) -> None:
    for name in ("model.onnx", "alone/model.onnx", "out/model.onnx"):
        write(folder / "1" / name, "onnx")
    (folder / "1" / "weights").rename(folder / "1" / "model.onnx_data")
    write(tmp_path / "outside", "secret")
    (folder / "1" / "out" / "data").symlink_to(tmp_path / "outside")
    write(folder / "1" / "alone" / "data", "small")
    kept = keep(generations, folder)
    assert set(pins(kept)) == {"1/model.onnx", "1/model.onnx_data", "1/out/model.onnx", "1/out/data"}


def test_files_that_change_during_the_copy(generations: Generations, folder: Path) -> None:
    before = take(folder)
    write(folder / "1" / "model.py", "something else")
    with pytest.raises(FilesChanged):
        generations.keep(folder, 1, before)
    assert list((folder.parents[1] / "kept").iterdir()) == []
    kept = generations.keep(folder, 1, before, strict=False)
    assert (kept.folder / "1" / "model.py").read_text() == "something else"


def test_a_full_runtime_directory(generations: Generations, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is copied."""
    real = os.fdopen

    def full(descriptor: int, mode: str) -> Any:
        os.close(descriptor)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fdopen", full)
    kept = keep(generations, folder)
    monkeypatch.setattr(os, "fdopen", real)
    assert set(pins(kept)) == {path for path in take(folder).files if path[-1] != "/" and path[0] != "2"}
    assert len(list((folder.parents[1] / "kept").iterdir())) == 1


def test_a_full_copy_has_no_link_to_the_repository(generations: Generations, folder: Path, tmp_path: Path) -> None:
    """Repository agents check it, so whatever a worker may read is in it."""
    write(folder / ".hidden" / "helper.py", "h")
    write(folder / "1" / "__pycache__" / "model.pyc", "c")
    write(tmp_path / "elsewhere" / "data", "d")
    (folder / "1" / "linked").symlink_to(tmp_path / "elsewhere")
    (folder / "1" / "again").symlink_to(folder)
    (folder / "1" / "tool").write_text("#!/bin/sh")
    (folder / "1" / "tool").chmod(0o755)
    kept = generations.copy(folder, "digest")
    assert generations.copy(folder, "digest") is kept
    files = [path for path in folder.rglob("*") if path.is_file() and path.parent.name != "__pycache__"]
    expected = {str(path.relative_to(folder)) for path in files} | {"1/linked/data"}
    copied = {str(path.relative_to(kept.folder)) for path in kept.folder.rglob("*") if path.is_file()}
    assert copied == expected
    assert (links(kept), kept.pins) == ({}, "")
    for name in expected:
        write(folder / name, "changed")
    assert {(kept.folder / name).read_text() for name in expected}.isdisjoint({"changed"})
    assert os.access(kept.folder / "1" / "tool", os.X_OK)
    home = kept.folder.parent
    del kept
    assert not home.exists()


def test_what_cannot_be_copied_in_full(generations: Generations, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match="the server is stopping"):
        generations.copy(folder, "", lambda: True)
    (folder / "1" / "library.so").write_bytes(b"\x7fELF...")
    real = os.statvfs
    state = SimpleNamespace(f_flag=os.ST_NOEXEC)
    monkeypatch.setattr(os, "statvfs", lambda path: state)
    with pytest.raises(InvalidRequest, match=r"'1/library.so' is a program or library, .* mounted noexec"):
        generations.copy(folder, "")
    monkeypatch.setattr(os, "statvfs", real)
    monkeypatch.setattr(os, "fstatvfs", lambda descriptor: SimpleNamespace(f_bavail=1, f_frsize=10))
    with pytest.raises(OSError, match="No space left"):
        generations.copy(folder, "")
    monkeypatch.undo()
    os.mkfifo(folder / "fifo")
    with pytest.raises(InvalidRequest, match="'fifo' is not a regular file"):
        generations.copy(folder, "")
    assert list((folder.parents[1] / "kept").iterdir()) == []


def test_a_reflink_is_a_copy_of_any_size(
    generations: Generations, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def clone(source: int, target: int) -> bool:
        os.write(target, os.pread(source, 1 << 20, 0))
        return True

    monkeypatch.setattr(module, "_clone", clone)
    kept = keep(generations, folder)
    write(folder / "1" / "weights", "newer")
    assert (kept.folder / "1" / "weights").read_text() == "w" * 101
    assert pins(kept) == {}


_MOMENTS = count(1)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "m"
    for number in (1, 2, 10):
        (folder / str(number) / "inner").mkdir(parents=True)
        (folder / str(number) / "model.onnx").write_bytes(b"weights")
        (folder / str(number) / "inner" / "data").write_bytes(b"more")
    (folder / "labels.txt").write_text("cat\n")
    (folder / "config.pbtxt").write_text('backend: "onnxruntime"')
    (folder / "configs").mkdir()
    (folder / "configs" / "large.pbtxt").write_text("")
    return folder


def overwrite(path: Path, data: bytes = b"") -> None:
    """Overwrite the file, with a unique time, as the clock of a file system is coarse."""
    with path.open("r+b" if path.exists() else "wb") as file:
        file.truncate()
        file.write(data)
    at = next(_MOMENTS) * 10**9
    os.utime(path, ns=(at, at))


def replace(path: Path) -> None:
    """Replace the file by another with the same size and time."""
    before = path.stat()
    fresh = path.with_name(".fresh")
    fresh.write_bytes(bytes(before.st_size))
    os.utime(fresh, ns=(before.st_atime_ns, before.st_mtime_ns))
    fresh.replace(path)


def to_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


CHANGES: dict[str, Callable[[Path], object]] = {
    "size": lambda path: overwrite(path, b"longer than it was"),
    "time": lambda path: os.utime(path, ns=(5, 5)),
    "inode": replace,
    "removed": lambda path: path.unlink(),
    "added": lambda path: overwrite(path.with_name("added")),
    "a directory": lambda path: path.with_name("added").mkdir(),
    "other name": lambda path: path.rename(path.with_name("other")),
    "other kind": to_directory,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("file", ["1/model.onnx", "2/inner/data", "labels.txt", "config.pbtxt", "configs/large.pbtxt"])
def test_a_change_affects_versions_that_use_the_file(model: Path, file: str, change: Callable[[Path], object]) -> None:
    before = take(model)
    assert take(model) == before, "taking a snapshot changes nothing"
    change(model / file)
    after = take(model)
    assert after.digest() != before.digest()
    assert after.newest >= before.newest
    touched = {1: file.startswith("1/"), 2: file.startswith("2/"), 10: False, 77: False}
    if file == "labels.txt":
        touched = dict.fromkeys(touched, True)
    elif file == "config.pbtxt" and change in (CHANGES["added"], CHANGES["a directory"], CHANGES["other name"]):
        touched = dict.fromkeys(touched, True)  # the new file is not a configuration
    for number, wanted in touched.items():
        assert (after.of_version(number) != before.of_version(number)) is wanted


def test_hidden_files_and_caches_are_ignored(model: Path) -> None:
    os.mkdir(os.fsencode(model) + b"/1/\xff\xfe")
    first = take(model)
    Path(os.fsdecode(os.fsencode(model) + b"/1/\xff\xfe/x")).write_bytes(b"")
    before = take(model)
    assert before.digest() != first.digest(), "a name need not be text"
    for folder in (model, model / "1", model / "1" / "inner"):
        (folder / "__pycache__").mkdir()
        (folder / "__pycache__" / "model.pyc").write_bytes(b"x")
        (folder / ".git").mkdir()
        (folder / ".git" / "HEAD").write_bytes(b"x")
        (folder / ".model.onnx.swp").write_bytes(b"x")
    after = take(model)
    assert after.files == before.files
    assert after.digest() == before.digest()
    assert after.newest >= before.newest


def test_links_are_followed(model: Path, tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (real / "weights").write_bytes(b"1")
    (model / "1" / "linked").symlink_to(real)
    (model / "2" / "file").symlink_to(real / "weights")
    (tmp_path / "link").symlink_to(model)
    assert take(tmp_path / "link").files == take(model).files
    before = take(model)
    assert {"1/linked/", "1/linked/weights", "2/file"} <= before.files.keys()
    overwrite(real / "weights", b"2")
    after = take(model)
    assert [path for path, look in before.files.items() if after.files[path] != look] == ["1/linked/weights", "2/file"]
    aside = tmp_path / "aside"
    aside.mkdir()
    (model / "1" / "linked").unlink()
    (model / "1" / "linked").symlink_to(aside)
    assert "1/linked/weights" not in take(model).files


def test_invalid_directories(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError):
        take(tmp_path / "nothing")
    with pytest.raises(NotADirectoryError):
        take(model / "labels.txt")
    count = len(take(model).files)
    monkeypatch.setattr(snapshot, "ENTRIES", count)
    take(model)
    (model / "one more").write_bytes(b"")
    with pytest.raises(InvalidRequest, match=f"m: more than {count} files and directories"):
        take(model)
