"""Safe access to files that a model's configuration names.

Invariant: no file outside the model's directory is ever read, whatever the name or the targets of links, and error
texts contain the given name, never a path of this machine.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from shmserve.errors import InvalidRequest
from shmserve.protocol.messages import NAME_LENGTH

MODEL_NAME = re.compile(r"(?![. ])[ -.0-\[\]-~]{1,128}(?<! )")
"""Printable ASCII that is a safe directory name. Other names, which Triton accepts, could forge log lines or paths."""
NAME_RULE = (
    f"1 to {NAME_LENGTH} printable ASCII characters, without / and \\, no leading dot, no leading or trailing space"
)


def open_inside(folder: Path, name: str, what: str) -> int:
    """Opens a regular file at or below `folder`. `what` names it in error texts, e.g. `label file 'labels.txt'`."""
    if not name or name.startswith("/") or ".." in name.split("/") or "\0" in name:
        raise InvalidRequest(f"{what}: expected a file in the model directory, without .. or a leading /")
    try:
        root = folder.resolve(strict=True)
        path = (root / name).resolve(strict=True)
        if not path.is_relative_to(root):
            raise InvalidRequest(f"{what} is a link to a path outside the model's directory; replace it with the file")
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (OSError, RuntimeError) as error:  # RuntimeError: cyclic links
        raise InvalidRequest(f"{what} cannot be read: {_reason(error)}") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise InvalidRequest(f"{what} is not a regular file")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_inside(folder: Path, name: str, what: str, limit: int) -> bytes:
    """The contents of a file at or below `folder`, of at most `limit` bytes."""
    with os.fdopen(open_inside(folder, name, what), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise InvalidRequest(f"{what} has {size} bytes; the limit is {limit}")
        try:
            data = file.read(limit + 1)
        except OSError as error:
            raise InvalidRequest(f"{what} cannot be read: {_reason(error)}") from None
    if len(data) > limit:
        raise InvalidRequest(f"{what} exceeds the limit of {limit} bytes")
    return data


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such file in the model's directory"
    return (isinstance(error, OSError) and error.strerror) or "cyclic links"
