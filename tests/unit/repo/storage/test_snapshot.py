"""Snapshots of a model's directory find every change of its files."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from shmserve.errors import InvalidRequest
from shmserve.repo.storage import snapshot
from shmserve.repo.storage.snapshot import take

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


def write(path: Path, data: bytes = b"") -> None:
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
    "size": lambda path: write(path, b"longer than it was"),
    "time": lambda path: os.utime(path, ns=(5, 5)),
    "inode": replace,
    "removed": lambda path: path.unlink(),
    "added": lambda path: write(path.with_name("added")),
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
    write(real / "weights", b"2")
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
