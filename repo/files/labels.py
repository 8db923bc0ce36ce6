"""Label files: one label per line. Invariant: no line is skipped, because the index of a line is the class."""

from __future__ import annotations

from pathlib import Path

from shmserve.errors import InvalidRequest
from shmserve.repo.files.safe_paths import read_inside

LIMIT_BYTES = 16 * 1024 * 1024


def read_labels(model_dir: Path, filename: str) -> tuple[str, ...]:
    """Read the labels of all classes. An empty line is a class without a label; a final newline is optional."""
    what = f"label file '{filename}'"
    data = read_inside(model_dir, filename, what, LIMIT_BYTES)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InvalidRequest(f"{what}: line {line} is not UTF-8: {error.reason}") from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise InvalidRequest(f"{what}: line {line} has a NUL character; is this a text file?")
    lines = text.split("\n")
    if not lines[-1]:
        del lines[-1]
    return tuple([line.removesuffix("\r") for line in lines])
