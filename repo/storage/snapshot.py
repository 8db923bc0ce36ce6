"""Snapshots of a model's files: sufficient to detect changes, and cheap enough for polling.

Invariant: only names, sizes, times and inodes are read, never contents. Links are followed, as when loading.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from shmserve.errors import InvalidRequest

ENTRIES = 200_000
"""Maximum number of files and directories of one model."""
_CONFIGS = ("config.pbtxt", "configs")
"""Configuration files: not part of a version's digest, as configurations are compared by content."""
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES)
"""Errors that make a file missing for the loader too: it was just deleted, or it is a link that dangles, is cyclic, or
leads to a closed directory.
"""

Look = tuple[int, int, int]
"""Size, mtime in ns, inode."""


class Snapshot(NamedTuple):
    """A snapshot. `files`: path in the model's directory -> its look. `newest`: the latest ctime, in ns, which copying
    programs cannot set, unlike the mtime.
    """

    files: Mapping[str, Look]
    newest: int

    def digest(self) -> str:
        return _digest(self.files.items())

    def of_version(self, number: int) -> str:
        """Digest of the files that this version may read: its own directory, and files that belong to no version."""
        return _digest(
            (path, look)
            for path, look in self.files.items()
            if is_of_version(path, number) and not _is_configuration(path)
        )

    def bytes_of_version(self, number: int) -> int:
        """The size of these files."""
        return sum(look[0] for path, look in self.files.items() if is_of_version(path, number))

    def of_configuration(self) -> str:
        return _digest((path, look) for path, look in self.files.items() if _is_configuration(path))


def take(folder: Path) -> Snapshot:
    """Takes a snapshot of the model's directory. Raises OSError if it cannot be read."""
    entries = sorted(walk(folder))
    newest = max((changed for _, _, changed in entries), default=0)
    return Snapshot({path: look for path, look, _ in entries if path}, newest)


def is_of_version(path: str, number: int) -> bool:
    """Whether a file is in this version's directory, or in that of no version."""
    top = path.partition("/")[0]
    return path.startswith(f"{number}/") or not (top.isascii() and top.isdigit())


def look_of(state: os.stat_result) -> Look:
    return state.st_size, state.st_mtime_ns, state.st_ino


def changed(folder: Path, looks: Mapping[str, Look]) -> str:
    """Describes the first of these files below `folder` that has changed; "" if none has."""
    for path, (size, time, inode) in looks.items():
        try:
            now = look_of(os.stat(folder / path))
        except FileNotFoundError:
            return f"{path} changed on disk since it was loaded (deleted)"
        except OSError as error:
            return f"{path} can no longer be read: {error.strerror}"
        if now != (size, time, inode):
            if now[0] != size:
                how = f"size {size} -> {now[0]}"
            else:
                how = "replaced" if now[2] != inode else "modified"
            return f"{path} changed on disk since it was loaded ({how})"
    return ""


def _is_configuration(path: str) -> bool:
    return path.partition("/")[0] in _CONFIGS


def _digest(files: Iterable[tuple[str, Look]]) -> str:
    return hashlib.blake2b(repr(list(files)).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def walk(folder: Path, hidden: bool = False) -> Iterator[tuple[str, Look, int]]:
    """The files and directories below a directory, with their looks and ctimes; a directory comes before its entries.
    Directories end with "/"; the first entry, "", is `folder` itself. `hidden`: also those whose names begin with a
    dot. Raises OSError and InvalidRequest.
    """
    seen = 0
    top = os.stat(folder)
    yield "", (0, 0, 0), top.st_ctime_ns
    todo: list[tuple[str, str, tuple[tuple[int, int], ...]]] = [("", os.fspath(folder), ((top.st_dev, top.st_ino),))]
    while todo:
        prefix, directory, above = todo.pop()
        with os.scandir(directory) as entries:
            for entry in entries:
                seen += 1
                if seen > ENTRIES:
                    raise InvalidRequest(f"{folder.name}: more than {ENTRIES} files and directories; is it a model?")
                if entry.name == "__pycache__" or (entry.name.startswith(".") and not hidden):
                    continue
                path = f"{prefix}{entry.name}"
                try:
                    state = entry.stat()
                except OSError as error:
                    if error.errno in _NOT_THERE:
                        continue
                    raise
                here = (state.st_dev, state.st_ino)
                if not stat.S_ISDIR(state.st_mode):
                    yield path, look_of(state), state.st_ctime_ns
                elif here not in above:  # otherwise a link to one of its parent directories
                    yield path + "/", (0, 0, 0), state.st_ctime_ns
                    todo.append((path + "/", entry.path, (*above, here)))
