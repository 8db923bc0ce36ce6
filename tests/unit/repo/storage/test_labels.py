"""Label files, and the restriction of access to files in a model's directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shmserve.errors import InvalidRequest
from shmserve.repo.files import companions
from shmserve.repo.files.companions import read_labels
from tests.support.cases import cases


@cases(
    (b"", ()),
    (b"cat", ("cat",)),
    (b"cat\n", ("cat",)),
    (b"cat\ndog", ("cat", "dog")),
    (b"cat\r\ndog\r\n", ("cat", "dog")),
    (b"cat\n\ndog\n", ("cat", "", "dog")),
    (b"cat\n\n", ("cat", "")),
    (b" a cat \n", (" a cat ",)),
    (b"a:b\n", ("a:b",)),
    ("\ufeffK\u00e4tzchen\n\u732b\n".encode(), ("K\u00e4tzchen", "\u732b")),
    (b"a\x0bb\x0cc\x1cd\xc2\x85e\n", ("a\x0bb\x0cc\x1cd\x85e",)),
)
def test_labels_are_lines(data: bytes, expected: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_bytes(data)
    assert read_labels(tmp_path, "labels.txt") == expected


def refused(folder: Path, name: str, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text) as found:
        read_labels(folder, name)
    assert str(folder.parent) not in str(found.value)
    assert f"label file '{name}'" in str(found.value)


def test_only_files_in_the_model_directory_are_read(tmp_path: Path) -> None:
    model, other = tmp_path / "m", tmp_path / "other"
    (model / "sub").mkdir(parents=True)
    other.mkdir()
    (other / "labels.txt").write_bytes(b"secret")
    (model / "labels.txt").write_bytes(b"cat")
    (model / "linked.txt").symlink_to("labels.txt")
    (model / "out.txt").symlink_to(other / "labels.txt")
    (model / "outdir").symlink_to(other)
    (model / "broken.txt").symlink_to("nothing")
    (model / "circle.txt").symlink_to("circle.txt")
    os.mkfifo(model / "pipe.txt")
    (tmp_path / "repository").symlink_to("m")
    assert read_labels(tmp_path / "repository", "labels.txt") == ("cat",)
    assert read_labels(model, "linked.txt") == read_labels(model, "./labels.txt") == ("cat",)
    for name in ("", "/etc/passwd", "../other/labels.txt", "sub/../labels.txt", "la\0bels"):
        refused(model, name, "a file in the model directory")
    for name in ("out.txt", "outdir/labels.txt"):
        refused(model, name, "is a link to a path outside the model's directory")
    for name in ("nothing.txt", "broken.txt"):
        refused(model, name, "no such file")
    refused(model, "circle.txt", "cannot be read")
    for name in ("sub", "pipe.txt"):
        refused(model, name, "not a regular file")
    refused(model, "labels.txt/x", "cannot be read")


def test_labels_that_are_not_text_or_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(companions, "LABEL_BYTES", 12)
    for data, text in (
        (b"cat\ndog\n\xff\xfe\n", "line 3 is not UTF-8"),
        (b"cat\nd\0g\n", "line 2 has a NUL"),
        (bytes(13), "has 13 bytes; the limit is 12"),
    ):
        (tmp_path / "labels.txt").write_bytes(data)
        refused(tmp_path, "labels.txt", text)
    (tmp_path / "labels.txt").write_bytes(b"x" * 12)
    assert read_labels(tmp_path, "labels.txt") == ("x" * 12,)
