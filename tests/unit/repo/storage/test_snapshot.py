"""Snapshots of a model's directory find every change of its files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.errors import InvalidRequest
from shmserve.repo.storage import snapshot
from shmserve.repo.storage.snapshot import take
from tests.support.hypothesis_profiles import examples

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
    before = take(model)
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


def test_circular_and_broken_links_are_ignored(model: Path) -> None:
    before = take(model)
    (model / "1" / "loop").symlink_to("loop")
    (model / "1" / "gone").symlink_to("nothing there")
    (model / "1" / "under a file").symlink_to("model.onnx/x")
    (model / "1" / "up").symlink_to(model)
    (model / "1" / "inner" / "here").symlink_to(".")
    (model / "1" / "aside").symlink_to(model / "2")
    (model / "2" / "aside").symlink_to(model / "1")
    files = take(model).files
    assert files.keys() - before.files.keys() == {
        *("1/aside/", "1/aside/model.onnx", "1/aside/inner/", "1/aside/inner/data"),
        *("2/aside/", "2/aside/model.onnx", "2/aside/inner/", "2/aside/inner/data"),
    }


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


NAMES = st.sampled_from(["1", "2", "11", "config.pbtxt", "configs", "labels.txt", "a", "b"])
TREES = st.dictionaries(
    st.lists(NAMES, min_size=1, max_size=3).map("/".join), st.binary(max_size=3), min_size=1, max_size=8
)


def build(root: Path, files: dict[str, bytes]) -> list[str]:
    """Write the files. Returns the names without conflicts, such as a file and a directory of one name."""
    made = []
    for name, data in files.items():
        path = root / name
        if path.is_dir() or any((root / part).is_file() for part in list(Path(name).parents)[:-1]):
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, data)
        made.append(name)
    return made


def versions_that_read(name: str) -> set[int]:
    top, inside, _ = name.partition("/")
    if top.isdigit():
        return {int(top)} if inside else set()  # a file is not a version
    return set() if top in ("config.pbtxt", "configs") else {1, 2, 11}


# Each kind once: a second replacement may reuse the inode of the original.
KINDS = st.tuples(st.sampled_from(["size", "time", "inode", "removed"]), st.integers(0))


@settings(max_examples=examples(30))
@given(TREES, st.lists(KINDS, max_size=4, unique_by=lambda change: change[0]))
def test_equal_if_and_only_if_nothing_changed(files: dict[str, bytes], changes: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        names = build(root, files)
        before = take(root)
        assert {name for name in before.files if not name.endswith("/")} == set(names)
        assert take(root).digest() == before.digest()
        changed: set[int] = set()
        for what, which in changes:
            if names:
                name = names[which % len(names)]
                if what == "size":
                    write(root / name, (root / name).read_bytes() + b"x")
                elif what == "time":
                    at = next(_MOMENTS) * 10**9
                    os.utime(root / name, ns=(at, at))
                else:
                    CHANGES[what](root / name)
                if what == "removed":
                    names.remove(name)
                changed |= versions_that_read(name)
        after = take(root)
        assert (after.digest() == before.digest()) is (changes == [])
        for number in (1, 2, 11):
            assert (after.of_version(number) == before.of_version(number)) is (number not in changed)


def test_names_that_are_not_text(model: Path) -> None:
    before = take(model)
    os.mkdir(os.fsencode(model) + b"/1/\xff\xfe")
    Path(os.fsdecode(os.fsencode(model) + b"/1/\xff\xfe/x")).write_bytes(b"")
    assert take(model).digest() != before.digest()
