"""Generations: the files of a loaded version, kept as they were when it was loaded.

    <place>/generation-xxxx/
        pins.json            how each file looked that is not a copy
        m/                   the model's directory, as its workers see it
            labels.txt       small files are copies, or reflinks
            1/model.py
            1/model.onnx -> /proc/<broker>/fd/<n>

A large file is a link to a descriptor of this process. A file that replaces it by a rename changes nothing; one that is
written to in place no longer has the size and time of `pins.json`, which workers check before and after they load.

A generation is removed when the last reference to it goes.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import shutil
import stat
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from shmserve.repo.storage.snapshot import Look, Snapshot, is_of_version, look_of

FILE_BYTES = 1 << 20
TOTAL_BYTES = 64 << 20
"""Of the files that are copied. Larger files, and what exceeds the total, are linked."""
MEMBERS = 4096
"""Files and directories mirrored one by one; what lies beyond, deepest last, is reached by links to the repository."""
DESCRIPTORS = 256
"""Of one generation."""
ALL_DESCRIPTORS = 4096
"""Of all generations together, and at most a quarter of those that the process may have. Without one, a link leads to
the file's path."""
PINS = "pins.json"
_COPY_BYTES = 1 << 20
_FICLONE = 0x40049409
_FULL = (errno.ENOSPC, errno.EDQUOT)


class FilesChanged(Exception):
    """A file is not what it was in the snapshot."""


class Sizes(NamedTuple):
    file_bytes: int = FILE_BYTES
    total_bytes: int = TOTAL_BYTES


DEFAULT = Sizes()


class Generation:
    """`folder` is the model's directory for workers. `pins` names the file with the looks of linked files; "": none."""

    def __init__(self, folder: Path, pins: str = "") -> None:
        self.folder = folder
        self.pins = pins


class Generations:
    """Makes generations, each in a directory of its own below `place`."""

    def __init__(self, place: Path, sizes: Sizes = DEFAULT) -> None:
        self.discard: Callable[[Path], None] = lambda home: shutil.rmtree(home, ignore_errors=True)
        """Removes a directory; may be called in any thread."""
        self._place = place
        self._sizes = sizes
        self._made: weakref.WeakValueDictionary[tuple[object, ...], Generation] = weakref.WeakValueDictionary()
        self._used = 0
        """Descriptors."""
        self._lock = threading.Lock()

    def keep(
        self, folder: Path, version: int, snapshot: Snapshot, environment: str = "", strict: bool = True
    ) -> Generation:
        """The generation of these files: one that exists, or a new one. `environment` is where the interpreter of the
        model is, which is not copied. Raises FilesChanged; if not `strict`, takes files as they are now."""
        key = (folder, version, snapshot.of_version(version), snapshot.of_configuration())
        found = self._made.get(key)
        if found is None:
            with suppress(ValueError):
                environment = str(Path(environment).relative_to(folder))
            try:
                found = self._make(folder, version, snapshot, environment, strict, self._sizes)
            except FileNotFoundError as error:
                raise FilesChanged(folder.name) from error
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                found = self._make(folder, version, snapshot, environment, strict, Sizes(0, 0))
            self._made[key] = found
        return found

    def adopt(self, folder: Path) -> Generation:
        """Files that came with a load call are in a directory of ours already: `folder` is the only thing in it."""
        generation = Generation(folder)
        self._remove_with(generation, folder.parent, [])
        return generation

    def _make(
        self, folder: Path, version: int, snapshot: Snapshot, environment: str, strict: bool, sizes: Sizes
    ) -> Generation:
        home = Path(tempfile.mkdtemp(prefix="generation-", dir=self._place))
        with self._lock:
            most = min(ALL_DESCRIPTORS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
            room = max(min(DESCRIPTORS, most - self._used), 0)
            self._used += room
        mirror = _Mirror(folder, home / folder.name, snapshot, version, environment, sizes, room, strict)
        try:
            pins = mirror.run()
            if pins:
                (home / PINS).write_text(json.dumps(pins))
        except BaseException:
            self._release(home, mirror.descriptors, room)
            raise
        with self._lock:
            self._used -= room - len(mirror.descriptors)
        generation = Generation(home / folder.name, str(home / PINS) if pins else "")
        self._remove_with(generation, home, mirror.descriptors)
        return generation

    def _remove_with(self, generation: Generation, home: Path, descriptors: list[int]) -> None:
        weakref.finalize(generation, self._release, home, descriptors, len(descriptors)).atexit = False

    def _release(self, home: Path, descriptors: list[int], room: int) -> None:
        for descriptor in descriptors:
            os.close(descriptor)
        with self._lock:
            self._used -= room
        self.discard(home)


class _Mirror:
    """Makes one directory look like another."""

    def __init__(
        self,
        source: Path,
        target: Path,
        snapshot: Snapshot,
        version: int,
        environment: str,
        sizes: Sizes,
        room: int,
        strict: bool,
    ) -> None:
        self._source = source
        self._target = target
        self._files = {
            path: look
            for path, look in snapshot.files.items()
            if is_of_version(path, version) and not path.startswith(f"{environment}/")
        }
        self._environment = environment
        self._sizes = sizes
        self._room = room
        self._strict = strict
        self._clones = sizes.total_bytes > 0
        self.descriptors: list[int] = []

    def run(self) -> Mapping[str, Look]:
        """How the files look that are reached by links."""
        members = self._members()
        large, linked = self._not_copied(members)
        pins = {path: look for path, look in self._files.items() if not path.endswith("/")}
        self._make_folder("", members)
        for path in members:
            if path.endswith("/"):
                self._make_folder(path, members)
                continue
            del pins[path]
            look = self._file(path, path in large, path in linked)
            if look is not None:
                pins[path] = look
        return pins

    def _members(self) -> dict[str, None]:
        """What is mirrored one by one: what is near to the top comes first."""
        members: dict[str, None] = {}
        for path in sorted(self._files, key=lambda path: (path.rstrip("/").count("/"), path)):
            parent = path.rstrip("/").rpartition("/")[0]
            is_reached = not parent or f"{parent}/" in members
            if is_reached and path.rstrip("/") != self._environment and len(members) < MEMBERS:
                members[path] = None
        if self._environment in self._files:  # an archive, which is unpacked once as long as it is the same file
            members[self._environment] = None
        return members

    def _not_copied(self, members: Mapping[str, None]) -> tuple[set[str], set[str]]:
        """The files that are too large, and those of them, and others, that must be links."""
        left = self._sizes.total_bytes
        large, linked = set(), {self._environment}
        for path in members:
            size = self._files[path][0]
            if size > min(left, self._sizes.file_bytes):
                large.add(path)
            else:
                left -= size
        # ONNX Runtime reads external data only from the directory in which the model really is. So a model is linked
        # if any of its data is; and a link that leads out of the model's directory remains one that does.
        root = os.path.realpath(self._source)
        for model in [path for path in members if path.endswith(".onnx")]:
            folder = model.rpartition("/")[0]
            data = {path for path in members if path.startswith(f"{folder}/") and path != model}
            outside = {path for path in data if not os.path.realpath(self._source / path).startswith(f"{root}/")}
            if outside or not large.isdisjoint(data):
                linked |= {model, *outside, *(data & large)}
        return large, linked

    def _make_folder(self, folder: str, members: Mapping[str, None]) -> None:
        """Whatever in it is not mirrored is a link: hidden files, other versions, links to nowhere."""
        os.mkdir(self._target / folder, 0o700)
        for entry in os.scandir(self._source / folder):
            path = folder + entry.name
            if path not in members and f"{path}/" not in members and entry.name != "__pycache__":
                os.symlink(os.path.abspath(entry.path), self._target / path)

    def _file(self, path: str, large: bool, linked: bool) -> Look | None:
        """How the file looks if it is reached by a link. None: it is a copy, or not a file."""
        source = os.path.abspath(self._source / path)
        target = source
        try:
            # Not opened: to open a FIFO would wake a process that waits for the model to read from it.
            if not stat.S_ISREG(os.stat(source).st_mode):
                os.symlink(source, self._target / path)
                return None
            # Non-blocking, in case a FIFO has just taken its place.
            descriptor = os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # not for us, or no descriptor is left
            os.symlink(source, self._target / path)
            return self._files[path]
        kept = False
        try:
            state = os.fstat(descriptor)
            self._still_is(path, state)
            small = not (large or linked or _is_native(descriptor, path, state))
            if small or (not linked and self._clones):
                if self._copy(descriptor, path, state, small):
                    self._still_is(path, os.fstat(descriptor))
                    return None
            kept = len(self.descriptors) < self._room
            if kept:
                self.descriptors.append(descriptor)
                target = f"/proc/{os.getpid()}/fd/{descriptor}"
            os.symlink(target, self._target / path)
            return look_of(state)
        finally:
            if not kept:
                os.close(descriptor)

    def _still_is(self, path: str, state: os.stat_result) -> None:
        if self._strict and look_of(state) != self._files[path]:
            raise FilesChanged(path)

    def _copy(self, source: int, path: str, state: os.stat_result, small: bool) -> bool:
        """A reflink, which costs nothing whatever the size; else a copy of what is small."""
        mode = 0o700 if state.st_mode & stat.S_IXUSR else 0o600
        target = os.open(self._target / path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(target, "wb") as file:
            self._clones = self._clones and _clone(source, target)
            if not self._clones:
                if not small:
                    os.unlink(self._target / path)
                    return False
                while piece := os.read(source, _COPY_BYTES):
                    file.write(piece)
                file.flush()
            os.utime(target, ns=(state.st_atime_ns, state.st_mtime_ns))
        return True


def _clone(source: int, target: int) -> bool:
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError:  # another file system, or one that cannot
        return False
    return True


def _is_native(descriptor: int, path: str, state: os.stat_result) -> bool:
    """Programs and libraries are linked: the runtime directory may be mounted noexec."""
    head = os.pread(descriptor, 4, 0)
    if head == b"\x7fELF":
        return True
    return bool(state.st_mode & stat.S_IXUSR) and head[:2] == b"#!" and not path.endswith(".py")
